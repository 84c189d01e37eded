# SPDX-License-Identifier: Apache-2.0
"""Rows of bad input: a world, a call that is wrong in it, and the error that it must give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvcore import KVCacheManager
from kvcore.trace.calls import Call
from kvcore.types.errors import KvcoreError
from tests.conftest import Backend

World = Callable[[Backend], KVCacheManager]


@attrs.frozen
class Row:
    """One wrong call. error: with the fields that the raised one must have."""

    world: World
    call: Call
    error: KvcoreError

    def __str__(self) -> str:
        return f"{type(self.error).__name__} {self.call}"


def bad(world: World, error: KvcoreError, name: str, *args: Any, **options: Any) -> Row:
    """Return a row. args and options: those of the call of this name."""
    return Row(world, Call(name, args, options), error)


def rows_by_call(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each call, by its name, in their order."""
    by_call: dict[str, list[Row]] = {}
    for row in rows:
        by_call.setdefault(row.call.name, []).append(row)
    return by_call


def check_error(raised: KvcoreError, expected: KvcoreError) -> None:
    """Assert type, fields and message; the message mentions each field, of a long one its start."""
    assert type(raised) is type(expected)
    assert raised.fields == expected.fields
    assert str(raised) == str(expected)
    for value in raised.fields.values():
        starts = (text[:100] for text in (str(value), repr(value)))
        assert any(start in str(raised) for start in starts)
