# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the contents of blocks: copies, publication, preemption."""

from __future__ import annotations

from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, after, emitting, mutant, put, without
from kvcore.pool.block_pool import PoolTransaction
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.trace.calls import Misuse
from kvcore.transitions import (
    TRANSITIONS,
    allocate,
    batches,
    free,
    plan,
    prefix_lookup,
    publish,
    queries,
    slot_request,
    transfers,
    unschedule,
)
from kvcore.types.commands import Command, CopyOnWrite, Free
from kvcore.types.errors import KvcoreError
from kvcore.types.slot_request import SlotRequest
from kvcore.types.values import Hit, KVCacheBlocks, Outcome


@mutant("calls", "REF", "KV-READ", rows=(41,))
def m_fork_no_ref(patcher: Patcher) -> None:
    """A fork shares its parent's blocks without being counted as an owner."""

    patcher.during(TRANSITIONS, "fork", PoolTransaction, "touch", lambda *_: None)


@mutant("calls", "KV-READ", "WRITE-EXCL", rows=(41,))
def m_no_cow(patcher: Patcher) -> None:
    """A shared block is written in place."""
    patcher.replace(plan, "plan_rewrites", lambda *_: ())


@mutant("calls", "KV-READ", rows=(41,))
def m_cow_no_copy(patcher: Patcher) -> None:
    """The block that takes a shared one's place is not filled from it."""
    without(patcher, CopyOnWrite)


@mutant("truncate", "CACHE-KV", "WRITE-EXCL")
def m_keyed_block_written_in_place(patcher: Patcher) -> None:
    """A block that is written again keeps the key of its old content."""

    @patcher.around(plan, "plan_rewrites")
    def only_shared(rewrites: Any, *args: Any) -> Any:
        return tuple(rewrite for rewrite in rewrites(*args) if rewrite.shared)


@mutant("calls", "WAIT-EMPTY", rows=(44,))
def m_free_keeps_count(patcher: Patcher) -> None:
    """A preempted request still counts as computed what it gave back."""

    def keep(before: Any, freed: Any, name: str) -> Any:
        count = before.requests[name].num_computed
        return put(freed, replace(freed.requests[name], num_computed=count))

    after(patcher, "free", keep)


@mutant("three", "CACHE-KV", rows=(72, 80))
def m_preempt_keeps_open_batch_keys(patcher: Patcher) -> None:
    """Keys that the open batch published for a request stay when it leaves the batch."""

    def leave_keys(tx: Transaction, request: RequestState) -> None:
        record = tx.scheduled[request.row]
        if record is not None:
            tx.scheduled = tx.scheduled.set(request.row, None)
            free.cut_tables(tx, request, record.num_computed_before)

    patcher.replace(free, "leave_open_batch", leave_keys)


@mutant("unschedule", "CACHE-KV")
def m_unschedule_keeps_keys(patcher: Patcher) -> None:
    """Keys of what the open batch does not write after all stay."""
    patcher.replace(unschedule, "withdraw", lambda *arguments: arguments[2].unwritten)


@mutant("unschedule", "KV-READ")
def m_unschedule_pulls_hits_away(patcher: Patcher) -> None:
    """The open batch computes less of a request though another one counts those tokens."""
    patcher.replace(unschedule, "check_leaving", lambda *_: None)


@mutant("three", "KV-READ")
def m_hit_in_open_batch_pulled_away(patcher: Patcher) -> None:
    """A request leaves the open batch though another one counts tokens that it was to write."""
    patcher.replace(free, "check_leaving", lambda *_: None)


@mutant("calls", "CACHE-KV", rows=(35,))
def m_abort_publishes_what_it_holds(patcher: Patcher) -> None:
    """Giving back its blocks, a request publishes those that no step has filled yet, too."""

    @patcher.around(TRANSITIONS, "free")
    def free_published(free: Any, before: State, request_id: str) -> Any:
        def change(tx: Transaction) -> None:
            request = tx.request(request_id)
            for group_id, table in enumerate(request.tables):
                for position in range(min(len(table), request.num_hashed(tx.config, group_id))):
                    if tx.device.keys[table[position]] is None:
                        key = request.key(tx.config, group_id, position)
                        tx.device.publish(table[position], key)

        return free(transition(before, change).state, request_id)


@mutant("calls", "CACHED-COUNT", "CACHE-KV", rows=(37,))
def m_publishes_the_whole_prompt(patcher: Patcher) -> None:
    """A chunk publishes every block that it has, as if all of the prompt were computed."""

    @patcher.around(allocate, "publish_blocks")
    def publish_all(publish: Any, tx: Transaction, request: RequestState, _num_tokens: int) -> None:
        size = tx.config.groups[0].block_size
        publish(tx, request, len(request.tables[0]) * size)


@mutant("calls", "CACHE-KV", rows=(38,))
def m_findable_block_freed_for_good(patcher: Patcher) -> None:
    """A released block is given up as if no look-up could find it, and its key stays."""

    def uncached(command: Command) -> Command:
        return Free(command.block, False) if isinstance(command, Free) else command

    emitting(patcher, uncached)


@mutant("calls", "HIT-LONGEST", rows=(39,))
def m_full_hit_leaves_nothing(patcher: Patcher) -> None:
    """A look-up gives the whole prompt, so that no token is left to compute."""

    def longest_of_all(where: State, request: RequestState) -> Hit:
        most = min(len(request.tokens), len(request.block_hashes) * where.config.hash_block_size)
        length = prefix_lookup.aligned(where.config, most)
        length = prefix_lookup.common_length(where, request, length, most)
        return Hit(KVCacheBlocks(prefix_lookup.hit_blocks(where, request, length)), length)

    patcher.replace(queries, "longest_hit", longest_of_all)


@mutant("calls", "COMPUTED-RULE", "KV-READ", rows=(40,))
def m_prefill_starts_at_zero(patcher: Patcher) -> None:
    """Slots are counted from the first token on, on top of the blocks of a hit."""

    @patcher.around(plan, "measure")
    def measure_from_zero(measure: Any, tx: Any, request: Any, wanted: SlotRequest) -> Any:
        return measure(tx, request, replace(wanted, hit=None))


@mutant("calls", "REF", rows=(41,))
def m_cow_keeps_its_source(patcher: Patcher) -> None:
    """A request that got a copy of a shared block still counts as an owner of the block."""

    patcher.during(allocate, "apply_rewrite", PoolTransaction, "release", lambda *_: None)


@mutant("drafts", "ATOMIC-FAIL", "ROWS", rows=(42,), costs="a row that is never read")
def m_fork_fails_half_way(patcher: Patcher) -> None:
    """A fork that fails has taken the child's row already."""

    @patcher.around(TRANSITIONS, "fork")
    def fork_half(fork: Any, before: State, parent_id: str, child_id: str) -> Any:
        try:
            return fork(before, parent_id, child_id)
        except KvcoreError as error:
            half = replace(before, rows=before.rows.append(None))
            return Outcome(half, (), Misuse(type(error).__name__, error.fields))


@mutant("calls", "WRITE-EXCL", "KV-READ", rows=(43,))
def m_full_shared_block_written_in_place(patcher: Patcher) -> None:
    """A shared block that has a key is taken for the request's own, and written in place."""

    @patcher.around(plan, "plan_rewrites")
    def rewrite_in_place(rewrites: Any, tx: Transaction, request: Any, *args: Any) -> Any:
        planned = []
        for each in rewrites(tx, request, *args):
            block = request.tables[each.group_id][each.position]
            full = tx.device.keys[block] is not None
            planned.append(attrs.evolve(each, shared=False, copied=False) if full else each)
        return tuple(planned)


@mutant("calls", "FULLHIT", "WRITE-EXCL", rows=(39,), costs="the same content is written again")
def m_full_hit_recomputed_in_place(patcher: Patcher) -> None:
    """A full hit gives all blocks and one token less: that one is computed into a hit block."""

    @patcher.around(queries, "longest_hit")
    def longest_of_all(longest: Any, where: State, request: RequestState) -> Any:
        hit, size = longest(where, request), where.config.groups[0].block_size
        num_full = len(request.tokens) // size
        if num_full * size < len(request.tokens) or hit.num_tokens != (num_full - 1) * size:
            return hit
        if request.key(where.config, 0, num_full - 1) not in where.device.index:
            return hit
        blocks = prefix_lookup.hit_blocks(where, request, num_full * size)
        return Hit(KVCacheBlocks(blocks), num_full * size - 1)

    patcher.replace(slot_request, "check_hit", lambda *_: None)


@mutant("calls", "PUBLISHED", "REFINE", costs="what would have been a hit is computed again")
def m_full_block_published_late(patcher: Patcher) -> None:
    """A full block becomes findable when a token behind it is computed; the twin is right."""
    for module in (allocate, batches, publish, transfers):

        @patcher.around(module, "publish_blocks")
        def publish_late(blocks: Any, tx: Any, request: Any, count: int, **options: Any) -> None:
            blocks(tx, request, max(0, count - 1), **options)


@mutant("calls", "GROWN", costs="no engine here makes its tables from it")
def m_grown_misses_copy(patcher: Patcher) -> None:
    """The place in a table that a copy takes is missing in what `append` tells."""

    @patcher.around(TRANSITIONS, "append")
    def append_without_copies(append: Any, where: State, *args: Any, **options: Any) -> Any:
        outcome = append(where, *args, **options)
        if not any(isinstance(each, CopyOnWrite) for each in outcome.commands):
            return outcome
        return replace(outcome, value=replace(outcome.value, columns=b""))
