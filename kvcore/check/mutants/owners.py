# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of owners, of the free queue, and of what fits.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants.seeding import Patcher, after, mutant, without
from kvcore.check.mutants.worlds import BASIC
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.free_queue import FreeQueueTransaction
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions import TRANSITIONS, allocate, batches, plan, swap
from kvcore.transitions.slot_request import SlotRequest
from kvcore.types.commands import Allocate, Evict, Free, SetTable, Touch
from kvcore.types.values import Refused


@mutant("calls", "PARTITION", rows=(21,))
def m_touch_not_dequeued(patcher: Patcher) -> None:
    """A hit on an ownerless block counts an owner and leaves the block in the free queue."""

    def touch(self: PoolTransaction, block: int) -> None:
        if self.ref_counts[block] == 0:
            self.effects.commands.append(Touch(block))
        self.ref_counts[block] += 1

    patcher.setattr(PoolTransaction, "touch", touch)


@mutant("calls", "FQ-UNIQ", rows=(27,))
def m_queue_counter_drifts(patcher: Patcher) -> None:
    """The length of the free queue is kept beside it, and taking a block out does not change it."""
    remove = FreeQueueTransaction.remove

    def remove_uncounted(self: FreeQueueTransaction, block: int) -> None:
        remove(self, block)
        self.length += 1

    patcher.setattr(FreeQueueTransaction, "remove", remove_uncounted)


@mutant("calls", "REF", rows=(23,))
def m_alloc_ref0(patcher: Patcher) -> None:
    """A block that is handed out counts no owner."""
    take = PoolTransaction.take

    def take_unowned(self: PoolTransaction, count: int) -> list[int]:
        blocks = take(self, count)
        for block in blocks:
            self.ref_counts[block] = 0
        return blocks

    patcher.setattr(PoolTransaction, "take", take_unowned)


@mutant("calls", "NO-ALIAS", "KV-READ", "HIT-PINNED", rows=(18,))
def m_touch_after_alloc(patcher: Patcher) -> None:
    """New blocks are taken before the hits get their owner, so a hit can be taken away."""
    commit, touch, take = allocate.commit, PoolTransaction.touch, PoolTransaction.take

    def commit_late(*args: Any) -> Any:
        late: list[int] = []

        def take_first(self: PoolTransaction, count: int) -> list[int]:
            blocks = take(self, count)
            for block in late:
                touch(self, block)
            return blocks

        with Patcher() as inner:
            inner.setattr(PoolTransaction, "touch", lambda _, block: late.append(block))
            inner.setattr(PoolTransaction, "take", take_first)
            return commit(*args)

    patcher.setattr(allocate, "commit", commit_late)


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

    patcher.setattr(plan, "needed_hits", note_found)
    patcher.setattr(plan, "refuse", refuse_fewer)


@mutant("calls", "LEAK", "PREEMPT-GAIN", "DRAIN")
def m_free_forgets_a_block(patcher: Patcher) -> None:
    """The first block of a release is not given back."""
    give_back = PoolTransaction.release

    def give_back_some(self: PoolTransaction, blocks: Sequence[int]) -> None:
        give_back(self, blocks[1:])

    patcher.setattr(PoolTransaction, "release", give_back_some)


@mutant("calls", "OWNER-MIRROR", costs="a worker that counts owners keeps blocks for used")
def m_free_not_told(patcher: Patcher) -> None:
    """The worker is not told that a block has no owner any more."""
    without(patcher, Free)


@mutant("calls", "ADMIT-EXACT", "L-ADMIT", "DEADLOCK-FREE")
def m_needs_one_block_less(patcher: Patcher) -> None:
    """A call that fits exactly is refused."""
    refuse = plan.refuse

    def refuse_more(tx: Transaction, needed: int, available: int, *rest: Any) -> Refused | None:
        refused = refuse(tx, needed + 1, available, *rest)
        return None if refused is None else replace(refused, needed=needed)

    patcher.setattr(plan, "refuse", refuse_more)


@mutant("calls", "REF", rows=(24,))
def m_fork_counts_occurrences(patcher: Patcher) -> None:
    """A fork counts another number of holdings than a release gives back."""
    touch = PoolTransaction.touch

    def touch_twice(self: PoolTransaction, block: int) -> None:
        touch(self, block)
        if self.ref_counts[block] > 1:
            self.ref_counts[block] += 1

    patcher.setattr(PoolTransaction, "touch", touch_twice)


@mutant("calls", "ATOMIC-FAIL", "REF", rows=(15,), shows=BASIC)
def m_refused_hits_keep_their_owner(patcher: Patcher) -> None:
    """Hits get their owner before it is known whether the call fits, and keep it if not."""

    def plan_touched(tx: Transaction, slot_request: SlotRequest) -> plan.Plan | plan.Refusal:
        planned = plan.plan_allocation(tx, slot_request)
        if isinstance(planned, plan.Refusal) and slot_request.hit is not None:
            for block in chain.from_iterable(slot_request.hit.blocks.blocks):
                tx.device.touch(block)
        return planned

    patcher.setattr(allocate, "plan_allocation", plan_touched)


@mutant("host", "NOCRASH", rows=(17,))
def m_swap_in_forgets_queued_hits(patcher: Patcher) -> None:
    """Coming back from the host tier, hits in the free queue count as room for copies, too."""

    def swap_in(before: Any, request_ids: Any) -> Any:
        def change(tx: Transaction) -> Refused | None:
            requests = tx.distinct(list(request_ids))
            hits = swap.find_hits(tx, requests)
            num_copied = sum(block is None for block in hits.values())
            if num_copied > tx.device.num_free:
                return swap.refuse(tx.device, num_copied)
            swap.move_in(tx, requests, hits)
            return None

        return transition(before, change)

    patcher.setitem(TRANSITIONS, "swap_in", swap_in)


@mutant("calls", "KV-READ", "HIT-PRESERVE", rows=(20,))
def m_hit_resets_its_block(patcher: Patcher) -> None:
    """A hit in the free queue is handed out as any block, and loses its key and content."""
    touch = PoolTransaction.touch

    def touch_anew(self: PoolTransaction, block: int) -> None:
        if self.ref_counts[block]:
            touch(self, block)
            return
        self.queue.remove(block)
        self.unpublish(block)
        self.ref_counts[block] = 1
        self.effects.commands.append(Allocate(block))

    patcher.setattr(PoolTransaction, "touch", touch_anew)


@mutant("host", "FQ-UNIQ", rows=(22,))
def m_block_released_twice_in_one_list(patcher: Patcher) -> None:
    """A set's blocks are released in one list, and each naming of a shared one frees it."""
    move_out = swap.move_out

    def move_out_at_once(tx: Transaction, request_ids: list[str], targets: dict[int, int]) -> None:
        named: list[int] = []
        with Patcher() as inner:
            inner.setattr(PoolTransaction, "release", lambda _, blocks: named.extend(blocks))
            move_out(tx, request_ids, targets)
        for block in named:
            tx.device.ref_counts[block] -= 1
        for block in named:
            if tx.device.ref_counts[block] == 0:
                tx.device.queue.append(block)
                tx.effects.commands.append(Free(block, tx.device.keys[block] is not None))

    patcher.setattr(swap, "move_out", move_out_at_once)


@mutant("evict", "REF", rows=(25,))
def m_evicting_frees_a_used_block(patcher: Patcher) -> None:
    """A block whose key is evicted goes to the free queue though a request holds it."""
    evict, unpublish = TRANSITIONS["evict_blocks"], PoolTransaction.unpublish

    def unpublish_and_free(self: PoolTransaction, block: int) -> None:
        unpublish(self, block)
        if self.ref_counts[block]:
            self.ref_counts[block] = 0
            self.queue.append(block)

    def evict_hard(*args: Any) -> Any:
        with Patcher() as inner:
            inner.setattr(PoolTransaction, "unpublish", unpublish_and_free)
            return evict(*args)

    patcher.setitem(TRANSITIONS, "evict_blocks", evict_hard)


@mutant("calls", "LEAK", "REF", rows=(26,))
def m_cache_keeps_an_owner(patcher: Patcher) -> None:
    """The index counts as an owner of what it holds, and eviction does not give that back."""
    publish = PoolTransaction.publish

    def publish_owned(self: PoolTransaction, block: int, key: bytes) -> None:
        publish(self, block, key)
        self.ref_counts[block] += 1

    patcher.setattr(PoolTransaction, "publish", publish_owned)


@mutant("groups", "ATOMIC-FAIL", "LEAK", rows=(28,))
def m_refused_keeps_the_first_groups_block(patcher: Patcher) -> None:
    """The second group's blocks do not fit; what the first one got is not given back."""

    def plan_first_group(tx: Transaction, slot_request: SlotRequest) -> plan.Plan | plan.Refusal:
        planned = plan.plan_allocation(tx, slot_request)
        if isinstance(planned, plan.Refusal) and tx.device.num_free:
            tx.device.take(1)
        return planned

    patcher.setattr(allocate, "plan_allocation", plan_first_group)


@mutant("calls", "ATOMIC-FAIL", rows=(29,), costs="others wait for blocks that it holds")
def m_refused_keeps_its_hits(patcher: Patcher) -> None:
    """A waiting request that was refused keeps the blocks of its hit in its table."""

    def plan_holding(tx: Transaction, slot_request: SlotRequest) -> plan.Plan | plan.Refusal:
        planned = plan.plan_allocation(tx, slot_request)
        if not isinstance(planned, plan.Refusal) or slot_request.hit is None:
            return planned
        edit = TableEdit(tx, planned.request)
        for group_id, blocks in enumerate(slot_request.hit.blocks.blocks):
            edit.share(group_id, pvector(blocks))
        return replace(planned, request=replace(planned.request, tables=tuple(edit.tables)))

    patcher.setattr(allocate, "plan_allocation", plan_holding)


@mutant("calls", "REF", rows=(30,))
def m_finish_frees_twice(patcher: Patcher) -> None:
    """Two ways lead to the release of a finished request's last block, and both are taken."""
    free, release = TRANSITIONS["free"], PoolTransaction.release

    def free_twice(*args: Any) -> Any:
        with Patcher() as inner:
            inner.setattr(
                PoolTransaction, "release", lambda self, ids: release(self, [*ids, *ids[:1]])
            )
            return free(*args)

    patcher.setitem(TRANSITIONS, "free", free_twice)


@mutant("merge", "REF", "KV-READ", rows=(32,))
def m_merge_leaves_the_table(patcher: Patcher) -> None:
    """A duplicate is given back, and its request's table still points to it."""
    merge = batches._merge

    def merge_unmapped(tx: Transaction, *args: Any) -> None:
        commands = tx.effects.commands
        before = len(commands)
        with Patcher() as inner:
            inner.setattr(Transaction, "put", lambda *_: None)
            merge(tx, *args)
        commands[before:] = [each for each in commands[before:] if not isinstance(each, SetTable)]

    patcher.setattr(batches, "_merge", merge_unmapped)


@mutant("groups", "EVICT-ORDER", rows=(52,), costs="only the order of eviction changes")
def m_releases_are_sorted(patcher: Patcher) -> None:
    """Blocks are released in the order of their ids, not of their places."""
    release = PoolTransaction.release
    patcher.setattr(PoolTransaction, "release", lambda self, blocks: release(self, sorted(blocks)))


@mutant("calls", "HASH-MONO", "CMD-EVICT-FIRST", costs="who follows the commands keeps dead keys")
def m_eviction_not_told(patcher: Patcher) -> None:
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
