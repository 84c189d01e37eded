# SPDX-License-Identifier: Apache-2.0
"""Tokens come as lists or as buffers of integers; the item format decides, nothing is guessed."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from kvcore import Appended, Request, Status
from kvcore.types.errors import (
    EmptyTokens,
    InvalidCount,
    InvalidToken,
    UnknownRequest,
    UnsupportedBuffer,
    WrongArgument,
)
from tests.conftest import Backend
from tests.helpers.misuse import check_error
from tests.helpers.stories import make, serve, step, unchanged

PROMPT = [3, 1, 2, 7, 5]
LEAST = -(2**31)

PLAIN: list[Any] = [
    PROMPT,
    tuple(PROMPT),
    *(array(code, PROMPT) for code in "bBhHiIlLqQ"),
    bytes(PROMPT),
    bytearray(PROMPT),
    memoryview(bytes(PROMPT)),
    memoryview(array("i", [9, *PROMPT, 9]))[1:-1],
    memoryview(array("h", [3, 0, 1, 0, 2, 0, 7, 0, 5]))[::2],
    memoryview(struct.pack("<5I", *PROMPT)).cast("I"),
    range(3, 4),
]


@pytest.mark.parametrize("tokens", PLAIN, ids=repr)
def test_each_form_of_the_same_tokens_gives_the_same_state(tokens: Any, backend: Backend) -> None:
    expected, manager = make("python"), make(backend)
    expected.add_request(Request("a", list(tokens)))
    manager.add_request(Request("a", tokens))
    assert manager.encode() == expected.encode()
    expected.add_tokens("a", list(tokens))
    manager.add_tokens("a", tokens)
    assert manager.encode() == expected.encode()
    assert list(manager.state().requests["a"].tokens) == list(tokens) * 2


EDGES = [0, 1, 255, 256, 257, 2**15, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1]
"""Ints that CPython keeps in other ways: small ones once, those from 2**30 on in two parts."""


@pytest.mark.parametrize("form", [list, tuple])
def test_ints_of_every_size_are_read_from_a_list(form: type, backend: Backend) -> None:
    manager = make(backend)
    tokens = [token for edge in EDGES for token in (edge, *EDGES)]
    manager.add_request(Request("a", form(tokens)))
    assert list(manager.state().requests["a"].tokens) == tokens


WRONG = [-1, -(2**30), -(2**40), 2**32, 2**64, 2**100, True, None, "1", 1.0]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("form", [list, tuple])
def test_a_wrong_item_between_ints_is_named(form: type, wrong: object, backend: Backend) -> None:
    manager = make(backend)
    with unchanged(manager), pytest.raises(InvalidToken) as caught:
        manager.add_request(Request("a", form([*EDGES, wrong, *EDGES])))
    check_error(caught.value, InvalidToken(value=wrong, position=len(EDGES), least=0))


class Numbered(int):
    """An int of another type."""


def test_an_int_of_another_type_counts_as_its_number(backend: Backend) -> None:
    manager = make(backend)
    manager.add_request(Request("a", [7, Numbered(2**20), numpy.int64(9), 7]))
    assert list(manager.state().requests["a"].tokens) == [7, 2**20, 9, 7]


def test_the_largest_token_is_taken_and_the_next_is_not(backend: Backend) -> None:
    manager = make(backend)
    for tokens in ([2**32 - 1], array("I", [2**32 - 1]), array("q", [2**32 - 1])):
        manager.add_request(Request("a", tokens))
        assert list(manager.state().requests["a"].tokens) == [2**32 - 1]
        manager.remove_request("a")
    for tokens in ([2**32], array("q", [2**32])):
        with unchanged(manager), pytest.raises(InvalidToken) as caught:
            manager.add_request(Request("a", tokens))
        check_error(caught.value, InvalidToken(value=4294967296, position=0, least=0))


@pytest.mark.parametrize(
    "tokens",
    [[-1, 5, -(2**31)], array("i", [-1, 5, -(2**31)]), array("q", [-1, 5, -(2**31)])],
    ids=["list", "i", "q"],
)
def test_an_id_below_zero_needs_hashes_of_the_engines_own(tokens: Any, backend: Backend) -> None:
    manager, hashes = make(backend), [b"1" * 32]
    with unchanged(manager), pytest.raises(InvalidToken) as caught:
        manager.add_request(Request("plain", tokens))
    check_error(caught.value, InvalidToken(value=-1, position=0, least=0))
    manager.add_request(Request("own", tokens, block_hashes=hashes))
    manager.add_request(Request("plain", [1, 2, 3]))
    manager.add_tokens("own", [7, numpy.int64(-2)])
    kept = [2**32 - 1, 5, 2**31, 7, 2**32 - 2]
    assert list(manager.state().requests["own"].tokens) == kept
    manager.restore(manager.encode())
    assert list(manager.state().requests["own"].tokens) == kept
    with unchanged(manager):
        for call in (manager.add_tokens, manager.add_drafts):
            with pytest.raises(InvalidToken) as caught:
                call("plain", iter([0, -1]))
            check_error(caught.value, InvalidToken(value=-1, position=1, least=0))
            with pytest.raises(InvalidToken) as caught:
                call("own", [-(2**31) - 1])
            check_error(caught.value, InvalidToken(value=-(2**31) - 1, position=0, least=LEAST))
            with pytest.raises(InvalidToken) as caught:
                call("plain", [-1, "x"])
            check_error(caught.value, InvalidToken(value=-1, position=0, least=0))
            with pytest.raises(InvalidToken) as caught:
                call("own", [-1, "x"])
            check_error(caught.value, InvalidToken(value="x", position=1, least=LEAST))
    manager.add_drafts("own", [-1])
    assert list(manager.state().requests["own"].drafts) == [2**32 - 1]


@pytest.mark.parametrize("wrong", [[LEAST - 1], [2**32], array("q", [2**32]), ["x"]], ids=repr)
def test_the_message_names_the_ids_that_the_call_takes(wrong: Any, backend: Backend) -> None:
    def texts(*hashes: bytes) -> set[str]:
        manager, name = make(backend), "a"
        manager.add_request(Request(name, [1, 2], block_hashes=hashes or None))
        manager.allocate_slots(name, 2)
        step(manager)
        found = set()
        new = Request("new", wrong, block_hashes=hashes or None)
        with unchanged(manager):
            for call in (
                lambda: manager.add_request(new),
                lambda: manager.add_tokens(name, wrong),
                lambda: manager.append([name], wrong),
                lambda: manager.append(array("i", [0]), wrong),
                lambda: manager.add_drafts(name, wrong),
            ):
                with pytest.raises(InvalidToken) as caught:
                    call()
                found.add(str(caught.value))
        return found

    start = f"token {wrong[0]!r} at position 0 of the call is not an integer from"
    assert texts() == {f"{start} 0 to 4294967295"}
    assert texts(b"1" * 32) == {f"{start} -2147483648 to 4294967295"}


def test_append_takes_ids_below_zero_if_all_requests_brought_hashes(backend: Backend) -> None:
    manager = make(backend)
    for name, hashes in (("own", [b"1" * 32]), ("too", [b"2" * 32]), ("plain", None)):
        manager.add_request(Request(name, [1, 2], block_hashes=hashes))
        manager.allocate_slots(name, 2)
    step(manager)
    with unchanged(manager):
        for requests in (["own", "plain"], array("i", [0, 2]), ["own", "nobody"]):
            with pytest.raises(InvalidToken) as caught:
                manager.append(requests, [5, -1])
            check_error(caught.value, InvalidToken(value=-1, position=1, least=0))
        with pytest.raises(UnknownRequest):
            manager.append(array("i", [0, 9]), [5, -1])
    assert manager.append(["own"], [-1]) == Appended(1)
    assert manager.append(array("i", [1]), array("q", [-1])) == Appended(1)
    assert list(manager.state().requests["own"].tokens) == [1, 2, 2**32 - 1]


def test_bytes_are_one_token_each_whatever_they_were_made_of(backend: Backend) -> None:
    manager = make(backend)
    manager.add_request(Request("a", struct.pack("<i", 258)))
    assert list(manager.state().requests["a"].tokens) == [2, 1, 0, 0]


def test_what_changes_later_does_not_change_the_request(backend: Backend) -> None:
    manager = make(backend)
    listed, buffer = [1, 2], array("i", [1, 2])
    manager.add_request(Request("a", listed))
    manager.add_request(Request("b", buffer))
    with unchanged(manager):
        listed[0] = buffer[0] = 9
    assert list(manager.state().requests["b"].tokens) == [1, 2]


def test_numpy_arrays_are_read_by_their_type(backend: Backend) -> None:
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    manager = make(backend)
    for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        manager.add_request(Request("a", np.array(PROMPT, dtype=kind)))
        assert list(manager.state().requests["a"].tokens) == PROMPT
        manager.remove_request("a")
    strided = np.array([[3, 1, 2, 7, 5], [0, 0, 0, 0, 0]], dtype=np.int32).T[:, 0]
    manager.add_request(Request("a", strided))
    assert list(manager.state().requests["a"].tokens) == PROMPT
    for array_, error in (
        (np.array([[1, 2]]), UnsupportedBuffer(name="tokens", format="l", dimensions=2)),
        (np.array([1.0]), UnsupportedBuffer(name="tokens", format="d", dimensions=1)),
        (np.array([True]), UnsupportedBuffer(name="tokens", format="?", dimensions=1)),
        (np.array(3), UnsupportedBuffer(name="tokens", format="l", dimensions=0)),
        (np.array([1], dtype=">i4"), UnsupportedBuffer(name="tokens", format=">i", dimensions=1)),
        (np.array([4, -2]), InvalidToken(value=-2, position=1, least=0)),
        (np.array([], dtype=np.int32), EmptyTokens(request="b")),
    ):
        with unchanged(manager), pytest.raises(type(error)) as caught:
            manager.add_request(Request("b", array_))
        check_error(caught.value, error)


@pytest.mark.parametrize("rows", [array("i", [1, 0]), array("q", [1, 0]), b"\1\0"], ids=repr)
def test_append_takes_rows_from_a_buffer(rows: Any, backend: Backend) -> None:
    by_name, by_row = make(backend), make(backend)
    for manager in (by_name, by_row):
        for request_id in ("a", "b"):
            manager.add_request(Request(request_id, [1, 2]))
            manager.allocate_slots(request_id, 2)
        step(manager)
    assert by_name.append(["b", "a"], [8, 9]) == Appended(2)
    assert by_row.append(rows, array("i", [8, 9])) == Appended(2)
    assert by_row.encode() == by_name.encode()
    assert list(by_row.state().requests["b"].tokens) == [1, 2, 8]


def test_append_of_nothing_is_no_change(backend: Backend) -> None:
    manager = make(backend)
    with unchanged(manager):
        assert manager.append([], []) == Appended(0)
        assert manager.append(array("i"), array("i")) == Appended(0)
        assert manager.append([], [], batch=9) == manager.append([], batch=9) == Appended(0)
        with pytest.raises(InvalidCount):
            manager.append([], [], batch=-1)


def test_append_without_tokens_schedules_those_to_come(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [1])
    manager.take_batch()
    assert manager.append(["a"]) == Appended(1)
    assert (manager.num_computed_tokens("a"), manager.num_output_placeholders("a")) == (2, 1)
    assert manager.append([]) == Appended(0)


class Three:
    """A number of another library."""

    def __index__(self) -> int:
        return 3


def test_numbers_of_other_libraries_are_tokens(backend: Backend) -> None:
    manager = make(backend)
    manager.add_request(Request("a", [Three(), numpy.int64(4), numpy.uint8(5)]))
    manager.allocate_slots("a", 3)
    manager.take_batch()
    first: Any = numpy.int64(0)
    manager.append(["a"], [numpy.int32(6)], batch=first)
    assert list(manager.state().requests["a"].tokens) == [3, 4, 5, 6]
    for wrong in (numpy.int64(-1), numpy.float32(1.0), numpy.bool_(True)):
        with unchanged(manager), pytest.raises(InvalidToken) as caught:
            manager.add_tokens("a", [7, wrong])
        assert caught.value.fields == {"position": 1, "value": wrong, "least": 0}


@pytest.mark.parametrize("tokens", [{1, 2}, frozenset({1}), {1: 2}], ids=repr)
def test_what_has_no_order_is_no_row_of_tokens(tokens: Any, backend: Backend) -> None:
    manager = make(backend)
    with unchanged(manager), pytest.raises(WrongArgument) as caught:
        manager.add_request(Request("a", tokens))
    assert caught.value.fields["value"] is tokens


ITERABLES: dict[str, Any] = {
    "keys": lambda ids: dict.fromkeys(ids).keys(),
    "values": lambda ids: dict(enumerate(ids)).values(),
    "generator": lambda ids: (each for each in ids),
    "iterator": iter,
    "deque": deque,
}


@pytest.mark.parametrize("form", ITERABLES)
def test_any_iterable_of_ids_names_requests(form: str, backend: Backend) -> None:
    manager, named = make(backend), ITERABLES[form]
    for request_id in ("a", "b"):
        serve(manager, request_id, [1])
    manager.take_batch()
    assert manager.append(named(["b", "a"]), [5, 6]) == Appended(2)
    manager.take_batch()
    assert [manager.num_tokens(each) for each in ("a", "b")] == [2, 2]
    for ids, wrong in ((["a", "z"], "z"), (["a", 1], 1)):
        with unchanged(manager), pytest.raises(UnknownRequest) as caught:
            manager.append(named(ids), [5, 6])
        assert caught.value.fields == {"request": wrong}
    assert manager.append(iter([1]), iter([7])) == Appended(1)  # a row
    assert manager.num_tokens("b") == 3
    for no_ids in ({"a"}, {"a": 1}, OnlyNext()):
        with pytest.raises(WrongArgument, match="must be a list of ids or a buffer of rows"):
            manager.append(no_ids, [5])
    for words in (numpy.array(["a", "b"]), numpy.array(["a", "b"], dtype=object)):
        with pytest.raises(UnsupportedBuffer, match="requests"):
            manager.append(words, [5, 6])
    with pytest.raises(UnknownRequest, match="in row -1"):
        manager.append(OnlyNumpy(), [5])


def test_an_iterator_may_call_the_manager(backend: Backend) -> None:
    manager, order = make(backend), []
    for request_id in ("a", "b"):
        serve(manager, request_id, [1])
    manager.take_batch()

    def ids() -> Iterator[str]:
        order.append("ids")
        manager.free("b")
        yield "a"

    def tokens() -> Iterator[int]:
        order.append("tokens")
        manager.add_tokens("b", [8])
        yield 5

    assert manager.append(ids(), tokens()) == Appended(1)
    assert order == ["ids", "tokens"]
    assert (manager.status("b"), manager.num_tokens("b")) == (Status.WAITING, 2)


class OnlyNext:
    """Has a next item, but is not iterable."""

    def __next__(self) -> str:
        return "a"


class OnlyNumpy:
    """Returns an array, and has no items itself."""

    def numpy(self) -> list[int]:
        return [-1]
