# SPDX-License-Identifier: Apache-2.0
"""Reads tokens passed by an engine: lists, or buffers of integers; and keeps those of a request.

Invariants: a buffer's item format decides how it is read (bytes are one token each); nothing is
guessed. An item with `__index__` becomes that int. Unordered collections (a set, a dict) are
refused. A negative id, which only a request with its own hashes may have, is kept as an unsigned
integer of 32 bits: -1 as 2**32 - 1.
Twin: rust/src/bindings/tokens.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from kvcore.types.arguments import read_int
from kvcore.types.errors import (
    ConcurrentCall,
    EmptyTokens,
    InvalidToken,
    UnknownRow,
    UnsupportedBuffer,
    WrongArgument,
)

MAX_TOKEN = 2**32 - 1
LEAST_SIGNED = -(2**31)
TOKENS = ("tokens", "a list or a buffer of integers")
ROWS = ("requests", "a list of ids or a buffer of rows")
CHUNK_BYTES = 1024
_INTEGER_FORMATS = frozenset("bBhHiIlLqQ")


class PackedTokens(Struct, frozen=True, gc=False):
    """Token ids of 4 bytes each, in chunks, of which one is copied where some are appended.

    full: the full chunks. last: the bytes behind them. length: the number of tokens, a field since
    each call reads it several times. Why: the garbage collector walks a young pyrsistent vector
    down to its last item, and a decoded token would make one; it does not track what is here.
    """

    full: tuple[bytes, ...] = ()
    last: bytes = b""
    length: int = 0

    def extend(self, tokens: Iterable[int]) -> PackedTokens:
        """Return these tokens with more behind them."""
        more = tuple(tokens)
        return _chunks(self.full, self.last + struct.pack(f"{len(more)}I", *more))

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        data = b"".join((*self.full, self.last)) if self.full else self.last
        return iter(memoryview(data).cast("I"))

    def __getitem__(self, part: slice) -> PackedTokens:
        """Return the tokens of a slice without a step."""
        start, end, _ = part.indices(self.length)
        first, end = 4 * start // CHUNK_BYTES, max(start, end)
        chunks = (*self.full, self.last)[first : 4 * end // CHUNK_BYTES + 1]
        before = first * CHUNK_BYTES
        return _chunks((), b"".join(chunks)[4 * start - before : 4 * end - before])


def read_tokens(
    tokens: Any, argument: tuple[str, str] = TOKENS, *, signed: bool = False
) -> list[int]:
    """Return the token ids of a list, tuple or buffer.

    Buffers: anything with the buffer protocol, or with a `numpy()` method (torch on the CPU).
    argument: its name and expected form, for errors. signed: whether ids from -2**31 on are
    allowed. Raises InvalidToken for a value below 0 or -2**31, or above 2**32 - 1,
    UnsupportedBuffer for another shape or format, WrongArgument for any other value.
    """
    values = (
        list(tokens) if isinstance(tokens, list | tuple | range) else _read_buffer(tokens, argument)
    )
    return check_tokens(values, signed=signed)


def read_named(requests: Any) -> tuple[list[Any] | None, list[int]]:
    """Return the ids or the rows of the requests that a call names; the other is None.

    Rows are a buffer, or an iterable of ints other than a list or tuple. Raises what `read_tokens`
    raises, and UnknownRequest for a bad row.
    """
    if isinstance(requests, list | tuple):
        return list(requests), []
    values = _read_buffer(requests, ROWS)
    if not hasattr(requests, "numpy") and any(isinstance(each, str) for each in values):
        return values, []
    try:
        return None, check_tokens(values)
    except InvalidToken as error:
        raise UnknownRow(row=error.fields["value"]) from None


def read_request_tokens(request_id: str, tokens: Any, *, signed: bool) -> list[int]:
    """Return the tokens of a request, at least one. Raises EmptyTokens, and what `read_tokens`
    raises.
    """
    values = read_tokens(tokens, signed=signed)
    if not values:
        raise EmptyTokens(request=request_id)
    return values


def check_tokens(values: Sequence[Any], *, signed: bool = False) -> list[int]:
    """Return the values as ints. Raises InvalidToken for the first that is not a token id."""
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN:
        return list(values)
    least, checked = LEAST_SIGNED if signed else 0, []
    for position, value in enumerate(values):
        number = value if type(value) is int else read_int(value)
        is_int = isinstance(number, int) and not isinstance(value, bool)
        if not is_int or not least <= number <= MAX_TOKEN:
            raise InvalidToken(position=position, value=value, least=least)
        checked.append(number & MAX_TOKEN)
    return checked


def _read_buffer(tokens: Any, argument: tuple[str, str]) -> list[int]:
    name, expected = argument
    try:
        tokens = tokens.numpy() if hasattr(tokens, "numpy") else tokens
    except ConcurrentCall:
        raise
    except Exception as error:  # a tensor that is not on the CPU, or whose dtype numpy lacks
        raise WrongArgument(name=name, expected=expected, value=tokens) from error
    try:
        view = memoryview(tokens)
    except TypeError:
        if isinstance(tokens, Iterable) and not isinstance(tokens, str | set | frozenset | dict):
            return list(tokens)
        raise WrongArgument(name=name, expected=expected, value=tokens) from None
    except (ValueError, BufferError) as error:
        raise WrongArgument(name=name, expected=expected, value=tokens) from error
    code = view.format.lstrip("@=<")
    if view.ndim != 1 or code not in _INTEGER_FORMATS:
        raise UnsupportedBuffer(name=name, format=view.format, dimensions=view.ndim)
    if view.format == code:
        return view.tolist()
    order, items = view.format.removesuffix(code), len(view)
    return list(struct.unpack(f"{order}{items}{code}", view.tobytes()))


def _chunks(full: tuple[bytes, ...], data: bytes) -> PackedTokens:
    length = (len(full) * CHUNK_BYTES + len(data)) // 4
    if len(data) < CHUNK_BYTES:
        return PackedTokens(full, data, length)
    ends = range(CHUNK_BYTES, len(data) + 1, CHUNK_BYTES)
    more = tuple(data[end - CHUNK_BYTES : end] for end in ends)
    return PackedTokens(full + more, data[ends[-1] :], length)
