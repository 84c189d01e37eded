# SPDX-License-Identifier: Apache-2.0
"""Fork: a child that shares its parent's blocks (parallel sampling, beam search).

Rules: commands run before the forward pass, so a copy could not see what the open batch schedules:
the child shares the blocks up to the tokens that the parent had computed before that batch, a
partial tail included, and gets no lookahead. Whoever writes a shared block first gets a copy
(`allocate.py`). Twin: rust/src/fork.rs.
"""

from __future__ import annotations

import attrs

from kvcore.commands import SetTable
from kvcore.requests import check_new_id, empty_request
from kvcore.state import Draft, State, transition
from kvcore.values import Outcome


def fork(state: State, parent_id: str, child_id: str) -> Outcome[State, int]:
    """Add a child with its parent's tokens, hashes and computed blocks; value: its row.

    Raises UnknownRequest, SwappedOut, EmptyRequestId, RepeatedRequest.
    """

    def change(draft: Draft) -> int:
        parent = draft.on_device(parent_id)
        check_new_id(draft, child_id)
        record = draft.records.get(parent_id)
        computed = parent.num_computed if record is None else record.num_computed_before
        size = draft.config.block_size
        num_shared = -(-computed // size)
        child = empty_request(draft, child_id)
        tables = tuple(table[:num_shared] for table in parent.tables)
        for group, table in enumerate(tables):
            for position, block in enumerate(table):
                draft.device.touch(block)
                draft.effects.emit(SetTable(child.row, group, position, block))
        draft.store(
            attrs.evolve(
                child,
                tokens=parent.tokens,
                block_hashes=parent.block_hashes,
                num_computed=computed,
                tables=tables,
                num_cached=tuple(min(cached, computed // size) for cached in parent.num_cached),
            )
        )
        return child.row

    return transition(state, change)
