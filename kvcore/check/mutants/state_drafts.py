# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the states after drafts: where they stand and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.state.state import RequestState, Table
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction
from kvcore.transitions import checkpoints, states, window
from kvcore.types import config
from kvcore.types.groups import Group

NO_DRAFTS = property(lambda _: 0)


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


@mutant("states-drafts-chunks", "STATE-LIVE")
def m_leaves_with_its_draft_states(patcher: Patcher) -> None:
    """A request that leaves the open batch goes on with the state after its last draft."""
    patcher.during(states, "step_back", RequestState, "num_scheduled_drafts", NO_DRAFTS)


@mutant("states-drafts-cut", "STATE-LIVE", "STATE-READ")
def m_trim_takes_a_draft_state_for_the_last(patcher: Patcher) -> None:
    """What is trimmed of a table is counted from its end, where states after drafts stand."""

    @patcher.around(window, "_last_state")
    def of_table(_: Any, __: RequestState, table: Table) -> int:
        return len(table) - 1


@mutant("states-drafts", "CAP", costs="a refused call waits for blocks that never come")
def m_cap_forgets_draft_states(patcher: Patcher) -> None:
    """The cap of a state group does not count the states after drafts."""

    @patcher.around(config, "most_states")
    def without_drafts(most: Any, group: Group, num_to_come: int) -> int:
        found: int = most(group, num_to_come)
        return found - group.draft_states
