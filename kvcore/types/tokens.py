# SPDX-License-Identifier: Apache-2.0
"""Reads tokens passed by an engine: lists, or buffers of integers.

Invariants: a buffer's item format decides how it is read (bytes are one token each); nothing is
guessed. An item with `__index__` becomes that int. Unordered collections (a set, a dict) are
refused. A negative id, which only a request with its own hashes may have, is kept as an unsigned
integer of 32 bits: -1 as 2**32 - 1.
Twin: rust/src/bindings/tokens.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

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
_INTEGER_FORMATS = frozenset("bBhHiIlLqQ")


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
