# SPDX-License-Identifier: Apache-2.0
"""Commands for a runtime, as plain data with ids only.

Invariants: a batch is a list of commands, to be executed in order. Segments mark where order
matters: inside a segment no block is written twice, read after it was written, or written after it
was read. A batch is exported as int32 columns, so torch, numpy or another rank can take it without
a Python loop. The numbers of the kinds are part of the format.
Twin: rust/src/types/commands.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import astuple

from kvcore.types.errors import DamagedBatch
from kvcore.types.keys import KEY_SIZE

COLUMNS = ("kind", "segment", "a", "b", "c", "d")
Tier = Literal["device", "host"]


class Command(Struct, frozen=True, gc=False):
    """One thing that a runtime must do."""

    kind: ClassVar[int]

    def reads(self) -> tuple[Tier, int] | None:
        """Return the block whose content this command reads, None if it reads none."""
        return None

    def writes(self) -> tuple[Tier, int] | None:
        """Return the block whose content this command writes, None if it writes none."""
        return None


class Allocate(Command, frozen=True):
    """The block has a new owner; its content is undefined until it is written."""

    kind = 1
    block: int


class Touch(Command, frozen=True):
    """The block has an owner again; its content is kept (a hit or a pin)."""

    kind = 2
    block: int


class Evict(Command, frozen=True):
    """The content of the block is no longer findable under this key."""

    kind = 3
    block: int
    key: bytes


class EvictAll(Command, frozen=True):
    """No content is findable any more."""

    kind = 4


class Free(Command, frozen=True):
    """The block has no owner any more; cached: its content can still be hit."""

    kind = 5
    block: int
    cached: bool


class Zero(Command, frozen=True):
    """Fill the block with zeros before it is first read."""

    kind = 6
    block: int

    def writes(self) -> tuple[Tier, int]:
        return ("device", self.block)


class CopyOnWrite(Command, frozen=True):
    """Copy a block that is about to be written and has other owners."""

    kind = 7
    source: int
    target: int

    def reads(self) -> tuple[Tier, int]:
        return ("device", self.source)

    def writes(self) -> tuple[Tier, int]:
        return ("device", self.target)


class SwapOut(Command, frozen=True):
    """Copy a device block to a host block."""

    kind = 8
    block: int
    host_block: int

    def reads(self) -> tuple[Tier, int]:
        return ("device", self.block)

    def writes(self) -> tuple[Tier, int]:
        return ("host", self.host_block)


class SwapIn(Command, frozen=True):
    """Copy a host block to a device block."""

    kind = 9
    host_block: int
    block: int

    def reads(self) -> tuple[Tier, int]:
        return ("host", self.host_block)

    def writes(self) -> tuple[Tier, int]:
        return ("device", self.block)


class Store(Command, frozen=True):
    """Copy a block to the external store under this key; the operation may fail."""

    kind = 10
    operation: int
    block: int
    key: bytes

    def reads(self) -> tuple[Tier, int]:
        return ("device", self.block)


class Load(Command, frozen=True):
    """Fill a block with the content of this key in the external store; the operation may fail."""

    kind = 11
    operation: int
    key: bytes
    block: int

    def writes(self) -> tuple[Tier, int]:
        return ("device", self.block)


class SetTable(Command, frozen=True):
    """Put a block at a position of a request's block table in one group."""

    kind = 12
    row: int
    group_id: int
    position: int
    block: int


class CutTable(Command, frozen=True):
    """Shorten a request's block table in one group to `length` blocks."""

    kind = 13
    row: int
    group_id: int
    length: int


KINDS: dict[int, type[Command]] = {
    each.kind: each
    for each in (
        *(Allocate, Touch, Evict, EvictAll, Free, Zero),
        *(CopyOnWrite, SwapOut, SwapIn, Store, Load, SetTable, CutTable),
    )
}

COPIES = frozenset({Zero, CopyOnWrite, SwapOut, SwapIn, Store, Load})
"""The commands that read or write the content of a block."""

FIELDS = {kind: each.__struct_fields__ for kind, each in KINDS.items()}
"""The names of the value columns of each kind."""

KEY_FIELDS = {Evict.kind: 1, Store.kind: 2, Load.kind: 1}
"""For each kind, the value column that is an index into a batch's keys."""

PADDING = tuple((0,) * (4 - length) for length in range(5))
"""Padding of the value columns of a command, by its number of fields."""


def _size(data: bytes | bytearray) -> str:
    return f"<{len(data)} bytes>"


class Batch(Struct, frozen=True, gc=False):
    """The commands of one engine step, closed and numbered.

    buffer: int32 little-endian, C order, shape [6, n], rows as in COLUMNS. keys: concatenated keys
    of KEY_SIZE bytes; key fields in the columns are indices into them. epoch: number of the weights
    that its forward pass runs with.
    """

    number: int
    buffer: bytearray
    keys: bytes
    epoch: int = 0

    def __repr__(self) -> str:
        buffer, keys = _size(self.buffer), _size(self.keys)
        epoch = f", epoch={self.epoch!r}" if self.epoch else ""
        return f"Batch(number={self.number!r}, buffer={buffer}, keys={keys}{epoch})"

    def __len__(self) -> int:
        return len(self.buffer) // (4 * len(COLUMNS))

    def column(self, name: str) -> memoryview:
        """Return one column as int32 values, without a copy."""
        size = 4 * len(self)
        start = COLUMNS.index(name) * size
        return memoryview(self.buffer)[start : start + size].cast("i")

    def __iter__(self) -> Iterator[Command]:
        """Yield the commands, in order. Raises DamagedBatch."""
        if len(self.buffer) % (4 * len(COLUMNS)) or len(self.keys) % KEY_SIZE:
            sizes = f"{len(self.buffer)} bytes of columns and {len(self.keys)} bytes of keys"
            raise self.damaged(f"it is cut off: {sizes}")
        num_keys = len(self.keys) // KEY_SIZE
        rows = zip(*(self.column(name).tolist() for name in COLUMNS), strict=True)
        for at, (kind, _segment, *values) in enumerate(rows):
            if kind not in KINDS:
                raise self.damaged(f"command {at} has kind {kind}")
            key = values[KEY_FIELDS[kind]] if kind in KEY_FIELDS else 0
            if kind in KEY_FIELDS and not 0 <= key < num_keys:
                raise self.damaged(f"command {at} has key {key} of {num_keys}")
            yield from_row(kind, values, self.keys)

    def damaged(self, reason: str) -> DamagedBatch:
        """Return the error for this batch."""
        return DamagedBatch(batch=self.number, reason=reason)


def from_row(kind: int, values: Sequence[int], keys: bytes) -> Command:
    """Return the command of one row of the columns; the inverse of `close`."""
    if kind == Free.kind:
        return Free(values[0], bool(values[1]))
    command = KINDS[kind]
    fields: list[int | bytes] = list(values[: len(FIELDS[kind])])
    if kind in KEY_FIELDS:
        start = values[KEY_FIELDS[kind]] * KEY_SIZE
        fields[KEY_FIELDS[kind]] = keys[start : start + KEY_SIZE]
    return command(*fields)


def segments(commands: Sequence[Command]) -> list[int]:
    """Return the segment number of each command, ascending from 0; a hazard opens a new segment."""
    if COPIES.isdisjoint(map(type, commands)):
        return [0] * len(commands)
    numbers = []
    current = 0
    read: set[tuple[Tier, int]] = set()
    written: set[tuple[Tier, int]] = set()
    for command in commands:
        source, target = command.reads(), command.writes()
        if source in written or (target is not None and (target in written or target in read)):
            current += 1
            read.clear()
            written.clear()
        if source is not None:
            read.add(source)
        if target is not None:
            written.add(target)
        numbers.append(current)
    return numbers


def close(number: int, commands: Sequence[Command], epoch: int = 0) -> Batch:
    """Return the batch of these commands, as columns with segments."""
    if not commands:  # most steps of decoding, and most states that are encoded
        return Batch(number, bytearray(), b"", epoch)
    keys = list[bytes]()
    # One list of ints: a tuple per row would trigger the garbage collector, which walks the state.
    rows: list[int] = []
    for command, segment in zip(commands, segments(commands), strict=True):
        kind, values = command.kind, astuple(command)
        if kind in KEY_FIELDS:
            at = KEY_FIELDS[kind]
            keys.append(values[at])
            values = (*values[:at], len(keys) - 1, *values[at + 1 :])
        rows += (kind, segment, *values, *PADDING[len(values)])
    columns: list[int] = []
    for column in range(len(COLUMNS)):
        columns += rows[column :: len(COLUMNS)]
    packed = struct.pack(f"<{len(columns)}i", *columns)
    return Batch(number, bytearray(packed), b"".join(keys), epoch)


def named_rows(commands: Iterable[Command]) -> tuple[int, ...]:
    """Return the rows whose tables the commands change, ascending."""
    return tuple(sorted({each.row for each in commands if isinstance(each, SetTable | CutTable)}))


def places_set(commands: Iterable[Command]) -> list[tuple[int, int, int]]:
    """Return the places of tables that the commands set, in order: group, position, block."""
    sets = (each for each in commands if isinstance(each, SetTable))
    return [(each.group_id, each.position, each.block) for each in sets]
