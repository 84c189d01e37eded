# SPDX-License-Identifier: Apache-2.0
"""Fork: a child that shares its parent's blocks (parallel sampling, beam search).

Invariants: the child shares its parent's blocks up to the tokens that the parent had computed
before the open batch, including a partial tail, and gets no lookahead. The first write to a shared
block copies it (`allocate.py`).
Why: commands run before the forward pass, so a copy would miss what the open batch schedules.
Twin: rust/src/transitions/fork.rs.
"""

from __future__ import annotations

from msgspec.structs import replace

from kvcore.state.state import RequestState, State
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.state.waiting import settle_waiting
from kvcore.transitions.free import num_cached_after
from kvcore.transitions.in_flight import inherit_entries
from kvcore.transitions.requests import check_drafts_settled, check_new_id, empty_request
from kvcore.transitions.unconfirmed_loads import inherit_loads
from kvcore.types.values import Outcome


def fork(state: State, parent_id: str, child_id: str) -> Outcome[State, int]:
    """Add a child with its parent's tokens, hashes and computed blocks; value: its row.

    Raises UnknownRequest, SwappedOut, LoadUnfinished, EmptyRequestId, RepeatedRequest,
    DraftsPending.
    """

    def change(tx: Transaction) -> int:
        parent = tx.idle(parent_id)
        check_new_id(tx, child_id)
        check_drafts_settled(parent)
        computed = tx.num_settled(parent)
        child = empty_request(tx, child_id)
        edit, num_cached = TableEdit(tx, child), []
        for index, group in enumerate(tx.config.groups):
            table = parent.tables[index]
            edit.share(index, table[: tx.num_kept(index, table, computed)])
            num_cached.append(num_cached_after(parent, index, group, computed))
        made = replace(
            parent,
            request_id=child.request_id,
            row=child.row,
            drafts=child.drafts,
            num_computed=computed,
            tables=tuple(edit.tables),
            num_cached=tuple(num_cached),
            preempted=False,
        )
        tx.put(made.awaiting_before(tx.batch.number, parent))
        inherit_entries(tx, parent_id, child_id)
        inherit_merges(tx, parent_id, made)
        inherit_loads(tx, parent_id, child_id, computed)
        settle_waiting(tx, child_id)
        return child.row

    return transition(state, change)


def inherit_merges(tx: Transaction, parent_id: str, child: RequestState) -> None:
    """Let the blocks that wait to be merged for a parent wait for its child, too, which counts them
    as published.
    """
    shared = [
        replace(merge, request_id=child.request_id)
        for merge in tx.batch.merges
        if merge.request_id == parent_id and merge.position < child.num_cached[merge.group_id]
    ]
    if shared:
        tx.batch = replace(tx.batch, merges=tx.batch.merges.extend(shared))
