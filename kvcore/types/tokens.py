# SPDX-License-Identifier: Apache-2.0
"""Tokens as they come from an engine: lists, or buffers of integers.

Invariants: a buffer's item format decides how it is read (bytes are one token each); nothing is
guessed. An item with `__index__` is that int. An unordered collection (a set, a dict) is refused.
An id below 0, which a request with hashes of its own may have, is kept as its 32 bits without a
sign: -1 as 2**32 - 1.
Twin: rust/src/bindings/tokens.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.types.arguments import read_int
from kvcore.types.errors import (
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
_INTEGER_FORMATS = frozenset("bBhHiIlLqQ")


def read_tokens(
    tokens: Any, argument: tuple[str, str] = TOKENS, *, signed: bool = False
) -> list[int]:
    """The token ids of a list, tuple or buffer.

    Buffers: anything with the buffer protocol, or with a `numpy()` method (torch on the CPU).
    argument: its name, and what it must be. signed: whether ids from -2**31 on are taken. Raises
    InvalidToken for a value outside [0, 2**32), UnsupportedBuffer for another shape or format,
    WrongArgument for what is neither.
    """
    values = (
        list(tokens) if isinstance(tokens, list | tuple | range) else _read_buffer(tokens, argument)
    )
    return check_tokens(values, signed=signed)


def read_named(requests: Any) -> tuple[list[Any] | None, list[int]]:
    """Which requests a call names: ids in a list, a tuple or another iterable with one, else rows.

    The first is None for rows, which are a buffer, or an iterable of ints that is no list or tuple.
    Raises what `read_tokens` raises, and UnknownRequest for what is no row.
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
    """The same, at least one. Raises EmptyTokens too."""
    values = read_tokens(tokens, signed=signed)
    if not values:
        raise EmptyTokens(request=request_id)
    return values


def check_tokens(values: Sequence[Any], *, signed: bool = False) -> list[int]:
    """The ints that the values stand for. Raises InvalidToken at the first that is no token id."""
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_TOKEN:
        return list(values)
    least, checked = LEAST_SIGNED if signed else 0, []
    for position, value in enumerate(values):
        number = value if type(value) is int else read_int(value)
        is_int = isinstance(number, int) and not isinstance(value, bool)
        if not is_int or not least <= number <= MAX_TOKEN:
            raise InvalidToken(position=position, value=value)
        checked.append(number & MAX_TOKEN)
    return checked


def _read_buffer(tokens: Any, argument: tuple[str, str]) -> list[int]:
    name, expected = argument
    try:
        tokens = tokens.numpy() if hasattr(tokens, "numpy") else tokens
    except Exception as error:  # a tensor that is not on the CPU, or has no type of numpy's
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
