# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of owners, the free queue, and admission."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import attrs
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants.seeding import Patcher, after, mutant, without
from kvcore.check.mutants.worlds import BASIC
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.free_queue import FreeQueueTransaction
from kvcore.state.plan_records import Plan, Refusal
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions import TRANSITIONS, allocate, batches, plan, swap
from kvcore.types.commands import Allocate, Evict, Free, SetTable, Touch
from kvcore.types.slot_request import SlotRequest
from kvcore.types.values import Refused


@mutant("calls", "PARTITION", rows=(21,))
def m_touch_not_dequeued(patcher: Patcher) -> None:
    """A hit on an ownerless block counts an owner and leaves the block in the free queue."""

    def touch(self: PoolTransaction, block: int) -> None:
        if self.ref_counts[block] == 0:
            self.effects.commands.append(Touch(block))
        self.ref_counts[block] += 1

    patcher.replace(PoolTransaction, "touch", touch)


@mutant("calls", "FQ-UNIQ", rows=(27,))
def m_queue_counter_drifts(patcher: Patcher) -> None:
    """The length of the free queue is kept beside it, and taking a block out does not change it."""

    @patcher.around(FreeQueueTransaction, "remove")
    def remove_uncounted(remove: Any, self: FreeQueueTransaction, block: int) -> None:
        remove(self, block)
        self.length += 1


@mutant("calls", "REF", rows=(23,))
def m_alloc_ref0(patcher: Patcher) -> None:
    """A block that is handed out counts no owner."""

    @patcher.around(PoolTransaction, "take")
    def take_unowned(take: Any, self: PoolTransaction, *args: int) -> Any:
        blocks = take(self, *args)
        for block in blocks:
            self.ref_counts[block] = 0
        return blocks


@mutant("calls", "NO-ALIAS", "KV-READ", "HIT-PINNED", rows=(18,))
def m_touch_after_alloc(patcher: Patcher) -> None:
    """New blocks are taken before the hits get their owner, so a hit can be taken away."""

    @patcher.around(allocate, "commit")
    def commit_late(commit: Any, *args: Any) -> Any:
        with Patcher() as inner:
            late = touch_after_taking(inner)
            inner.replace(PoolTransaction, "touch", lambda _, block: late.append(block))
            return commit(*args)


def touch_after_taking(patcher: Patcher) -> list[int]:
    """A list of blocks that get their owner only after new ones were taken."""
    late: list[int] = []
    touch = PoolTransaction.touch

    @patcher.around(PoolTransaction, "take")
    def take_first(take: Any, self: PoolTransaction, *args: int) -> Any:
        blocks = take(self, *args)
        for block in late:
            touch(self, block)
        return blocks

    return late


@mutant("calls", "NOCRASH", rows=(16,))
def m_hits_cost_no_capacity(patcher: Patcher) -> None:
    """Hits in the free queue are counted as room for new blocks, too."""
    find, refuse = plan.needed_hits, plan.refuse
    found: list[tuple[int, ...]] = []

    def note_found(*args: Any) -> Any:
        found[:] = find(*args)
        return tuple(found)

    def refuse_fewer(tx: Transaction, needed: int, *rest: Any) -> Refused | None:
        queued = sum(tx.device.ref_counts[block] == 0 for ids in found for block in ids)
        return refuse(tx, needed - queued, *rest)

    patcher.replace(plan, "needed_hits", note_found)
    patcher.replace(plan, "refuse", refuse_fewer)


@mutant("calls", "LEAK", "PREEMPT-GAIN", "DRAIN")
def m_free_forgets_a_block(patcher: Patcher) -> None:
    """The first block of a release is not given back."""

    @patcher.around(PoolTransaction, "release")
    def give_back_some(give_back: Any, self: PoolTransaction, blocks: Sequence[int]) -> None:
        give_back(self, blocks[1:])


@mutant("calls", "OWNER-MIRROR", costs="a worker that counts owners keeps blocks for used")
def m_free_not_reported(patcher: Patcher) -> None:
    """The worker is not told that a block has no owner any more."""
    without(patcher, Free)


@mutant("calls", "ADMIT-EXACT", "L-ADMIT", "DEADLOCK-FREE")
def m_needs_one_block_less(patcher: Patcher) -> None:
    """A call that fits exactly is refused."""

    @patcher.around(plan, "refuse")
    def refuse_more(refuse: Any, tx: Transaction, needed: int, *rest: Any) -> Refused | None:
        refused = refuse(tx, needed + 1, *rest)
        return None if refused is None else replace(refused, needed=needed)


@mutant("calls", "REF", rows=(24,))
def m_fork_counts_occurrences(patcher: Patcher) -> None:
    """A fork counts another number of holdings than a release gives back."""

    @patcher.around(PoolTransaction, "touch")
    def touch_twice(touch: Any, self: PoolTransaction, block: int) -> None:
        touch(self, block)
        if self.ref_counts[block] > 1:
            self.ref_counts[block] += 1


@mutant("calls", "ATOMIC-FAIL", "REF", rows=(15,), shows=BASIC)
def m_refused_hits_keep_their_owner(patcher: Patcher) -> None:
    """Hits get their owner before it is known whether the call fits, and keep it if not."""

    def plan_touched(tx: Transaction, slot_request: SlotRequest) -> Plan | Refusal:
        planned = plan.plan_allocation(tx, slot_request)
        if isinstance(planned, Refusal) and slot_request.hit is not None:
            for block in chain.from_iterable(slot_request.hit.blocks):
                tx.device.touch(block)
        return planned

    patcher.replace(allocate, "plan_allocation", plan_touched)


@mutant("host", "NOCRASH", rows=(17,))
def m_swap_in_forgets_queued_hits(patcher: Patcher) -> None:
    """Coming back from the host tier, hits in the free queue count as room for copies, too."""
    patcher.replace(TRANSITIONS, "swap_in", swap_in_leaving(0, hits_need_room=False))


def swap_in_leaving(watermarks: int, *, hits_need_room: bool = True) -> Any:
    """Make a `swap_in` that leaves this many watermarks free, even if it needs no block."""

    def swap_in(before: Any, request_ids: Any) -> Any:
        def change(tx: Transaction) -> Refused | None:
            requests = tx.distinct(list(request_ids))
            hits, counts = swap.find_hits(tx, requests), tx.device.ref_counts
            queued = sum(block is not None and not counts[block] for block in hits.values())
            needed = sum(block is None for block in hits.values()) + queued * hits_need_room
            if needed + watermarks * tx.config.watermark_blocks > tx.device.num_free:
                return swap.refuse(tx.device, needed, tx.config.watermark_blocks)
            swap.move_in(tx, requests, hits)
            return None

        return transition(before, change)

    return swap_in


@mutant("calls", "KV-READ", "HIT-PRESERVE", rows=(20,))
def m_hit_resets_its_block(patcher: Patcher) -> None:
    """A hit in the free queue is handed out as any block, and loses its key and content."""

    @patcher.around(PoolTransaction, "touch")
    def touch_anew(touch: Any, self: PoolTransaction, block: int) -> None:
        if self.ref_counts[block]:
            touch(self, block)
            return
        self.queue.remove(block)
        self.unpublish(block)
        self.ref_counts[block] = 1
        self.effects.commands.append(Allocate(block))


@mutant("host", "FQ-UNIQ", rows=(22,))
def m_block_released_twice_in_one_list(patcher: Patcher) -> None:
    """A set's blocks are released in one list, and each naming of a shared one frees it."""

    @patcher.around(swap, "move_out")
    def move_out_at_once(move_out: Any, tx: Transaction, *args: Any) -> None:
        named: list[int] = []
        with Patcher() as inner:
            inner.replace(PoolTransaction, "release", lambda _, blocks: named.extend(blocks))
            move_out(tx, *args)
        for block in named:
            tx.device.ref_counts[block] -= 1
        for block in named:
            if tx.device.ref_counts[block] == 0:
                tx.device.queue.append(block)
                tx.effects.commands.append(Free(block, tx.device.keys[block] is not None))


@mutant("evict", "REF", rows=(25,))
def m_evicting_frees_a_used_block(patcher: Patcher) -> None:
    """A block whose key is evicted goes to the free queue though a request holds it."""
    unpublish = PoolTransaction.unpublish

    def unpublish_and_free(self: PoolTransaction, block: int) -> None:
        unpublish(self, block)
        if self.ref_counts[block]:
            self.ref_counts[block] = 0
            self.queue.append(block)

    pool = PoolTransaction
    patcher.during(TRANSITIONS, "evict_blocks", pool, "unpublish", unpublish_and_free)


@mutant("calls", "LEAK", "REF", rows=(26,))
def m_cache_keeps_an_owner(patcher: Patcher) -> None:
    """The index counts as an owner of what it holds, and eviction does not give that back."""

    @patcher.around(PoolTransaction, "publish")
    def publish_owned(
        publish: Any, self: PoolTransaction, block: int, key: bytes, depth: int = 0
    ) -> None:
        publish(self, block, key, depth)
        self.ref_counts[block] += 1


@mutant("groups", "ATOMIC-FAIL", "LEAK", rows=(28,))
def m_refused_keeps_the_first_groups_block(patcher: Patcher) -> None:
    """The second group's blocks do not fit; what the first one got is not given back."""

    def plan_first_group(tx: Transaction, slot_request: SlotRequest) -> Plan | Refusal:
        planned = plan.plan_allocation(tx, slot_request)
        if isinstance(planned, Refusal) and tx.device.num_free:
            tx.device.take(1)
        return planned

    patcher.replace(allocate, "plan_allocation", plan_first_group)


@mutant("calls", "ATOMIC-FAIL", rows=(29,), costs="others wait for blocks that it holds")
def m_refused_keeps_its_hits(patcher: Patcher) -> None:
    """A waiting request that was refused keeps the blocks of its hit in its table."""
    keep_refused_hits(patcher)


def keep_refused_hits(patcher: Patcher) -> None:
    """Let a refused request keep the blocks of its hit."""

    @patcher.around(allocate, "plan_allocation")
    def plan_holding(plan_allocation: Any, tx: Transaction, slot_request: SlotRequest) -> Any:
        planned = plan_allocation(tx, slot_request)
        if not isinstance(planned, Refusal) or slot_request.hit is None:
            return planned
        edit = TableEdit(tx, planned.request)
        for group_id, blocks in enumerate(slot_request.hit.blocks):
            edit.share(group_id, pvector(blocks))
        return attrs.evolve(planned, request=replace(planned.request, tables=tuple(edit.tables)))


@mutant("calls", "REF", rows=(30, 88, 89))
def m_finish_frees_twice(patcher: Patcher) -> None:
    """Two ways lead to the release of a finished request's last block, and both are taken."""
    release = PoolTransaction.release

    def release_more(self: PoolTransaction, blocks: Sequence[int]) -> None:
        release(self, [*blocks, *blocks[:1]])

    patcher.during(TRANSITIONS, "free", PoolTransaction, "release", release_more)


@mutant("merge", "REF", "KV-READ", rows=(32,))
def m_merge_leaves_the_table(patcher: Patcher) -> None:
    """A duplicate is given back, and its request's table still points to it."""

    @patcher.around(batches, "_merge")
    def merge_unmapped(merge: Any, tx: Transaction, *args: Any) -> None:
        commands = tx.effects.commands
        before = len(commands)
        with Patcher() as inner:
            inner.replace(Transaction, "put", lambda *_: None)
            merge(tx, *args)
        commands[before:] = [each for each in commands[before:] if not isinstance(each, SetTable)]


@mutant("groups", "EVICT-ORDER", rows=(52,), costs="only the order of eviction changes")
def m_releases_are_sorted(patcher: Patcher) -> None:
    """Blocks are released in the order of their ids, not of their places."""
    release = PoolTransaction.release
    patcher.replace(PoolTransaction, "release", lambda self, blocks: release(self, sorted(blocks)))


@mutant("calls", "HASH-MONO", "CMD-EVICT-FIRST", costs="a consumer of the commands keeps dead keys")
def m_eviction_not_reported(patcher: Patcher) -> None:
    """The worker is not told that a block lost its key."""
    without(patcher, Evict)


@mutant("calls", "DETERMINISM", costs="a run cannot be made again")
def m_calls_leave_traces(patcher: Patcher) -> None:
    """A number that every call moves on stands beside the state, and reaches it."""
    numbers = count()
    after(
        patcher,
        "add_request",
        lambda _before, added, _name: replace(added, next_operation=next(numbers)),
    )
