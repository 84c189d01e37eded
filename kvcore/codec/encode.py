# SPDX-License-Identifier: Apache-2.0
"""Encodes a state as canonical bytes: equal states, and only those, have equal bytes.

The bytes are the same in both languages. The format is little-endian. A count precedes the items
that it counts. Requests are in row order, everything else in the order of the state. The index is
written as each block's key and the block's position among the blocks of that key. Newer fields
follow in sections (`sections.py`).
`decode.py` is the inverse.
Twin: rust/src/codec/encode.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from kvcore.codec.sections import write_sections
from kvcore.pool.block_pool import BlockPool
from kvcore.state.batch_records import BatchInFlight, PublishedKey, RequestEntry, in_order
from kvcore.state.open_batch import OpenBatch
from kvcore.state.state import RequestState, State
from kvcore.types.commands import close
from kvcore.types.config import EVICTIONS, Config, Duplicates, Publish
from kvcore.types.event_log import write_event
from kvcore.types.extra_inputs import NO_EXTRA_KEYS, ExtraKeys
from kvcore.types.groups import KINDS
from kvcore.types.keys import HASHINGS
from kvcore.types.wire import Writer

MAGIC = b"kvcore state 4\n"
NO_KEYS = bytes(10)
"""No adapter, no media item, no salt, no embeddings."""
_BLOCK, _LAST = struct.Struct("<IB").pack, struct.Struct("<BII").pack
OWN_POLICY = 255
"""Stands for a user-defined eviction policy, which cannot be encoded."""
DUPLICATES: tuple[Duplicates, ...] = ("keep", "merge")
PUBLISH: tuple[Publish, ...] = ("scheduled", "completed")
"""Values of `Config.publish`, by their numbers in the bytes."""
OWNERS_END = 2**30
"""Exclusive bound of a block's number of owners."""
BATCHES_END = 2**63
"""Exclusive bound of the open batch's number."""


Write = Callable[["Writer", Any], None]
Part = Callable[[Write, Any], bytes]


def encode(state: State, part: Part | None = None) -> bytes:
    """Return the canonical bytes of a state.

    part: returns the bytes of a config, pool or request, for callers that cache them.
    """
    part, out = part or _part_bytes, Writer(MAGIC)
    out.data += part(_write_config, state.config)
    for pool in (state.device, state.host):
        if pool is not None:
            out.data += part(_write_pool, pool)
    out.u32(len(state.rows))
    for request_id in state.rows:
        out.u8(request_id is not None)
        if request_id is not None:
            out.data += part(_write_request, state.requests[request_id])
    out.numbers(state.free_rows)
    _write_batch(out, state, state.batch)
    out.u32(len(state.in_flight))
    for batch in state.in_flight:
        _write_batch_in_flight(out, state, batch)
    out.u32(len(state.events))
    for event in state.events:
        write_event(out, event)
    stats = state.stats
    for value in (stats.requests, stats.queries, stats.hits):
        out.u64(value)
    for value in (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits):
        out.u64(value)
    out.u8(stats.reset)
    for blocks in state.new_blocks:
        out.numbers(blocks)
    _write_operations(out, state)
    write_sections(out, state)
    return bytes(out.data)


def _part_bytes(write: Write, value: Any) -> bytes:
    """Return the bytes of one part of a state."""
    out = Writer()
    write(out, value)
    return bytes(out.data)


def _write_config(out: Writer, config: Config) -> None:
    out.u32(config.num_blocks)
    out.u32(len(config.groups))
    for group in config.groups:
        out.u32(group.block_size)
        out.u8(KINDS.index(group.kind))
        out.u32(group.window or group.draft_states)
        out.u8(group.eagle)
        out.u8(group.zero_new_blocks)
        out.u64(group.page_bytes or 0)
    out.u32(config.num_host_blocks)
    out.u32(config.max_model_len or 0)
    out.u32(config.max_num_batched_tokens or 0)
    out.u8(config.enable_caching)
    out.u8(config.null_block)
    named = isinstance(config.eviction, str)
    out.u8(EVICTIONS.index(config.eviction) if named else OWN_POLICY)
    out.u8(DUPLICATES.index(config.duplicates))
    out.u8(HASHINGS.index(config.hashing))
    out.u32(config.num_preallocate_tokens)
    out.u32(config.watermark_blocks)
    out.u8(config.use_eagle)
    out.u8(config.enable_events)
    out.u8(config.record_new_blocks)
    out.sized(config.hash_seed)
    out.u32(config.max_in_flight)
    out.u8(PUBLISH.index(config.publish))


def _write_pool(out: Writer, pool: BlockPool) -> None:
    ranks = pool.index.ranks()
    for block, (ref_count, key) in enumerate(zip(pool.ref_counts, pool.keys, strict=True)):
        out.data += _BLOCK(ref_count, key is not None)
        if key is not None:
            out.sized(key)
            out.u32(ranks[block])
    out.numbers(pool.queue)
    pins = sorted(pool.pins.items())
    out.numbers(block for block, _ in pins)
    out.numbers(count for _, count in pins)
    quarantine = pool.quarantine
    out.numbers(() if quarantine is None else quarantine)
    busy = [] if quarantine is None else sorted(quarantine.busy.items())
    out.u32(len(busy))
    for block, numbers in busy:
        out.u32(block)
        out.u32(len(numbers))
        for number in sorted(numbers):
            out.u64(number)


def _write_request(out: Writer, request: RequestState) -> None:
    out.sized(request.request_id.encode())
    out.numbers(request.tokens)
    out.numbers(request.drafts)
    out.u32(len(request.block_hashes))
    out.data += b"".join(request.block_hashes)
    out.data += bytes((request.own_hashes, request.skip_reading))
    _write_extra_keys(out, request.extra_keys)
    out.u32(request.num_computed)
    for table, num_cached in zip(request.tables, request.num_cached, strict=True):
        out.numbers(table)
        out.u32(num_cached)
    out.u8(bool(request.host_tables))
    for table in request.host_tables:
        out.numbers(table)
    out.data += _LAST(request.preempted, request.num_loading, request.load_end)


def _write_extra_keys(out: Writer, extra_keys: ExtraKeys) -> None:
    if extra_keys is NO_EXTRA_KEYS:
        out.data += NO_KEYS
        return
    out.u8(extra_keys.lora is not None)
    if extra_keys.lora is not None:
        out.sized(extra_keys.lora.name.encode())
        out.sized(extra_keys.lora.path.encode())
    out.u32(len(extra_keys.media))
    for item in extra_keys.media:
        out.sized(item.identifier.encode())
        out.u32(item.offset)
        out.u32(item.length)
    out.text(extra_keys.cache_salt)
    out.u32(len(extra_keys.embeds))
    out.data += b"".join(extra_keys.embeds)


def _write_batch(out: Writer, state: State, batch: OpenBatch) -> None:
    closed = close(batch.number, batch.commands)
    out.u64(batch.number)
    out.sized(closed.buffer)
    out.sized(closed.keys)
    scheduled = [(row, record) for row, record in enumerate(batch.scheduled) if record]
    out.numbers([row for row, _ in scheduled])
    for _, record in scheduled:
        out.u32(record.num_computed_before)
        out.u32(record.num_kept)
        out.u32(len(record.unwritten))
        for item in record.unwritten:
            for value in (item.group_id, item.position, item.block):
                out.u32(value)
            out.sized(item.key)
    out.u32(len(batch.merges))
    for merge in batch.merges:
        out.sized(merge.request_id.encode())
        for value in (merge.group_id, merge.position, merge.block):
            out.u32(value)
        out.sized(merge.key)
    entries = in_order(batch.entries)
    out.u32(len(entries))
    for request_id, entry in entries:
        _write_entry(out, state, request_id, entry)
    _write_published_keys(out, batch.published_keys)


def _write_entry(out: Writer, state: State, request_id: str, entry: RequestEntry) -> None:
    for value in (state.requests[request_id].row, entry.before, entry.restore):
        out.u32(value)
    out.u8(entry.publishes)


def _write_published_keys(out: Writer, published_keys: Sequence[PublishedKey]) -> None:
    out.u32(len(published_keys))
    for block, key in published_keys:
        out.u32(block)
        out.sized(key)


def _write_batch_in_flight(out: Writer, state: State, batch: BatchInFlight) -> None:
    out.u64(batch.number)
    entries = in_order(batch.entries)
    out.u32(len(entries))
    for request_id, entry in entries:
        _write_entry(out, state, request_id, entry)
        out.numbers(entry.held)
        out.u32(len(entry.replaced))
        for place in sorted(entry.replaced):
            for value in place:
                out.u32(value)
    _write_published_keys(out, batch.published_keys)
    out.numbers(batch.rows)


def _write_operations(out: Writer, state: State) -> None:
    out.u32(len(state.operations))
    for number, operation in sorted(state.operations.items()):
        out.u32(number)
        out.u32(operation.block)
        out.sized(operation.key)
        out.u64(operation.batch)
        out.text(operation.request_id)
        out.u32(operation.first_token)
    out.u32(state.next_operation)
