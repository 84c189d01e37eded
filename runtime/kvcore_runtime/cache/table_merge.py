# SPDX-License-Identifier: Apache-2.0
"""Merges the table commands of a batch into one change per group, over whole columns.

The merged change gives what program order gives: the last SetTable of a position wins,
unless a later CutTable of its row cuts it off; a row's length is that of its last CutTable, or
further where later SetTables reach. Pure: reads columns and lengths, changes nothing. All tensors
are int64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
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


@attrs.frozen(eq=False, kw_only=True)
class TableChange:
    """What a batch does to one group's table.

    cleared, places: flat indices into [rows, max_blocks]; blocks: what goes to places, after the
    clearing. rows, lengths: the rows that are named and their new lengths in blocks.
    """

    group_id: int
    cleared: Tensor
    places: Tensor
    blocks: Tensor
    rows: Tensor
    lengths: Tensor


@attrs.frozen(eq=False, kw_only=True)
class _Cuts:
    """CutTables by row, then order; lowest: the least length of this and the row's later ones."""

    keys: Tensor
    rows: Tensor
    lengths: Tensor
    lowest: Tensor


def merge(group_id: int, changes: Tensor, lengths: Tensor, max_blocks: int) -> TableChange:
    """Merge the table commands of one group.

    changes: [6, n] columns, only SetTable and CutTable, in program order. lengths: [rows], before.
    Raises TableGap if a row would have a position below its length that was never set.
    """
    num_changes = changes.shape[1]
    is_set = changes[KIND] == SetTable.kind
    set_order = is_set.nonzero().view(-1)
    rows = torch.unique(changes[ROW])
    before = lengths[rows].to(torch.int64)
    base = intact = before
    kept = _last_of_each_place(changes, set_order, max_blocks)
    if set_order.numel() < num_changes:
        cuts = _sorted_cuts(changes, (~is_set).nonzero().view(-1), max_blocks)
        kept = kept[~_cut_off(changes, kept, cuts)]
        base, lowest = _row_cuts(rows, cuts, before, num_changes)
        intact = torch.minimum(before, lowest)
    places = changes[PLACE, kept]
    at = torch.searchsorted(rows, changes[ROW, kept])
    after = base.scatter_reduce(0, at, places + 1, "amax")
    fresh = torch.zeros_like(rows).scatter_add_(0, at, (places >= intact[at]).to(torch.int64))
    torn = (fresh != after - intact).nonzero().view(-1)
    if torn.numel():
        row, length = int(rows[torn[0]]), int(after[torn[0]])
        raise TableGap(row=row, group_id=group_id, length=length)
    return TableChange(
        group_id=group_id,
        cleared=torch.from_numpy(flat_ranges(rows * max_blocks + intact, before - intact)),
        places=changes[ROW, kept] * max_blocks + places,
        blocks=changes[BLOCK, kept],
        rows=rows,
        lengths=after,
    )


def entries_of(planned: Sequence[TableChange], group_size: int, cleared_to: int) -> Tensor:
    """All changes of a batch as what is written where: [2, n], flat places, then values.

    group_size: entries of one group's table. cleared_to: the value of a cleared place. No place is
    there twice, so the writes may run in any order.
    """
    places, values = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for change in planned:
        first = change.group_id * group_size
        cleared = change.cleared[~torch.isin(change.cleared, change.places)]
        places += [first + cleared, first + change.places]
        values += [torch.full_like(cleared, cleared_to), change.blocks]
    return torch.stack([torch.cat(places), torch.cat(values)])


def _last_of_each_place(changes: Tensor, set_order: Tensor, max_blocks: int) -> Tensor:
    """Of SetTables of the same row and position the last one, as places in program order."""
    keys = changes[ROW, set_order] * max_blocks + changes[PLACE, set_order]
    keys, by_key = keys.sort(stable=True)
    is_last = torch.ones_like(keys, dtype=torch.bool)
    is_last[:-1] = keys[1:] != keys[:-1]
    return set_order[by_key[is_last]]


def _sorted_cuts(changes: Tensor, cut_order: Tensor, max_blocks: int) -> _Cuts:
    """The CutTables by row; a key is row * n + place in program order, so keys rise."""
    keys = changes[ROW, cut_order] * changes.shape[1] + cut_order
    keys, by_row = keys.sort()
    rows = changes[ROW, cut_order[by_row]]
    lengths = changes[PLACE, cut_order[by_row]]
    # One running minimum from the end serves all rows: adding row * (max_blocks + 1) makes every
    # value of a lower row smaller than all of a higher one, so it starts anew at each row.
    raised = lengths + rows * (max_blocks + 1)
    lowest = raised.flip(0).cummin(0).values.flip(0) - rows * (max_blocks + 1)
    return _Cuts(keys=keys, rows=rows, lengths=lengths, lowest=lowest)


def _cut_off(changes: Tensor, sets: Tensor, cuts: _Cuts) -> Tensor:
    """For each SetTable: does a later CutTable of its row reach down to its position."""
    rows = changes[ROW, sets]
    following = torch.searchsorted(cuts.keys, rows * changes.shape[1] + sets)
    found, following = _in_row(following, rows, cuts)
    return found & (changes[PLACE, sets] >= cuts.lowest[following])


def _row_cuts(rows: Tensor, cuts: _Cuts, before: Tensor, num_changes: int) -> tuple[Tensor, Tensor]:
    """For each row the length of its last and of its deepest CutTable, else `before`."""
    found, first = _in_row(torch.searchsorted(cuts.keys, rows * num_changes), rows, cuts)
    last = torch.searchsorted(cuts.keys, (rows + 1) * num_changes) - 1
    base = torch.where(found, cuts.lengths[last.clamp(min=0)], before)
    return base, torch.where(found, cuts.lowest[first], before)


def _in_row(places: Tensor, rows: Tensor, cuts: _Cuts) -> tuple[Tensor, Tensor]:
    """Which places are a cut of that row; the places, made safe to index with."""
    safe = places.clamp(max=cuts.rows.numel() - 1)
    return (places < cuts.rows.numel()) & (cuts.rows[safe] == rows), safe
