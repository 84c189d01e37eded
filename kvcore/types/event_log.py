# SPDX-License-Identifier: Apache-2.0
"""Drained events as canonical bytes, and as a sequence whose items are made on access.

Why: the twin returns one buffer per drain, so a caller that only forwards or counts events never
pays for the objects. Twin: rust/src/types/event_log.rs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvcore.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.types.extra_inputs import ExtraKey, is_extra_key
from kvcore.types.keys import HASH_SIZE
from kvcore.types.wire import Reader, Writer

STORED, REMOVED, CLEARED, STORED_IN_EPOCH = 0, 1, 2, 3
"""The numbers of the kinds of events in canonical bytes; the last one has an epoch above 0."""


class Events(Sequence[Event]):
    """Events in order; equals any list or tuple of the same events.

    data: the concatenated canonical bytes of the events. count: number of events.
    """

    __slots__ = ("_count", "_data", "_items")

    def __init__(self, data: bytes, count: int) -> None:
        self._data: bytes | None = data
        self._count = count
        self._items: tuple[Event, ...] | None = None

    @classmethod
    def of(cls, items: Sequence[Event]) -> Events:
        """Make the sequence of these events."""
        made = cls(b"", len(items))
        made._items, made._data = tuple(items), None
        return made

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        if self._data is None:
            out = Writer()
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


def read_event(source: Reader) -> Event:
    """Read the next event. Raises DamagedState."""
    kind = source.choice(4)
    if kind in (STORED, STORED_IN_EPOCH):
        epoch = source.u32() if kind == STORED_IN_EPOCH else 0
        if (epoch > 0) != (kind == STORED_IN_EPOCH):
            raise source.damaged("an epoch of 0 is not written")
        hashes = tuple(source.hashes())
        parent = source.sized() or None
        if parent is not None and len(parent) != HASH_SIZE:
            raise source.damaged("a parent is not a hash")
        tokens = tuple(source.numbers())
        size, group_id, lora = source.u32(), source.u32(), source.text()
        marked = source.flag()
        if marked and not hashes:
            raise source.damaged("extra keys of no block")
        extra = [_read_extra_keys_of_block(source) for _ in hashes] if marked else []
        return BlockStored(hashes, parent, tokens, size, group_id, lora, tuple(extra), epoch=epoch)
    if kind == REMOVED:
        return BlockRemoved(source.take(HASH_SIZE), source.u32())
    assert kind == CLEARED
    return AllBlocksCleared()


def _read_extra_keys_of_block(source: Reader) -> tuple[ExtraKey, ...]:
    keys = tuple((source.u8(), source.sized()) for _ in range(source.u32()))
    if not all(is_extra_key(tag, value) for tag, value in keys):
        raise source.damaged("an extra key of the wrong form")
    return keys


def write_event(out: Writer, event: Event) -> None:
    """Write one event."""
    match event:
        case BlockStored():
            out.u8(STORED_IN_EPOCH if event.epoch else STORED)
            if event.epoch:
                out.u32(event.epoch)
            out.u32(len(event.block_hashes))
            out.data += b"".join(event.block_hashes)
            out.sized(event.parent_hash or b"")
            out.numbers(event.tokens)
            out.u32(event.block_size)
            out.u32(event.group_id)
            out.text(event.lora_name)
            out.u8(bool(event.extra_keys))
            for keys in event.extra_keys:
                out.u32(len(keys))
                for tag, value in keys:
                    out.u8(tag)
                    out.sized(value)
        case BlockRemoved():
            out.u8(REMOVED)
            out.data += event.block_hash
            out.u32(event.group_id)
        case AllBlocksCleared():
            out.u8(CLEARED)
