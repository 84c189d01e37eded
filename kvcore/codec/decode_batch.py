# SPDX-License-Identifier: Apache-2.0
"""Decodes batches from their canonical bytes: the open one, and those in flight.

Twin: rust/src/codec/decode_batch.rs.
"""

from __future__ import annotations

from immutables import Map
from pyrsistent import pvector

from kvcore.codec.encode import BATCHES_END
from kvcore.state.batch_records import BatchInFlight, PublishedKey, RequestEntry
from kvcore.state.open_batch import Merge, OpenBatch, ScheduledRequest, UnwrittenBlock
from kvcore.types.commands import Batch, Command, close, named_rows
from kvcore.types.config import Config
from kvcore.types.errors import DamagedBatch
from kvcore.types.wire import Reader


def read_batch(source: Reader, config: Config, rows: list[str | None]) -> OpenBatch:
    """Read the open batch. Raises DamagedState."""
    number = source.u64()
    if number >= BATCHES_END:
        raise source.damaged(f"{number} is not the number of a batch")
    commands = _read_commands(source, number)
    if not all(0 <= row < len(rows) for row in named_rows(commands)):
        raise source.damaged("a command names a row that does not exist")
    scheduled: list[ScheduledRequest | None] = [None] * len(rows)
    scheduled_rows = source.ids(len(rows))
    if scheduled_rows != sorted(set(scheduled_rows)):
        raise source.damaged("the rows of the open batch are not in ascending order")
    for row in scheduled_rows:
        if rows[row] is None:
            raise source.damaged("a free row is in the open batch")
        before, kept = source.u32(), source.u32()
        unwritten = [
            UnwrittenBlock(source.u32(), source.u32(), source.u32(), source.key())
            for _ in range(source.u32())
        ]
        scheduled[row] = ScheduledRequest(before, kept, pvector(unwritten))
    merges = [
        Merge(source.name(), source.u32(), source.u32(), source.u32(), source.key())
        for _ in range(source.u32())
    ]
    entries = _read_entries(source, config, rows, taken=False)
    published_keys = _read_published_keys(source, config)
    return OpenBatch(
        number,
        pvector(commands),
        pvector(scheduled),
        pvector(merges),
        Map(entries),
        pvector(published_keys),
    )


def read_batches_in_flight(
    source: Reader, config: Config, rows: list[str | None]
) -> tuple[BatchInFlight, ...]:
    """Read the batches in flight. Raises DamagedState."""
    batches: list[BatchInFlight] = []
    for _ in range(source.u32()):
        number = source.u64()
        entries = _read_entries(source, config, rows, taken=True)
        published_keys, named = _read_published_keys(source, config), source.ids(len(rows))
        if named != sorted(set(named)) or (batches and number <= batches[-1].number):
            raise source.damaged("the batches in flight are not in ascending order")
        batches.append(BatchInFlight(number, Map(entries), pvector(published_keys), tuple(named)))
    if len(batches) > config.max_in_flight:
        raise source.damaged(f"{len(batches)} batches are in flight")
    return tuple(batches)


def _read_entries(
    source: Reader, config: Config, rows: list[str | None], *, taken: bool
) -> dict[str, RequestEntry]:
    entries: dict[str, RequestEntry] = {}
    for order in range(source.u32()):
        row, before, restore = source.u32(), source.u32(), source.u32()
        publishes = source.flag()
        held = source.numbers() if taken else []
        places = [(source.u32(), source.u32()) for _ in range(source.u32() if taken else 0)]
        request_id = rows[row] if row < len(rows) else None
        if request_id is None or request_id in entries or not config.tracks_batches:
            raise source.damaged("an entry does not belong to a request")
        if len(held) != (len(config.groups) if taken else 0) or places != sorted(set(places)):
            raise source.damaged("the blocks in use by a batch are not in canonical form")
        if any(group_id >= len(held) or at >= held[group_id] for group_id, at in places):
            raise source.damaged("a batch lost places that it does not use")
        entries[request_id] = RequestEntry(
            order, before, restore, publishes, tuple(held), frozenset(places)
        )
    return entries


def _read_published_keys(source: Reader, config: Config) -> list[PublishedKey]:
    published_keys = [(source.u32(), source.key()) for _ in range(source.u32())]
    if any(block >= config.num_blocks for block, _ in published_keys):
        raise source.damaged(f"an id is not below {config.num_blocks}")
    return published_keys


def _read_commands(source: Reader, number: int) -> list[Command]:
    batch = Batch(number, bytearray(source.sized()), source.sized())
    try:
        commands = list(batch)
    except DamagedBatch as error:
        raise source.damaged(str(error)) from None
    if close(number, commands) != batch:
        raise source.damaged("commands are not in canonical form")
    return commands
