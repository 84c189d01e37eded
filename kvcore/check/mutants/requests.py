# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of requests: their counts, rows, drafts and records."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, after, mutant, put
from kvcore.check.mutants.worlds import DRAFTS_CUT, DRAFTS_IN_ENGINE, LEAVING
from kvcore.state.plan_records import Refusal
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions import TRANSITIONS, allocate, free, plan, rewind, truncate
from kvcore.transitions.requests import extend


@mutant("calls", "ROWS", costs="the worker's tables grow by a row")
def m_remove_keeps_row(patcher: Patcher) -> None:
    """The row of a request that has gone is not given back."""

    def keep(before: Any, removed: Any, _name: str) -> Any:
        return replace(removed, held_rows=before.held_rows)

    after(patcher, "remove_request", keep)


@mutant("three", "OPEN-BATCH", rows=(92,), shows=LEAVING)
def m_record_survives_leaving(patcher: Patcher) -> None:
    """The open batch remembers a request that has left it."""

    @patcher.around(free, "leave_open_batch")
    def leave_record(leave: Any, tx: Transaction, request: RequestState) -> None:
        scheduled = tx.scheduled
        leave(tx, request)
        tx.scheduled = scheduled


@mutant("three", "COMPUTED-RULE", rows=(92,))
def m_leaving_keeps_count(patcher: Patcher) -> None:
    """A request that is cut in mid-step still counts what the step will not write."""

    def leave_counted(tx: Transaction, request: RequestState) -> None:
        tx.scheduled = tx.scheduled.set(request.row, None)

    patcher.replace(truncate, "leave_open_batch", leave_counted)


@mutant("calls", "ATOMIC-FAIL", costs="only statistics are wrong")
def m_refusal_counts_a_lookup(patcher: Patcher) -> None:
    """A refused call changes the statistics."""

    def refuse_counted(tx: Transaction, slot_request: Any) -> Any:
        planned = plan.plan_allocation(tx, slot_request)
        if isinstance(planned, Refusal):
            tx.note_lookup(1, 0, preempted=False)
        return planned

    patcher.replace(allocate, "plan_allocation", refuse_counted)


@mutant("drafts", "REQ-HASH", shows=DRAFTS_IN_ENGINE)
def m_drafts_are_hashed(patcher: Patcher) -> None:
    """Drafts are hashed as if they were tokens."""

    def hash_drafts(_before: Any, drafted: Any, name: str) -> Any:
        request = drafted.requests[name]
        longer = extend(Transaction(drafted), request, list(request.drafts))
        return put(drafted, replace(request, block_hashes=longer.block_hashes))

    after(patcher, "add_drafts", hash_drafts)


@mutant("drafts", "DRAFT", rows=(45,))
def m_cache_lookahead(patcher: Patcher) -> None:
    """Drafts are hashed and published before they are accepted."""
    m_drafts_are_hashed(patcher)
    patcher.replace(RequestState, "num_accepted", property(lambda self: self.num_computed))


@mutant("drafts", "COMPUTED", "COMPUTED-RULE", costs="it cannot go on until it is freed")
def m_rejected_drafts_stay_computed(patcher: Patcher) -> None:
    """Rejected drafts still count as computed, and one of them stays."""

    @patcher.around(TRANSITIONS, "accept")
    def accept_all(accept: Any, where: Any, name: str, num_accepted: int) -> Any:
        outcome = accept(where, name, num_accepted)
        before = where.requests[name]
        drafts = before.drafts[num_accepted:][:1]
        kept = replace(
            outcome.state.requests[name], num_computed=before.num_computed, drafts=drafts
        )
        return replace(outcome, state=put(outcome.state, kept))


@mutant(
    DRAFTS_CUT,
    "COMPUTED-RULE",
    costs="the verdict on the drafts puts the count right",
    unnamed="no named world has requests rewound among their drafts",
)
def m_rewind_counts_dropped_drafts(patcher: Patcher) -> None:
    """A request that is rewound to a count among its scheduled drafts still counts some of them."""

    @patcher.around(rewind, "cut_tables")
    def cut_to(cut_tables: Any, tx: Transaction, request: RequestState, num_tokens: int) -> None:
        cut_tables(tx, request, num_tokens)
        kept = tx.request(request.request_id)
        if any(kept.tables):
            tx.put(replace(kept, num_computed=min(request.num_computed, num_tokens)))


@mutant("merge", costs="both blocks stay, and less fits", trace="merge_of_older_blocks")
def m_leaving_drops_older_merges(patcher: Patcher) -> None:
    """A request that leaves the open batch keeps duplicates that it had written before."""

    @patcher.around(free, "is_unwritten")
    def drops_all(drops: Any, tx: Any, merge: Any, _: int, request: Any) -> Any:
        return drops(tx, merge, 0, request)


@mutant(
    "merge-late",
    "EVICT-ORDER",
    costs="the blocks behind cannot be hit",
    trace="merge_of_a_request_that_leaves",
)
def m_leaving_forgets_its_merges(patcher: Patcher) -> None:
    """A request that is freed drops the merges of blocks that it had written before."""
    patcher.replace(free, "settle_own_merges", lambda *_: None)


@mutant("lookahead", "COMPUTED-RULE", costs="it cannot go on until it is freed")
def m_lookahead_counts_as_computed(patcher: Patcher) -> None:
    """The lookahead slots of a call count as computed tokens."""

    @patcher.around(plan, "measure")
    def measure_slots(measure: Any, *args: Any) -> Any:
        lengths = measure(*args)
        return replace(lengths, scheduled=lengths.slots)
