# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs that keep requests waiting: admission, watermarks, look-ups.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.state.state import RequestState, State
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions import TRANSITIONS, allocate, plan, prefix_lookup, swap
from kvcore.transitions.slot_request import SlotRequest
from kvcore.types.values import Appended, Outcome, Reason, Refused


@mutant("groups", "HIT-LONGEST", costs="what would have been a hit is computed again")
def m_lookup_misses(patcher: Patcher) -> None:
    """A look-up finds nothing."""
    patcher.setattr(prefix_lookup, "common_length", lambda *_: 0)


@mutant("watermark", "ADMIT-EXACT", rows=(69,))
def m_watermark_ignored(patcher: Patcher) -> None:
    """A request is admitted into the room that running requests were to grow in."""
    refuse = plan.refuse

    def refuse_unreserved(tx: Transaction, needed: int, available: int, most: int, _: int) -> Any:
        return refuse(tx, needed, available, most, 0)

    patcher.setattr(plan, "refuse", refuse_unreserved)


@mutant("watermark", "ADMIT-EXACT", costs="others leave and it comes back")
def m_refused_without_need(patcher: Patcher) -> None:
    """A request whose blocks all stayed on the device does not come back below the watermark."""
    patcher.setitem(TRANSITIONS, "swap_in", swap_in_leaving(1))


@mutant("watermark", costs="no world reserves blocks for a call", trace="watermark")
def m_reserved_without_need(patcher: Patcher) -> None:
    """A call that needs no block is refused since more is to stay free than there is."""
    refuse = plan.refuse

    def refuse_all(tx: Transaction, needed: int, available: int, most: int, reserve: int) -> Any:
        if needed or reserve <= available:
            return refuse(tx, needed, available, most, reserve)
        return Refused(Reason.LATER, 0, 0)

    patcher.setattr(plan, "refuse", refuse_all)


@mutant("watermark", "ADMIT-EXACT", "SWAP-RETURN", rows=(70,))
def m_swap_in_keeps_the_watermark_twice(patcher: Patcher) -> None:
    """A request comes back only where twice the watermark stays free: never, in a small pool."""
    patcher.setitem(TRANSITIONS, "swap_in", swap_in_leaving(2))


def swap_in_leaving(times: int) -> Any:
    """A `swap_in` that leaves the watermark so many times, also if it needs no block."""

    def swap_in(before: Any, request_ids: Any) -> Any:
        def change(tx: Transaction) -> Refused | None:
            requests = tx.distinct(list(request_ids))
            found = swap.find_hits(tx, requests)
            needed = sum(each is None or not tx.device.ref_counts[each] for each in found.values())
            if needed + times * tx.config.watermark_blocks > tx.device.num_free:
                return swap.refuse(tx.device, needed, tx.config.watermark_blocks)
            swap.move_in(tx, requests, found)
            return None

        return transition(before, change)

    return swap_in


@mutant("calls", "HIT-LONGEST", rows=(71,), costs="what would have been a hit is computed again")
def m_lookup_after_the_cold_tail(patcher: Patcher) -> None:
    """The blocks of the whole prompt are taken first; what they evict is no hit any more."""
    missing = prefix_lookup.first_missing

    def missing_or_taken(where: Any, request: Any, group_id: int, positions: Any) -> int | None:
        num_blocks = -(-len(request.tokens) // where.config.groups[group_id].block_size)
        taken = list(where.device.queue)[:num_blocks]
        for position in positions:
            if missing(where, request, group_id, (position,)) is not None:
                return int(position)
            if where.device.index.firsts[request.key(where.config, group_id, position)] in taken:
                return int(position)
        return None

    patcher.setattr(prefix_lookup, "first_missing", missing_or_taken)


@mutant("watermark", "ADMIT-NEVER", rows=(66,))
def m_never_is_said_to_be_later(patcher: Patcher) -> None:
    """A request that can never fit is told to ask again."""
    refuse = plan.refuse

    def refuse_for_now(*args: Any) -> Refused | None:
        refused = refuse(*args)
        return None if refused is None else replace(refused, reason=Reason.LATER)

    patcher.setattr(plan, "refuse", refuse_for_now)


@mutant("calls", "NO-THRASH", rows=(69,))
def m_grows_only_where_two_blocks_are_free(patcher: Patcher) -> None:
    """A request gets its next token only while two blocks are free: it is preempted, comes back and
    is preempted, again and again.
    """
    append = TRANSITIONS["append"]

    def append_with_room(before: State, request_ids: Any, tokens: Any) -> Any:
        if before.device.num_free == 1:
            return Outcome(before, (), Appended(0, Refused(Reason.LATER, 1, 0)))
        return append(before, request_ids, tokens)

    patcher.setitem(TRANSITIONS, "append", append_with_room)


@mutant("calls", "DEADLOCK-FREE", rows=(67,))
def m_waiting_requests_hold_blocks(patcher: Patcher) -> None:
    """A waiting request keeps the blocks of its hit when it is refused, and is thought to have
    none: nobody takes them back.
    """
    plan_allocation, free = plan.plan_allocation, TRANSITIONS["free"]

    def plan_holding(tx: Transaction, slot_request: SlotRequest) -> plan.Plan | plan.Refusal:
        planned = plan_allocation(tx, slot_request)
        if not isinstance(planned, plan.Refusal) or slot_request.hit is None:
            return planned
        edit = TableEdit(tx, planned.request)
        for group_id, blocks in enumerate(slot_request.hit.blocks.blocks):
            edit.share(group_id, pvector(blocks))
        return replace(planned, request=replace(planned.request, tables=tuple(edit.tables)))

    def free_computed(before: State, request_id: str) -> Any:
        request = before.requests.get(request_id)
        if request is None or request.num_computed:
            return free(before, request_id)
        return Outcome(before, (), None)

    patcher.setattr(allocate, "plan_allocation", plan_holding)
    patcher.setitem(TRANSITIONS, "free", free_computed)


@mutant("groups", costs="no world asks for room for a whole request", trace="windowed_gate")
def m_gate_forgets_what_is_held(patcher: Patcher) -> None:
    """A request is refused room for blocks that it holds behind its window."""
    gate_need = plan.gate_need

    def need_all(tx: Transaction, request: RequestState, *args: Any) -> tuple[int, int]:
        tables = tuple(pvector([0] * len(table)) for table in request.tables)
        return gate_need(tx, replace(request, tables=tables), *args)

    patcher.setattr(plan, "gate_need", need_all)


@mutant("preallocated", "DEADLOCK-FREE")
def m_preallocation_is_needed(patcher: Patcher) -> None:
    """A call that fits is refused if there is no room for the tokens to preallocate."""
    grow, preallocate = plan.plan_growth, plan.preallocate

    def grow_with_spare(tx: Transaction, request: Any, wanted: Any, hits: Any, lengths: Any) -> Any:
        growth = grow(tx, request, wanted, hits, lengths)
        return preallocate(tx, request, hits, growth, tx.config.num_blocks)

    patcher.setattr(plan, "plan_growth", grow_with_spare)
