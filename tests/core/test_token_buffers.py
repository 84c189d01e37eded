# SPDX-License-Identifier: Apache-2.0
"""Tokens come as lists or buffers of integers: both backends read the same, or refuse the same."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.types.errors import (
    EmptyTokens,
    InvalidToken,
    KvcoreError,
    UnknownRequest,
    UnsupportedBuffer,
)
from tests.conftest import Backend

TOKENS = [7, 0, 100, 3, 3, 90, 1]


def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of nine blocks of two tokens, with a request of one token."""
    managed = KVCacheManager(Config(10, 2, hash_seed=b"seed"), backend)
    managed.add_request(Request("a", [1]))
    return managed


def state_with(backend: Backend, tokens: Any) -> bytes:
    """Return the state's bytes after these tokens were added."""
    managed = manager(backend)
    managed.add_tokens("a", tokens)
    return managed.encode()


def error_of(backend: Backend, tokens: Any) -> KvcoreError:
    """Return the error of `add_tokens` for these tokens; the state stays the same."""
    managed = manager(backend)
    before = managed.encode()
    with pytest.raises(KvcoreError) as caught:
        managed.add_tokens("a", tokens)
    assert managed.encode() == before
    return caught.value


class Tensor:
    """The part of a torch tensor that the reader uses: no buffer, but a `numpy()` that has one."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def numpy(self) -> array.array[int]:
        """Return the values as a buffer."""
        return array.array("q", self.values)


def misaligned(values: list[int]) -> memoryview:
    """Make int32 items that start at an odd address."""
    return memoryview(b"\0" + array.array("i", values).tobytes())[1:].cast("i")


def strided(values: list[int]) -> memoryview:
    """Return every second item of a buffer with wrong items between them."""
    return memoryview(array.array("q", [item for value in values for item in (value, -1)]))[::2]


def backwards(values: list[int]) -> memoryview:
    """Return a buffer that is read from its end."""
    return memoryview(array.array("H", values[::-1]))[::-1]


def ctypes_array(values: list[int]) -> ctypes.Array[ctypes.c_int32]:
    """Return a buffer whose format states its byte order."""
    return (ctypes.c_int32 * len(values))(*values)


KINDS: list[Callable[[list[int]], Any]] = [
    *(tuple, bytes, bytearray, iter),
    *(Tensor, misaligned, strided, backwards, ctypes_array),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_row_is_read_as_its_list(
    backend: Backend, kind: Callable[[list[int]], Any]
) -> None:
    assert state_with(backend, kind(TOKENS)) == state_with(backend, TOKENS)


@pytest.mark.parametrize("code", "bBhHiIlLqQ")
def test_every_width_of_integer_is_read(backend: Backend, code: str) -> None:
    assert state_with(backend, array.array(code, TOKENS)) == state_with(backend, TOKENS)


def test_a_range_is_read(backend: Backend) -> None:
    assert state_with(backend, range(9, 0, -2)) == state_with(backend, [9, 7, 5, 3, 1])


def test_tokens_reach_the_largest_of_32_bits(backend: Backend) -> None:
    last = 2**32 - 1
    for code in "IQq":
        assert state_with(backend, array.array(code, [last])) == state_with(backend, [last])


@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"])
def test_numpy_arrays_are_read_whatever_their_strides(backend: Backend, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    row = numpy.array(TOKENS, dtype=kind)
    wide = numpy.array([TOKENS, TOKENS[::-1]], dtype=kind)
    expected = state_with(backend, TOKENS)
    for tokens in (row, row[::-1][::-1], wide[0], wide.T.copy()[:, 0], wide[1, ::-1]):
        assert state_with(backend, tokens) == expected
    same = numpy.broadcast_to(numpy.array(5, dtype=kind), 3)
    assert state_with(backend, same) == state_with(backend, [5, 5, 5])


@pytest.mark.parametrize(
    ("tokens", "position", "value"),
    [
        ([1, -1], 1, -1),
        ([2**32], 0, 4294967296),
        ([2**70], 0, 2**70),
        ([True], 0, True),
        ([1, 2, 1.0], 2, 1.0),
        (["1"], 0, "1"),
        ([None], 0, None),
        (range(1, -2, -1), 2, -1),
        ((3, -(2**70)), 1, -(2**70)),
        (array.array("b", [5, -128]), 1, -128),
        (array.array("i", [-1]), 0, -1),
        (array.array("q", [0, 2**32]), 1, 4294967296),
        (array.array("Q", [2**64 - 1]), 0, 2**64 - 1),
        (misaligned([1, 2, -3]), 2, -3),
        (Tensor([-7]), 0, -7),
    ],
)
def test_a_value_that_is_no_token_is_named(
    backend: Backend, tokens: Any, position: int, value: Any
) -> None:
    error = error_of(backend, tokens)
    assert type(error) is InvalidToken
    assert error.fields == {"position": position, "value": value, "least": 0}


@pytest.mark.parametrize(
    ("tokens", "format_", "dimensions"),
    [
        (array.array("f", [1.0]), "f", 1),
        (array.array("d", [1.0]), "d", 1),
        (memoryview(b"ab").cast("?"), "?", 1),
        (memoryview(b"ab").cast("c"), "c", 1),
        (memoryview(bytes(4)).cast("B", (2, 2)), "B", 2),
        (memoryview(bytes(1)).cast("B", ()), "B", 0),
    ],
)
def test_a_buffer_of_anything_else_is_refused(
    backend: Backend, tokens: Any, format_: str, dimensions: int
) -> None:
    error = error_of(backend, tokens)
    assert type(error) is UnsupportedBuffer
    assert error.fields == {"name": "tokens", "format": format_, "dimensions": dimensions}


@pytest.mark.parametrize("kind", [">i4", "f4", "?", "c16", "i4,i4"])
def test_a_numpy_array_of_anything_else_is_refused(backend: Backend, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    tokens = numpy.zeros(3, dtype=kind)
    error = error_of(backend, tokens)
    assert type(error) is UnsupportedBuffer
    assert error.fields == {"name": "tokens", "format": memoryview(tokens).format, "dimensions": 1}


@pytest.mark.parametrize("tokens", [[], (), b"", range(0), array.array("i"), Tensor([])])
def test_no_tokens_are_too_few(backend: Backend, tokens: Any) -> None:
    error = error_of(backend, tokens)
    assert type(error) is EmptyTokens
    assert error.fields == {"request": "a"}


def test_an_unknown_request_is_named_before_its_tokens(backend: Backend) -> None:
    with pytest.raises(KvcoreError, match="request 'x' is not known"):
        manager(backend).add_tokens("x", [-1])
    with pytest.raises(KvcoreError, match="request 'a' is there already"):
        manager(backend).add_request(Request("a", "no tokens"))


@pytest.mark.parametrize("rows", [array.array("i", [1, 0]), [1, 0], b"\1\0", range(1, -1, -1)])
def test_rows_name_requests_as_their_ids_do(backend: Backend, rows: Any) -> None:
    named, counted = manager(backend), manager(backend)
    for managed in (named, counted):
        managed.add_request(Request("b", [2]))
        for request_id in ("a", "b"):
            managed.allocate_slots(request_id, 1)
        managed.take_batch()
    if isinstance(rows, list):
        rows = array.array("q", rows)
    assert named.append(["b", "a"], [8, 9]) == counted.append(rows, array.array("I", [8, 9]))
    assert named.encode() == counted.encode()


def test_a_row_without_request_is_named_before_the_tokens(backend: Backend) -> None:
    managed = manager(backend)
    with pytest.raises(KvcoreError, match="request in row 3 is not known"):
        managed.append(array.array("i", [0, 3]), "no tokens")
    with pytest.raises(UnknownRequest, match="request in row -1 is not known"):
        managed.append(array.array("i", [0, -1]), [1, 1])
    with pytest.raises(UnknownRequest, match="request 0 is not known"):  # an id stands among them
        managed.append((each for each in [0, "a"]), [1, 1])
