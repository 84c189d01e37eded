# SPDX-License-Identifier: Apache-2.0
"""Drained events: a sequence whose items are made when they are read.

Rules: the twin hands out one buffer a drain, in the canonical form of encode.py; whoever only
forwards or counts events never pays for the objects. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvcore.codec.decode import read_event
from kvcore.codec.encode import Writer, write_event
from kvcore.codec.reader import Reader
from kvcore.types.events import Event


class Events(Sequence[Event]):
    """Events in order; equals any list or tuple of the same events.

    data: the events' canonical bytes one after the other. count: how many they are.
    """

    __slots__ = ("_count", "_data", "_items")

    def __init__(self, data: bytes, count: int) -> None:
        self._data: bytes | None = data
        self._count = count
        self._items: tuple[Event, ...] | None = None

    @classmethod
    def of(cls, items: Sequence[Event]) -> Events:
        """These events."""
        made = cls(b"", len(items))
        made._items, made._data = tuple(items), None
        return made

    def to_bytes(self) -> bytes:
        """The canonical bytes."""
        if self._data is None:
            out = Writer(b"")
            for event in self._read():
                write_event(out, event)
            self._data = bytes(out.data)
        return self._data

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Event]:
        return iter(self._read())

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | Sequence[Event]:
        return self._read()[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Events | list | tuple):
            return NotImplemented
        return len(self) == len(other) and self._read() == tuple(other)

    __hash__ = None  # type: ignore[assignment] # compares equal to lists

    def __repr__(self) -> str:
        return f"Events({list(self._read())!r})"

    def _read(self) -> tuple[Event, ...]:
        if self._items is None:
            source = Reader(self._data or b"")
            self._items = tuple(read_event(source) for _ in range(self._count))
        return self._items
