# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the states after drafts: where they stand and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.state.plan_records import Plan, StateStep
from kvcore.state.state import RequestState
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction
from kvcore.transitions import allocate, checkpoints, plan, states, swap, window
from kvcore.types import config
from kvcore.types.groups import Group


@mutant("states-drafts", "STATE-READ")
def m_accept_keeps_running_state(patcher: Patcher) -> None:
    """A request goes on with the state before its accepted drafts."""

    @patcher.around(TableEdit, "keep_of_end")
    def keep_first(
        keep: Any, edit: TableEdit, group_id: int, first: int, kept: Sequence[int]
    ) -> None:
        keep(edit, group_id, first, range(len(kept)))


@mutant("states-drafts", "STATE-READ")
def m_accept_keeps_last_draft_state(patcher: Patcher) -> None:
    """A request goes on with the state after its last draft, whether it was accepted or not."""

    @patcher.around(TableEdit, "keep_of_end")
    def keep_last(
        keep: Any, edit: TableEdit, group_id: int, first: int, kept: Sequence[int]
    ) -> None:
        last = len(edit.tables[group_id]) - 1 - first
        keep(edit, group_id, first, [*kept[:-1], last])


@mutant("states-drafts-three", "PUBLISHED", costs="less is findable, what is found is right")
def m_accept_loses_the_boundary(patcher: Patcher) -> None:
    """Of the states that accepted drafts reach, only the last one gets a key."""

    @patcher.around(checkpoints, "publish_reached")
    def only_last(
        publish: Any, tx: Transaction, request: RequestState, num_known: int, stored: Any
    ) -> None:
        publish(tx, request, max(num_known, len(request.tokens) - 1), stored)


@mutant("states-drafts", "STATE-LIVE", "STATE-READ")
def m_rejected_states_stay(patcher: Patcher) -> None:
    """The states after rejected drafts stay in the table, behind the one to go on from."""

    @patcher.around(TableEdit, "keep_of_end")
    def keep_all(
        keep: Any, edit: TableEdit, group_id: int, first: int, kept: Sequence[int]
    ) -> None:
        others = range(kept[-1] + 1, len(edit.tables[group_id]) - first)
        keep(edit, group_id, first, [*kept, *others])


@mutant("states-drafts-chunks", "NOCRASH")
def m_draft_states_cost_nothing(patcher: Patcher) -> None:
    """A call is admitted without room for the states after its drafts."""

    @patcher.around(allocate, "plan_allocation")
    def admitted(find: Any, tx: Transaction, slot_request: Any) -> Any:
        with Patcher() as inner:
            inner.around(plan, "_plan_states")(without_drafts)
            found = find(tx, slot_request)
        if not isinstance(found, Plan) or not found.steps:
            return found
        lengths = plan.measure(tx, found.request, found.slot_request)
        known = plan._plan_states(tx, found.request, found.hits, lengths)
        made = zip(found.steps, known, strict=True)
        return replace(
            found, steps=tuple(replace(step, num_drafts=each.num_drafts) for step, each in made)
        )


def without_drafts(find: Any, *args: Any) -> tuple[StateStep, ...]:
    """Plan steps that write no state after a draft."""
    return tuple(replace(step, num_drafts=0) for step in find(*args))


@mutant("states-drafts-moved", "REF", "STATE-READ")
def m_leaves_with_the_last_draft(patcher: Patcher) -> None:
    """A request leaves the batch, in which a later call moved its step, with the state after its
    last draft.
    """

    @patcher.around(states, "_moved_back")
    def undrafted(
        move: Any, tx: Transaction, request: RequestState, num_tokens: int, **keeps: bool
    ) -> RequestState:
        moved: RequestState = move(tx, replace(request, drafts=()), num_tokens, **keeps)
        return replace(moved, drafts=request.drafts)


@mutant("states-drafts-swap-three", "NOCRASH")
def m_swap_saves_the_last_draft_state(patcher: Patcher) -> None:
    """A request whose step two calls scheduled is swapped out with the state after its last
    draft.
    """
    patcher.replace(swap, "last_state", lambda _, table: len(table) - 1)


@mutant(
    "states-drafts-far",
    "CACHED-COUNT",
    costs="states are given back later, what is found is right",
)
def m_trim_counts_to_the_last_draft(patcher: Patcher) -> None:
    """A trim takes the state after the last draft for the one that the request goes on with."""
    patcher.replace(window, "last_state", lambda _, table: len(table) - 1)


@mutant("states-drafts-chunks", "DEADLOCK-FREE")
def m_cap_forgets_draft_states(patcher: Patcher) -> None:
    """The cap of a state group does not count the states after drafts."""

    @patcher.around(config, "most_states")
    def without_drafts(most: Any, group: Group, num_to_come: int) -> int:
        found: int = most(group, num_to_come)
        return found - group.draft_states
