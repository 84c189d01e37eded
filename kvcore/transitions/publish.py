# SPDX-License-Identifier: Apache-2.0
"""What is findable: publication of full blocks, and its withdrawal.

Rules: the call that schedules the write of a block's last token publishes the block, so a later
request of the same step may hit it. A key whose block the open batch itself writes is remembered in
the batch's record, since it is withdrawn if the request leaves the batch. With `duplicates="merge"`
a block whose content is findable already waits for `take_batch` instead (X-02). Source: S000-29 to
31, 41, 42, 49. Twin: rust/src/transitions/publish.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace as evolve

from kvcore.state.draft import Draft, transition
from kvcore.state.open_batch import BatchRecord, Merge, Published
from kvcore.state.state import RequestState, State
from kvcore.transitions.in_flight import note_given, num_finished
from kvcore.transitions.unconfirmed_loads import note_keyed
from kvcore.types.arguments import read_count, read_ints
from kvcore.types.errors import BeyondComputed
from kvcore.types.events import AllBlocksCleared, BlockStored
from kvcore.types.values import Outcome


def cache_blocks(state: State, request_id: str, num_computed_tokens: int) -> Outcome[State, None]:
    """Publish a request's full blocks up to so many tokens, whose caching was delayed.

    Nothing happens where caching is off. With `publish="completed"` what unfinished batches write
    waits for their completion. Raises UnknownRequest, SwappedOut, LoadUnfinished,
    InvalidCount, BeyondComputed.
    """

    def change(draft: Draft) -> None:
        request = draft.idle(request_id)
        count = read_count("num_computed_tokens", num_computed_tokens)
        if count > request.num_computed:
            raise BeyondComputed(
                request=repr(request_id), num_computed=request.num_computed, asked=count
            )
        if draft.config.enable_caching:
            if draft.config.publish == "completed":
                count = min(count, num_finished(draft, request))
            publish_blocks(draft, request, min(count, len(request.tokens)))

    return transition(state, change)


def evict_blocks(state: State, block_ids: Iterable[int]) -> Outcome[State, None]:
    """Forget the keys of blocks; owners and places in the free queue stay. Raises UnknownBlock."""
    blocks = read_ints(block_ids)

    def change(draft: Draft) -> None:
        for block in blocks:
            draft.device.check_block(block)
        for block in blocks:
            draft.device.unpublish(block)

    return transition(state, change)


def reset_prefix_cache(state: State) -> Outcome[State, bool]:
    """Forget every key of every tier; value: False, with nothing done, while any block is used."""
    host_used = state.host is not None and state.host.num_free < state.host.num_usable
    if state.device.num_free < state.device.num_usable or host_used:
        return Outcome(state, (), False)

    def change(draft: Draft) -> bool:
        draft.device.clear_index()
        draft.effects.announce(AllBlocksCleared())
        draft.stats = evolve(draft.stats, reset=True)
        return True

    return transition(state, change)


def publish_blocks(
    draft: Draft, request: RequestState, num_tokens: int, *, final: bool = False
) -> None:
    """Publish the full blocks up to so many tokens that are not yet; stores the request.

    final: their content is there, so no cancel withdraws the keys.
    """
    num_cached = list(request.num_cached)
    for index, group in enumerate(draft.config.groups):
        cached = num_cached[index]
        num_full = min(num_tokens // group.block_size, request.num_hashed(draft.config, index))
        if num_full <= cached:
            continue
        run: list[int] = []
        keyed: list[tuple[int, int]] = []
        for position in range(cached, num_full):
            if _publish_block(draft, request, index, position, final):
                run.append(position)
                keyed.append((request.tables[index][position], (position + 1) * group.block_size))
            elif run:
                _note_run(draft, request, index, run)
                run = []
        if run:
            _note_run(draft, request, index, run)
        if keyed and draft.loads:
            note_keyed(draft, request.request_id, keyed)
        num_cached[index] = num_full
    if num_cached != list(request.num_cached):
        draft.store(evolve(request, num_cached=tuple(num_cached)))


def _publish_block(
    draft: Draft, request: RequestState, group: int, position: int, final: bool
) -> bool:
    """Publish one block, or note its merge. True: it became findable."""
    block = request.tables[group][position]
    if draft.is_null(block) or draft.device.keys[block] is not None:
        return False
    key = request.key(draft.config, group, position)
    if draft.config.duplicates == "merge" and draft.device.index.first(key) is not None:
        merge = Merge(request.request_id, group, position, block, key)
        draft.batch = evolve(draft.batch, merges=draft.batch.merges.append(merge))
        return False
    draft.device.publish(block, key)
    if not final:
        note_given(draft, block, key)
    return True


def _note_run(draft: Draft, request: RequestState, group: int, run: list[int]) -> None:
    """Remember published blocks that the open batch writes, and announce all of them."""
    record = draft.records.get(request.request_id)
    if record is not None:
        before = record.num_computed_before
        size, table = draft.config.groups[group].block_size, request.tables[group]
        written = []
        for position in run:
            key = draft.device.keys[table[position]]
            if (position + 1) * size > before and key is not None:
                written.append(Published(group, position, table[position], key))
        record = BatchRecord(before, record.published.extend(written))
        draft.records = draft.records.set(request.request_id, record)
    if draft.effects.events_enabled:
        draft.effects.announce(stored(draft, request, group, run[0], run[-1] + 1))


def stored(draft: Draft, request: RequestState, group: int, first: int, end: int) -> BlockStored:
    """The event that a request's blocks from position first up to end became findable."""
    size, scale = draft.config.groups[group].block_size, draft.config.scale(group)
    hashes, keys, fine = request.block_hashes, request.extra_keys, draft.config.hash_block_size
    if draft.config.hide_salts:
        keys = keys.hide_salt(draft.parent_hash(request, 0))
    extra = [keys.of_block(each * size, (each + 1) * size, fine) for each in range(first, end)]
    return BlockStored(
        block_hashes=tuple(hashes[(each + 1) * scale - 1] for each in range(first, end)),
        parent_hash=hashes[first * scale - 1] if first else None,
        tokens=tuple(request.tokens[first * size : end * size]),
        block_size=size,
        group=group,
        lora_name=None if keys.lora is None else keys.lora.name,
        extra_keys=tuple(extra) if any(extra) else (),
    )
