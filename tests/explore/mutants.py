# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs: each puts one mistake into the production transitions.

The first of three files: pool, tables, hits, swaps. Rules: a mutant is a function that patches the
core, the world in which it shows, and the properties that must find it, each on its own. A mutant
that no property can find because only hits are lost is not here: the text traces catch those
(`test_mutants.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvcore import (
    allocate,
    asked,
    block_pool,
    caching,
    calls,
    plan,
    release,
    requests,
    state,
    swap,
    truncate,
)
from kvcore.block_pool import PoolDraft
from kvcore.commands import CopyOnWrite, CutTable, Free, SwapIn, SwapOut, Touch
from kvcore.effects import Effects
from kvcore.free_queue import FreeQueueDraft
from kvcore.hash_index import HashIndexDraft
from kvcore.hashing import hash_block
from kvcore.state import Draft, RequestState
from kvcore.values import Refused
from tests.explore.seeding import after, mutant, put, without
from tests.explore.worlds import world

BASIC = world(2, 2, 3, enable_events=True)
ONE = world(2, 1, 4, enable_events=True)
NULL = world(3, 1, 2, null_block=True)
CUT = world(2, 2, 3, "truncate", enable_events=True)
SWAP = world(2, 2, 3, "swap_out", "swap_in", num_host_blocks=2)
PAIRS = world(2, 2, 3, "truncate", calls_per_batch=2)
TRIPLES = world(3, 2, 3, calls_per_batch=3, without=("append", "remove_request"))
SWAP_TRIPLES = world(1, 2, 2, "swap_out", "swap_in", num_host_blocks=1, calls_per_batch=3)


@mutant(BASIC, "PARTITION")
def m_touch_not_dequeued(patcher: pytest.MonkeyPatch) -> None:
    def touch(self: PoolDraft, block: int) -> None:
        if self.ref_counts[block] == 0:
            self.effects.emit(Touch(block))
        self.ref_counts[block] += 1

    patcher.setattr(PoolDraft, "touch", touch)


@mutant(ONE, "FQ-UNIQ")
def m_queue_counter_drifts(patcher: pytest.MonkeyPatch) -> None:
    remove = FreeQueueDraft.remove

    def remove_uncounted(self: FreeQueueDraft, block: int) -> None:
        remove(self, block)
        self.length += 1

    patcher.setattr(FreeQueueDraft, "remove", remove_uncounted)


@mutant(NULL, "NULL")
def m_null_block_handed_out(patcher: pytest.MonkeyPatch) -> None:
    make_pool = block_pool.make_pool

    def with_null(num_blocks: int, **options: Any) -> Any:
        return make_pool(num_blocks, **options, order=range(num_blocks))

    patcher.setattr(state, "make_pool", with_null)


@mutant(ONE, "IDX-SOUND")
def m_evict_keeps_index(patcher: pytest.MonkeyPatch) -> None:
    def remove(self: HashIndexDraft, key: bytes, block: int) -> bool:
        return self.first(key) == block

    patcher.setattr(HashIndexDraft, "remove", remove)


@mutant(ONE, "IDX-COMPLETE")
def m_evict_keeps_key(patcher: pytest.MonkeyPatch) -> None:
    def unpublish(self: PoolDraft, block: int) -> None:
        key = self.keys[block]
        if key is not None and self.index.first(key) == block:
            self.index.remove(key, block)

    patcher.setattr(PoolDraft, "unpublish", unpublish)


@mutant(ONE, "REF")
def m_alloc_ref0(patcher: pytest.MonkeyPatch) -> None:
    take = PoolDraft.take

    def take_unowned(self: PoolDraft, count: int) -> list[int]:
        blocks = take(self, count)
        for block in blocks:
            self.ref_counts[block] = 0
        return blocks

    patcher.setattr(PoolDraft, "take", take_unowned)


@mutant(BASIC, "REF", "KV-READ")
def m_fork_no_ref(patcher: pytest.MonkeyPatch) -> None:
    fork = calls.TRANSITIONS["fork"]

    def fork_untouched(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PoolDraft, "touch", lambda *_: None)
            return fork(*args)

    patcher.setitem(calls.TRANSITIONS, "fork", fork_untouched)


@mutant(BASIC, "KV-READ", "WRITE-EXCL")
def m_no_cow(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(plan, "plan_rewrites", lambda *_: ())


@mutant(BASIC, "KV-READ")
def m_cow_no_copy(patcher: pytest.MonkeyPatch) -> None:
    without(patcher, CopyOnWrite)


@mutant(CUT, "CACHE-KV", "WRITE-EXCL")
def m_keyed_block_written_in_place(patcher: pytest.MonkeyPatch) -> None:
    rewrites = plan.plan_rewrites

    def only_shared(*args: Any) -> Any:
        return tuple(rewrite for rewrite in rewrites(*args) if rewrite.shared)

    patcher.setattr(plan, "plan_rewrites", only_shared)


@mutant(BASIC, "NO-ALIAS", "KV-READ")
def m_touch_after_alloc(patcher: pytest.MonkeyPatch) -> None:
    commit, touch, take = allocate.commit, PoolDraft.touch, PoolDraft.take

    def commit_late(*args: Any) -> Any:
        late: list[int] = []

        def take_first(self: PoolDraft, count: int) -> list[int]:
            blocks = take(self, count)
            for block in late:
                touch(self, block)
            return blocks

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PoolDraft, "touch", lambda _, block: late.append(block))
            inner.setattr(PoolDraft, "take", take_first)
            return commit(*args)

    patcher.setattr(allocate, "commit", commit_late)


@mutant(BASIC, "NOCRASH")
def m_hits_cost_no_capacity(patcher: pytest.MonkeyPatch) -> None:
    find, refuse = plan.needed_hits, plan.refuse
    queued: list[int] = []

    def note_queued(draft: Draft, *rest: Any) -> Any:
        hits = find(draft, *rest)
        queued[:] = [sum(draft.device.ref_counts[block] == 0 for block in hits)]
        return hits

    def refuse_fewer(draft: Draft, needed: int, *rest: Any) -> Refused | None:
        return refuse(draft, needed - sum(queued), *rest)

    patcher.setattr(plan, "needed_hits", note_queued)
    patcher.setattr(plan, "refuse", refuse_fewer)


@mutant(ONE, "LEAK")
def m_free_forgets_a_block(patcher: pytest.MonkeyPatch) -> None:
    give_back = PoolDraft.release

    def give_back_some(self: PoolDraft, blocks: Sequence[int]) -> None:
        give_back(self, blocks[1:])

    patcher.setattr(PoolDraft, "release", give_back_some)


@mutant(ONE, "WAIT-EMPTY")
def m_free_keeps_count(patcher: pytest.MonkeyPatch) -> None:
    def keep(before: Any, freed: Any, name: str) -> Any:
        count = before.requests[name].num_computed
        return put(freed, attrs.evolve(freed.requests[name], num_computed=count))

    after(patcher, "free", keep)


@mutant(ONE, "TABLEN", "TABLE-MIRROR")
def m_table_misses_a_block(patcher: pytest.MonkeyPatch) -> None:
    grow = allocate.grow

    def grow_less(*args: Any) -> Any:
        table = grow(*args)
        return table.delete(len(table) - 1) if len(table) > len(args[3]) else table

    patcher.setattr(allocate, "grow", grow_less)


@mutant(ONE, "CACHED-COUNT")
def m_cached_before_it_is_full(patcher: pytest.MonkeyPatch) -> None:
    publish = caching.publish_blocks

    def publish_more(draft: Draft, request: RequestState, num_tokens: int) -> None:
        publish(draft, request, num_tokens)
        done = draft.request(request.request_id)
        draft.store(attrs.evolve(done, num_cached=tuple(1 + n for n in done.num_cached)))

    patcher.setattr(allocate, "publish_blocks", publish_more)


@mutant(CUT, "REQ-HASH")
def m_truncate_keeps_hashes(patcher: pytest.MonkeyPatch) -> None:
    def keep(before: Any, cut: Any, name: str) -> Any:
        hashes = before.requests[name].block_hashes
        return put(cut, attrs.evolve(cut.requests[name], block_hashes=hashes))

    after(patcher, "truncate", keep)


@mutant(BASIC, "CACHE-KEY", "CACHE-KV")
def m_publishes_the_key_before(patcher: pytest.MonkeyPatch) -> None:
    publish = PoolDraft.publish
    last: list[bytes] = []

    def publish_last(self: PoolDraft, block: int, key: bytes) -> None:
        last.append(key)
        publish(self, block, last[-2:][0])

    patcher.setattr(PoolDraft, "publish", publish_last)


@mutant(ONE, "COMPUTED")
def m_append_forgets_its_token(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(allocate, "extend", lambda _draft, request, _tokens: request)
    patcher.setattr(asked, "check_length", lambda *_: None)


@mutant(ONE, "ROWS")
def m_remove_keeps_row(patcher: pytest.MonkeyPatch) -> None:
    def keep(before: Any, removed: Any, _name: str) -> Any:
        return attrs.evolve(removed, free_rows=before.free_rows)

    after(patcher, "remove_request", keep)


@mutant(PAIRS, "OPEN-BATCH")
def m_record_survives_leaving(patcher: pytest.MonkeyPatch) -> None:
    leave = release.leave_open_batch

    def leave_record(draft: Draft, request: RequestState) -> None:
        records = draft.records
        leave(draft, request)
        draft.records = records

    patcher.setattr(release, "leave_open_batch", leave_record)


@mutant(PAIRS, "CACHE-KV")
def m_preempt_keeps_open_batch_keys(patcher: pytest.MonkeyPatch) -> None:
    def leave_keys(draft: Draft, request: RequestState) -> None:
        record = draft.records.get(request.request_id)
        if record is not None:
            draft.records = draft.records.delete(request.request_id)
            release.cut_tables(draft, request, record.num_computed_before)

    patcher.setattr(release, "leave_open_batch", leave_keys)


@mutant(PAIRS, "COMPUTED-RULE")
def m_leaving_keeps_count(patcher: pytest.MonkeyPatch) -> None:
    def leave_counted(draft: Draft, request: RequestState) -> None:
        if request.request_id in draft.records:
            draft.records = draft.records.delete(request.request_id)

    patcher.setattr(truncate, "leave_open_batch", leave_counted)


@mutant(TRIPLES, "KV-READ")
def m_hit_in_open_batch_pulled_away(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(release, "check_leaving", lambda *_: None)


@mutant(SWAP, "KV-READ")
def m_swap_out_no_copy(patcher: pytest.MonkeyPatch) -> None:
    without(patcher, SwapOut)


@mutant(SWAP, "KV-READ")
def m_swap_in_no_copy(patcher: pytest.MonkeyPatch) -> None:
    without(patcher, SwapIn)


@mutant(SWAP_TRIPLES, "KV-READ")
def m_swap_in_hits_unwritten(patcher: pytest.MonkeyPatch) -> None:
    find = swap.find_hits

    def find_all(draft: Draft, found: list[RequestState]) -> Any:
        records, draft.records = draft.records, draft.records.__class__()
        hits = find(draft, found)
        draft.records = records
        return hits

    patcher.setattr(swap, "find_hits", find_all)


@mutant(BASIC, "TABLE-MIRROR")
def m_cut_table_not_told(patcher: pytest.MonkeyPatch) -> None:
    without(patcher, CutTable)


@mutant(ONE, "OWNER-MIRROR")
def m_free_not_told(patcher: pytest.MonkeyPatch) -> None:
    without(patcher, Free)


@mutant(BASIC, "ADMIT-EXACT")
def m_needs_one_block_less(patcher: pytest.MonkeyPatch) -> None:
    refuse = plan.refuse

    def refuse_more(draft: Draft, needed: int, available: int, *rest: Any) -> Refused | None:
        refused = refuse(draft, needed + 1, available, *rest)
        return None if refused is None else attrs.evolve(refused, needed=needed)

    patcher.setattr(plan, "refuse", refuse_more)


@mutant(ONE, "EVT-COPY")
def m_eviction_not_announced(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Effects, "announce_removed", lambda *_: None)


@mutant(ONE, "HASH-INJ")
def m_hash_without_parent(patcher: pytest.MonkeyPatch) -> None:
    def hash_unchained(parent: bytes, tokens: Sequence[int], size: int, **_: Any) -> list[bytes]:
        root = bytes(len(parent))
        starts = range(0, len(tokens) - size + 1, size)
        return [hash_block(root, tokens[at : at + size]) for at in starts]

    patcher.setattr(requests, "hash_blocks", hash_unchained)


@mutant(BASIC, "ATOMIC-FAIL")
def m_refusal_counts_a_lookup(patcher: pytest.MonkeyPatch) -> None:
    def refuse_counted(draft: Draft, asked: Any) -> Any:
        planned = plan.plan_allocation(draft, asked)
        if isinstance(planned, plan.Refusal):
            draft.stats = draft.stats.observe(1, 0, preempted=False)
        return planned

    patcher.setattr(allocate, "plan_allocation", refuse_counted)


@mutant(BASIC, "RESET")
def m_reset_in_use(patcher: pytest.MonkeyPatch) -> None:
    def reset(before: Any) -> Any:
        def change(draft: Draft) -> bool:
            draft.device.clear_index()
            return True

        return state.transition(before, change)

    patcher.setitem(calls.TRANSITIONS, "reset_prefix_cache", reset)
