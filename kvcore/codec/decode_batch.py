# SPDX-License-Identifier: Apache-2.0
"""Batches from their canonical bytes: the open one, and those that are unfinished.

Rules: as in decode.py. Twin: rust/src/codec/decode_batch.rs.
"""

from __future__ import annotations

from immutables import Map
from pyrsistent import pvector

from kvcore.codec.encode import BATCHES_END
from kvcore.state.batch_records import Given, Mark, Unfinished
from kvcore.state.open_batch import BatchRecord, Merge, OpenBatch, Published
from kvcore.types.commands import Batch, Command, close, named_rows
from kvcore.types.config import Config
from kvcore.types.errors import DamagedBatch
from kvcore.types.wire import Reader


def read_batch(source: Reader, config: Config, rows: list[str | None]) -> OpenBatch:
    """The open batch of the next bytes. Raises DamagedState."""
    number = source.u64()
    if number >= BATCHES_END:
        raise source.damaged(f"{number} is the number of no batch")
    commands = _read_commands(source, number)
    if not all(0 <= row < len(rows) for row in named_rows(commands)):
        raise source.damaged("a command names a row that is not there")
    records: dict[str, BatchRecord] = {}
    scheduled = source.ids(len(rows))
    if scheduled != sorted(set(scheduled)):
        raise source.damaged("the rows of the open batch do not rise")
    for row in scheduled:
        request_id = rows[row]
        if request_id is None:
            raise source.damaged("a free row is in the open batch")
        before = source.u32()
        published = [
            Published(source.u32(), source.u32(), source.u32(), source.key())
            for _ in range(source.u32())
        ]
        records[request_id] = BatchRecord(before, pvector(published))
    merges = [
        Merge(source.name(), source.u32(), source.u32(), source.u32(), source.key())
        for _ in range(source.u32())
    ]
    marks = _read_marks(source, config, rows, taken=False)
    given = _read_given(source, config)
    return OpenBatch(
        number, pvector(commands), Map(records), pvector(merges), Map(marks), pvector(given)
    )


def read_unfinished(
    source: Reader, config: Config, rows: list[str | None]
) -> tuple[Unfinished, ...]:
    """The unfinished batches of the next bytes. Raises DamagedState."""
    batches: list[Unfinished] = []
    for _ in range(source.u32()):
        number = source.u64()
        marks = _read_marks(source, config, rows, taken=True)
        given, named = _read_given(source, config), source.ids(len(rows))
        if named != sorted(set(named)) or (batches and number <= batches[-1].number):
            raise source.damaged("the unfinished batches do not rise")
        batches.append(Unfinished(number, Map(marks), pvector(given), tuple(named)))
    if len(batches) > config.max_in_flight:
        raise source.damaged(f"{len(batches)} batches are unfinished")
    return tuple(batches)


def _read_marks(
    source: Reader, config: Config, rows: list[str | None], *, taken: bool
) -> dict[str, Mark]:
    marks: dict[str, Mark] = {}
    for order in range(source.u32()):
        row, before, restore = source.u32(), source.u32(), source.u32()
        publishes = source.flag()
        held = source.numbers() if taken else []
        places = [(source.u32(), source.u32()) for _ in range(source.u32() if taken else 0)]
        request_id = rows[row] if row < len(rows) else None
        if request_id is None or request_id in marks or not config.tracks_batches:
            raise source.damaged("a mark is of no request")
        if len(held) != (len(config.groups) if taken else 0) or places != sorted(set(places)):
            raise source.damaged("what a batch uses is not in its canonical form")
        if any(group >= len(held) or at >= held[group] for group, at in places):
            raise source.damaged("a batch does not use the places that it lost")
        marks[request_id] = Mark(order, before, restore, publishes, tuple(held), frozenset(places))
    return marks


def _read_given(source: Reader, config: Config) -> list[Given]:
    given = [(source.u32(), source.key()) for _ in range(source.u32())]
    if any(block >= config.num_blocks for block, _ in given):
        raise source.damaged(f"an id is not below {config.num_blocks}")
    return given


def _read_commands(source: Reader, number: int) -> list[Command]:
    batch = Batch(number, bytearray(source.sized()), source.sized())
    try:
        commands = list(batch)
    except DamagedBatch as error:
        raise source.damaged(str(error)) from None
    if close(number, commands) != batch:
        raise source.damaged("commands are not in their canonical form")
    return commands
