# SPDX-License-Identifier: Apache-2.0
"""Publishes full blocks, and withdraws their keys.

Invariants: the call that schedules the write of a block's last token publishes the block, so a
later request of the same step may hit it. If the open batch itself writes the block, its record
remembers the key, which is withdrawn if the request leaves the batch. With `duplicates="merge"` a
block whose content is already findable waits for `take_batch` instead (X-02).
Source: S000-29 to 31, 41, 42, 49. Twin: rust/src/transitions/publish.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvcore.state.open_batch import Merge, UnwrittenBlock
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.in_flight import note_request, note_written_key, num_finished
from kvcore.transitions.tails.keys import cache_tails, drop_delay
from kvcore.transitions.unconfirmed_loads import note_keyed
from kvcore.types.arguments import read_count, read_ints
from kvcore.types.errors import BeyondComputed
from kvcore.types.events import AllBlocksCleared, BlockStored
from kvcore.types.values import Outcome


def cache_blocks(state: State, request_id: str, num_computed_tokens: int) -> Outcome[State, None]:
    """Publish a request's full blocks up to a token count, after delayed caching.

    Does nothing if caching is off, or for a stale request. With `publish="completed"`, blocks that
    batches in flight write wait for completion. Raises UnknownRequest, SwappedOut, LoadUnfinished,
    InvalidCount, BeyondComputed.
    """

    def change(tx: Transaction) -> None:
        request = tx.idle(request_id)
        count = read_count("num_computed_tokens", num_computed_tokens)
        if count > request.num_computed:
            raise BeyondComputed(
                request=request_id, num_computed=request.num_computed, requested=count
            )
        if tx.config.enable_caching:
            finished = min(count, num_finished(tx, request))
            publish_blocks(tx, request, finished, final=True)
            count = min(count, request.tokens.length)
            if tx.config.publish == "completed":
                count = finished
            publish_blocks(tx, tx.request(request_id), count)
            if tx.config.has_states:
                from kvcore.transitions.checkpoints import cache_state  # few models have states

                cache_state(tx, request, num_computed_tokens, stored)
            cache_tails(tx, tx.request(request_id), count)
            if num_computed_tokens == request.num_computed:
                drop_delay(tx, request_id)

    return transition(state, change)


def evict_blocks(state: State, block_ids: Iterable[int]) -> Outcome[State, None]:
    """Forget the keys of blocks; owners and places in the free queue stay. Raises UnknownBlock."""
    blocks = read_ints(block_ids)

    def change(tx: Transaction) -> None:
        for block in blocks:
            tx.device.check_block(block)
        for block in blocks:
            tx.device.unpublish(block)

    return transition(state, change)


def reset_prefix_cache(state: State) -> Outcome[State, bool]:
    """Forget every key of every tier; value: False, without any change, while a block has
    an owner.
    """
    host_used = state.host is not None and state.host.num_free < state.host.num_usable
    if state.device.num_free < state.device.num_usable or host_used:
        return Outcome(state, (), False)

    def change(tx: Transaction) -> bool:
        tx.device.clear_index()
        tx.effects.announce(AllBlocksCleared())
        tx.stats = replace(tx.stats, reset=True)
        return True

    return transition(state, change)


def publish_blocks(
    tx: Transaction, request: RequestState, num_tokens: int, *, final: bool = False
) -> None:
    """Publish the unpublished full blocks up to a token count, and store the request.

    Does nothing for a stale request. final: their content exists, so no cancel withdraws the keys.
    """
    if tx.is_stale(request):
        return
    num_cached = request.num_cached
    num_hashed = len(request.block_hashes) * tx.config.hash_block_size
    for index, group in enumerate(tx.config.groups):
        if group.is_state:
            continue
        cached, table = num_cached[index], request.tables[index]
        num_full = min(num_tokens, num_hashed) // group.block_size
        if num_full <= cached:
            continue
        run: list[int] = []
        keyed: list[tuple[int, int]] = []
        for position in range(cached, num_full):
            block = table[position]
            has_no_key = not tx.is_null(block) and tx.device.keys[block] is None
            if has_no_key and _publish_block(tx, request, index, position, final):
                run.append(position)
                keyed.append((block, (position + 1) * group.block_size))
            elif run:
                _note_run(tx, request, index, run)
                run = []
        if run:
            _note_run(tx, request, index, run)
        if keyed and tx.loads:
            note_keyed(tx, request.request_id, keyed)
        num_cached = (*num_cached[:index], num_full, *num_cached[index + 1 :])
    if num_cached is not request.num_cached:
        tx.put(replace(request, num_cached=num_cached))


def _publish_block(
    tx: Transaction, request: RequestState, group_id: int, position: int, final: bool
) -> bool:
    """Publish one block, or note its merge. True: it became findable."""
    block = request.tables[group_id][position]
    key = request.key(tx.config, group_id, position)
    if tx.config.duplicates == "merge" and tx.device.index.first(key) is not None:
        merge = Merge(request.request_id, group_id, position, block, key)
        tx.batch = replace(tx.batch, merges=tx.batch.merges.append(merge))
        if tx.config.publish == "scheduled":
            note_request(tx, request.request_id, request.num_computed, request.num_computed)
        return False
    tx.device.publish(block, key, position)
    if tx.config.max_in_flight and not final:
        end = (position + 1) * tx.config.groups[group_id].block_size
        note_written_key(tx, request.request_id, end, block, key)
    return True


def _note_run(tx: Transaction, request: RequestState, group_id: int, run: list[int]) -> None:
    """Remember the published blocks that the open batch writes, and announce all of them."""
    record = tx.scheduled[request.row]
    if record is not None:
        before = record.num_computed_before
        size, table = tx.config.groups[group_id].block_size, request.tables[group_id]
        written = []
        for position in run:
            key = tx.device.keys[table[position]]
            if (position + 1) * size > before and key is not None:
                written.append(UnwrittenBlock(group_id, position, table[position], key))
        record = replace(record, unwritten=record.unwritten.extend(written))
        tx.scheduled = tx.scheduled.set(request.row, record)
    if tx.effects.events_enabled:
        tx.effects.announce(stored(tx, request, group_id, run[0], run[-1] + 1))


def stored(
    tx: Transaction, request: RequestState, group_id: int, first: int, end: int
) -> BlockStored:
    """Make the event that a request's blocks [first, end) became findable."""
    size, scale = tx.config.groups[group_id].block_size, tx.config.scales[group_id]
    hashes, keys, fine = request.block_hashes, request.extra_keys, tx.config.hash_block_size
    if tx.config.hide_salts:
        keys = keys.hide_salt(tx.parent_hash(request, 0))
    extra = [keys.of_block(each * size, (each + 1) * size, fine) for each in range(first, end)]
    return BlockStored(
        block_hashes=tuple(hashes[(each + 1) * scale - 1] for each in range(first, end)),
        parent_hash=hashes[first * scale - 1] if first else None,
        tokens=tuple(request.tokens[first * size : end * size]),
        block_size=size,
        group_id=group_id,
        lora_name=None if keys.lora is None else keys.lora.name,
        extra_keys=tuple(extra) if any(extra) else (),
        epoch=tx.epoch,
    )
