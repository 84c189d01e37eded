# SPDX-License-Identifier: Apache-2.0
"""Merges the table commands of a batch into one change per group, over whole columns.

The merged change gives what program order gives: the last SetTable of a position wins,
unless a later CutTable of its row cuts it off; a row's length is that of its last CutTable, or
further where later SetTables reach. Pure: reads columns and lengths, changes nothing. All arrays
are int64. They are numpy arrays, since for a batch of a few commands numpy's calls cost a fraction
of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcore.types.commands import COLUMNS, SetTable
from kvcore_runtime.attention.ragged import flat_ranges
from kvcore_runtime.cache.errors import TableGap

KIND = COLUMNS.index("kind")
ROW = COLUMNS.index("a")
GROUP = COLUMNS.index("b")
PLACE = COLUMNS.index("c")  # SetTable: position; CutTable: length
BLOCK = COLUMNS.index("d")
Numbers: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(eq=False, kw_only=True)
class TableChange:
    """A batch's change of one group's table.

    cleared, places: flat indices into [rows, max_blocks]; blocks: the ids for places, written after
    the clearing. rows, lengths: the named rows and their new lengths in blocks.
    """

    group_id: int
    cleared: Numbers
    places: Numbers
    blocks: Numbers
    rows: Numbers
    lengths: Numbers


@attrs.frozen(eq=False, kw_only=True)
class _Cuts:
    """CutTables by row, then order; lowest: the least length of this and the row's later ones."""

    keys: Numbers
    rows: Numbers
    lengths: Numbers
    lowest: Numbers


def merge(group_id: int, changes: Numbers, lengths: Numbers, max_blocks: int) -> TableChange:
    """Merge the table commands of one group.

    changes: [6, n] columns, only SetTable and CutTable, in program order. lengths: [rows], before.
    Raises TableGap if a row would have a position below its length that was never set.
    """
    num_changes = changes.shape[1]
    is_set = changes[KIND] == SetTable.kind
    set_order = np.flatnonzero(is_set)
    rows = np.unique(changes[ROW])
    before = lengths[rows]
    base = intact = before
    kept = _last_of_each_place(changes, set_order, max_blocks)
    if len(set_order) < num_changes:
        cuts = _sorted_cuts(changes, np.flatnonzero(~is_set), max_blocks)
        kept = kept[~_cut_off(changes, kept, cuts)]
        base, lowest = _row_cuts(rows, cuts, before, num_changes)
        intact = np.minimum(before, lowest)
    places = changes[PLACE, kept]
    at = np.searchsorted(rows, changes[ROW, kept])
    after = base.copy()
    np.maximum.at(after, at, places + 1)
    fresh = np.bincount(at[places >= intact[at]], minlength=len(rows))
    torn = np.flatnonzero(fresh != after - intact)
    if len(torn):
        row, length = int(rows[torn[0]]), int(after[torn[0]])
        raise TableGap(row=row, group_id=group_id, length=length)
    return TableChange(
        group_id=group_id,
        cleared=flat_ranges(rows * max_blocks + intact, before - intact),
        places=changes[ROW, kept] * max_blocks + places,
        blocks=changes[BLOCK, kept],
        rows=rows,
        lengths=after,
    )


def entries_of(planned: Sequence[TableChange], group_size: int, cleared_to: int) -> Tensor:
    """Return all changes of a batch as writes: [2, n], flat places, then values.

    group_size: entries of one group's table. cleared_to: the value of a cleared place. Places are
    distinct, so the writes may run in any order.
    """
    entries = [np.empty((2, 0), dtype=np.int64)]
    for change in planned:
        first = change.group_id * group_size
        cleared = change.cleared[~np.isin(change.cleared, change.places)]
        entries += [
            np.stack((first + cleared, np.full_like(cleared, cleared_to))),
            np.stack((first + change.places, change.blocks)),
        ]
    return torch.from_numpy(np.concatenate(entries, axis=1))


def _last_of_each_place(changes: Numbers, set_order: Numbers, max_blocks: int) -> Numbers:
    """Return the last of the SetTables of each row and position, as indices in program order."""
    keys = changes[ROW, set_order] * max_blocks + changes[PLACE, set_order]
    by_key = np.argsort(keys, kind="stable")
    keys = keys[by_key]
    is_last = np.ones(len(keys), dtype=bool)
    is_last[:-1] = keys[1:] != keys[:-1]
    return set_order[by_key[is_last]]


def _sorted_cuts(changes: Numbers, cut_order: Numbers, max_blocks: int) -> _Cuts:
    """Sort the CutTables by row; a key is row * n + place in program order, so keys rise."""
    keys = changes[ROW, cut_order] * changes.shape[1] + cut_order
    by_row = np.argsort(keys)
    rows = changes[ROW, cut_order[by_row]]
    lengths = changes[PLACE, cut_order[by_row]]
    # One running minimum from the end serves all rows: adding row * (max_blocks + 1) makes every
    # value of a lower row smaller than all of a higher one, so it starts anew at each row.
    raised = lengths + rows * (max_blocks + 1)
    lowest = np.minimum.accumulate(raised[::-1])[::-1] - rows * (max_blocks + 1)
    return _Cuts(keys=keys[by_row], rows=rows, lengths=lengths, lowest=lowest)


def _cut_off(changes: Numbers, sets: Numbers, cuts: _Cuts) -> npt.NDArray[np.bool_]:
    """Return for each SetTable whether a later CutTable of its row reaches down to its position."""
    rows = changes[ROW, sets]
    following = np.searchsorted(cuts.keys, rows * changes.shape[1] + sets)
    found, following = _in_row(following, rows, cuts)
    off: npt.NDArray[np.bool_] = found & (changes[PLACE, sets] >= cuts.lowest[following])
    return off


def _row_cuts(
    rows: Numbers, cuts: _Cuts, before: Numbers, num_changes: int
) -> tuple[Numbers, Numbers]:
    """Return for each row the length of its last and of its deepest CutTable, else `before`."""
    found, first = _in_row(np.searchsorted(cuts.keys, rows * num_changes), rows, cuts)
    last = np.searchsorted(cuts.keys, (rows + 1) * num_changes) - 1
    base = np.where(found, cuts.lengths[np.maximum(last, 0)], before)
    return base, np.where(found, cuts.lowest[first], before)


def _in_row(places: Numbers, rows: Numbers, cuts: _Cuts) -> tuple[npt.NDArray[np.bool_], Numbers]:
    """Return which places are a cut of that row, and the places made safe for indexing."""
    safe = np.minimum(places, len(cuts.rows) - 1)
    found: npt.NDArray[np.bool_] = (places < len(cuts.rows)) & (cuts.rows[safe] == rows)
    return found, safe
