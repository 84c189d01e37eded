# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs that keep requests waiting: admission, watermarks, look-ups."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants.index import key_owner, miss_also
from kvcore.check.mutants.owners import keep_refused_hits, swap_in_leaving
from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.state.plan_records import Plan, Refusal
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction
from kvcore.transitions import TRANSITIONS, allocate, plan, prefix_lookup
from kvcore.types.values import Appended, Outcome, Reason, Refused


@mutant("groups", "HIT-LONGEST", costs="what would have been a hit is computed again")
def m_lookup_misses(patcher: Patcher) -> None:
    """A look-up finds nothing."""
    patcher.replace(prefix_lookup, "common_length", lambda *_: 0)


@mutant("watermark", "ADMIT-EXACT", rows=(69,))
def m_watermark_ignored(patcher: Patcher) -> None:
    """A request is admitted into the room that running requests were to grow in."""

    @patcher.around(plan, "refuse")
    def refuse_unreserved(refuse: Any, *args: Any) -> Any:
        return refuse(*args[:-1], 0)


@mutant("watermark", "ADMIT-EXACT", costs="others leave and it comes back")
def m_refused_without_need(patcher: Patcher) -> None:
    """A request whose blocks all stayed on the device does not come back below the watermark."""
    patcher.replace(TRANSITIONS, "swap_in", swap_in_leaving(1))


@mutant("3x2x4", "ADMIT-EXACT", costs="the next batch hits what this one has written")
def m_same_step_is_refused(patcher: Patcher) -> None:
    """A hit on what the open batch writes is told as a lack of blocks."""

    @patcher.around(allocate, "plan_allocation")
    def refusing(plan: Any, tx: Any, slot_request: Any) -> Any:
        planned = plan(tx, slot_request)
        unwritten = {item.block for each in tx.scheduled if each for item in each.unwritten}
        if isinstance(planned, Plan) and unwritten & {b for ids in planned.hits for b in ids}:
            most = tx.device.num_usable
            refused = Refused(Reason.LATER, most + 1, tx.device.num_free)
            return Refusal(refused=refused, request=planned.request)
        return planned


@mutant("watermark", costs="no world reserves blocks for a call", trace="watermark")
def m_reserved_without_need(patcher: Patcher) -> None:
    """A call that needs no block is refused since more is to stay free than there is."""

    @patcher.around(plan, "refuse")
    def refuse_all(refuse: Any, tx: Any, needed: int, available: int, *rest: int) -> Any:
        if needed or rest[-1] <= available:
            return refuse(tx, needed, available, *rest)
        return Refused(Reason.LATER, 0, 0)


@mutant("watermark", "ADMIT-EXACT", "SWAP-RETURN", rows=(70,))
def m_swap_in_keeps_the_watermark_twice(patcher: Patcher) -> None:
    """A request comes back only if twice the watermark stays free: never, in a small pool."""
    patcher.replace(TRANSITIONS, "swap_in", swap_in_leaving(2))


@mutant("calls", "HIT-LONGEST", rows=(71,), costs="what would have been a hit is computed again")
def m_lookup_after_the_cold_tail(patcher: Patcher) -> None:
    """The blocks of the whole prompt are taken first; what they evict is no hit any more."""

    def is_taken(state: State, key: bytes, request: RequestState, group_id: int) -> bool:
        num_blocks = -(-len(request.tokens) // state.config.groups[group_id].block_size)
        return key_owner(state, key) in list(state.device.queue)[:num_blocks]

    miss_also(patcher, is_taken)


@mutant("watermark", "ADMIT-NEVER", rows=(66,))
def m_never_is_said_to_be_later(patcher: Patcher) -> None:
    """A request that can never fit is told to ask again."""

    @patcher.around(plan, "refuse")
    def refuse_for_now(refuse: Any, *args: Any) -> Refused | None:
        refused = refuse(*args)
        return None if refused is None else replace(refused, reason=Reason.LATER)


@mutant("calls", "NO-THRASH", rows=(69,))
def m_grows_only_where_two_blocks_are_free(patcher: Patcher) -> None:
    """A request gets a token only if two blocks are free: it is preempted again and again."""

    @patcher.around(TRANSITIONS, "append")
    def append_with_room(append: Any, before: State, request_ids: Any, tokens: Any) -> Any:
        if before.device.num_free == 1:
            return Outcome(before, (), Appended(0, Refused(Reason.LATER, 1, 0)))
        return append(before, request_ids, tokens)


@mutant("calls", "DEADLOCK-FREE", rows=(67,))
def m_waiting_requests_hold_blocks(patcher: Patcher) -> None:
    """A waiting request keeps the blocks of its hit when it is refused, and is treated as if it had
    none, so that nothing frees them.
    """
    keep_refused_hits(patcher)

    @patcher.around(TRANSITIONS, "free")
    def free_computed(free: Any, before: State, request_id: str) -> Any:
        request = before.requests.get(request_id)
        if request is None or request.num_computed:
            return free(before, request_id)
        return Outcome(before, (), None)


@mutant("groups", costs="no world asks for room for a whole request", trace="windowed_gate")
def m_gate_forgets_what_is_held(patcher: Patcher) -> None:
    """A request is refused room for blocks that it holds behind its window."""

    @patcher.around(plan, "gate_need")
    def need_all(gate_need: Any, tx: Any, request: RequestState, *args: Any) -> Any:
        tables = tuple(pvector([0] * len(table)) for table in request.tables)
        return gate_need(tx, replace(request, tables=tables), *args)


@mutant("preallocated", "DEADLOCK-FREE")
def m_preallocation_is_needed(patcher: Patcher) -> None:
    """A call that fits is refused if there is no room for the tokens to preallocate."""
    grow, preallocate = plan.plan_growth, plan.preallocate

    def grow_with_spare(tx: Transaction, request: Any, wanted: Any, hits: Any, lengths: Any) -> Any:
        growth = grow(tx, request, wanted, hits, lengths)
        return preallocate(tx, request, hits, growth, tx.config.num_blocks)

    patcher.replace(plan, "plan_growth", grow_with_spare)


@mutant("preallocated-groups", "DEADLOCK-FREE")
def m_preallocation_starves_a_group(patcher: Patcher) -> None:
    """A group takes spare blocks that another one of the request needs for the same tokens."""

    def in_turn(tx: Transaction, request: Any, _hits: Any, growth: Any, spare: int) -> Any:
        made = []
        for table, each in zip(request.tables, growth, strict=True):
            more = min(spare, tx.config.num_preallocate_tokens)
            more = more if each.num_new or not len(table) else 0
            spare -= more
            made.append(replace(each, num_new=each.num_new + more))
        return tuple(made)

    patcher.replace(plan, "preallocate", in_turn)
