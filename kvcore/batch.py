# SPDX-License-Identifier: Apache-2.0
"""Closing the open batch.

Rules: a taken batch counts as executed, so what it wrote is there for the next one. With
`duplicates="merge"` a block that was filled although its content was findable is looked up again
now: the table's move to the older block, and the `Free`, open the next batch. Twin:
rust/src/batch.rs.
"""

from __future__ import annotations

import attrs

from kvcore.caching import stored
from kvcore.commands import Batch, SetTable, close
from kvcore.state import Draft, Merge, OpenBatch, State, transition
from kvcore.values import Outcome


def take_batch(state: State) -> Outcome[State, Batch]:
    """Close and number the open batch; value: its commands. Pending merges open the next one."""
    taken = close(state.batch.number, state.batch.commands)
    opened = attrs.evolve(state, batch=OpenBatch(state.batch.number + 1))

    def change(draft: Draft) -> Batch:
        for merge in state.batch.merges:
            _merge(draft, merge)
        return taken

    return transition(opened, change)


def _merge(draft: Draft, merge: Merge) -> None:
    """Move a table to the older block of its content, or publish its own where that is gone."""
    request = draft.requests.get(merge.request_id)
    if request is None or len(request.tables[merge.group]) <= merge.position:
        return
    table = request.tables[merge.group]
    size = draft.config.groups[merge.group].block_size
    computed = request.num_accepted >= (merge.position + 1) * size
    same = table[merge.position] == merge.block and draft.device.keys[merge.block] is None
    if not computed or not same or merge.position >= request.num_hashed(draft.config, merge.group):
        return
    if request.key(draft.config, merge.group, merge.position) != merge.key:
        return
    older = draft.device.index.first(merge.key)
    if older is None:
        draft.device.publish(merge.block, merge.key)
        draft.effects.announce(
            stored(draft, request, merge.group, merge.position, merge.position + 1)
        )
        return
    draft.device.touch(older)
    draft.effects.emit(SetTable(request.row, merge.group, merge.position, older))
    moved = table.set(merge.position, older)
    tables = (*request.tables[: merge.group], moved, *request.tables[merge.group + 1 :])
    draft.store(attrs.evolve(request, tables=tables))
    draft.device.release([merge.block])
