# SPDX-License-Identifier: Apache-2.0
"""Block tables and slot mapping: persistent int32 tensors, changed in place by batches.

The tensors are allocated once and never replaced, so that views and CUDA graphs may keep them;
changes that do not fit raise an error. Entries past a row's length are the padding block, 0:
kvcore's null block, or, if there is none, an id that must not be read. Below a row's length the
null block is at positions that have left a window, which are not read either. Row `max_rows` never
belongs to a request: padding rows of a batch read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvcore.types.commands import CutTable, SetTable
from kvcore_runtime.attention.ragged import flat_ranges
from kvcore_runtime.cache.cache import check_size
from kvcore_runtime.cache.errors import (
    BeyondTable,
    SlotsOverflow,
    TableOutOfRange,
    lengths_differ,
)
from kvcore_runtime.cache.host_memory import allocate
from kvcore_runtime.cache.table_merge import (
    BLOCK,
    GROUP,
    KIND,
    PLACE,
    ROW,
    Numbers,
    TableChange,
    entries_of,
    merge,
)

PADDING_BLOCK = 0


class BlockTables:
    """Block tables of all rows and groups, and the slot mappings of one step.

    max_rows: rows that requests may have. max_blocks: positions of the longest table. max_tokens:
    tokens of the largest step. block_size: tokens per block, in every group or one per group.
    blocks: [num_groups, max_rows + 1, max_blocks] int32 on device. lengths: [num_groups, max_rows +
    1] int32 on the CPU, in blocks. slots: [num_groups, max_tokens] int32 on device. shared: whether
    all but the slots, on a CPU, is shared with processes that are forked later. Raises InvalidSize,
    UnequalLists.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        max_tokens: int,
        block_size: int | Sequence[int],
        *,
        num_groups: int = 1,
        device: torch.device | str = "cpu",
        shared: bool = False,
    ) -> None:
        check_size("max_rows", max_rows)
        check_size("max_blocks", max_blocks)
        check_size("max_tokens", max_tokens)
        check_size("num_groups", num_groups)
        sizes = [block_size] * num_groups if isinstance(block_size, int) else list(block_size)
        for each in sizes:
            check_size("block_size", each)
        if len(sizes) != num_groups:
            raise lengths_differ("groups", num_groups, "block_size", len(sizes))
        self.max_rows = max_rows
        self.max_blocks = max_blocks
        self.max_tokens = max_tokens
        self.block_sizes = tuple(sizes)
        self.num_groups = num_groups
        self.device = torch.device(device)
        shape = (num_groups, max_rows + 1, max_blocks)
        self.blocks = allocate(shape, torch.int32, self.device, fill=PADDING_BLOCK, shared=shared)
        self.lengths = allocate(shape[:2], torch.int32, torch.device("cpu"), shared=shared)
        self._lengths = self.lengths.numpy()  # the same memory
        self.slots = torch.zeros((num_groups, max_tokens), dtype=torch.int32, device=self.device)

    def row_blocks(self, row: int, group_id: int = 0) -> list[int]:
        """Return the block ids of one row, including null blocks, for people and tests; waits for
        the device.
        """
        length = int(self.lengths[group_id, row])
        return [int(each) for each in self.blocks[group_id, row, :length].tolist()]

    def plan(self, columns: Tensor) -> list[TableChange]:
        """Merge a batch's SetTable and CutTable, one change per group. Does not modify the tables.

        columns: [6, n] int32 on the CPU, rows as kvcore.types.commands.COLUMNS; other kinds are
        skipped. Raises TableOutOfRange or TableGap.
        """
        numbers = columns.numpy()
        kinds = numbers[KIND]
        chosen = np.flatnonzero((kinds == SetTable.kind) | (kinds == CutTable.kind))
        if len(chosen) == 0:
            return []
        changes = numbers[:, chosen].astype(np.int64)
        self._check_changes(changes)
        lengths = self._lengths.astype(np.int64)
        planned = []
        for group_id in range(self.num_groups):
            here = changes[:, changes[GROUP] == group_id]
            if here.shape[1]:
                planned.append(merge(group_id, here, lengths[group_id], self.max_blocks))
        return planned

    def commit(self, planned: Sequence[TableChange]) -> None:
        """Apply planned changes in place, on the current stream; on a GPU in one launch."""
        if planned and self.device.type == "cuda":
            # Triton is imported only if there is a GPU.
            from kvcore_runtime.cache import kernels

            entries = entries_of(planned, self.blocks[0].numel(), PADDING_BLOCK)
            with torch.cuda.device(self.device):
                kernels.write_entries(self.blocks, self._send(entries))
        for change in planned:
            if self.device.type != "cuda":
                flat = self.blocks[change.group_id].view(-1).numpy()
                flat[change.cleared] = PADDING_BLOCK
                flat[change.places] = change.blocks
            self._lengths[change.group_id, change.rows] = change.lengths

    def apply(self, columns: Tensor) -> None:
        """Change the tables by the columns of a batch; raises as `plan`, before any change."""
        self.commit(self.plan(columns))

    def slot_mapping(
        self,
        rows: Tensor | Sequence[int],
        starts: Tensor | Sequence[int],
        counts: Tensor | Sequence[int],
        *,
        group_id: int = 0,
        pad_to: int = 0,
    ) -> Tensor:
        """Fill a group's `slots`, in order, with those of counts[i] positions of rows[i].

        The positions of a row start at starts[i].

        rows, starts, counts: [n] integers on the CPU, starts and counts in tokens. A slot is block
        id * block_size + place in the block. With pad_to, slots after the last token up to pad_to
        are the first slot of the padding block. Returns the filled part of the group's `slots`, a
        view, not a copy. Raises UnequalLists, TableOutOfRange, SlotsOverflow or BeyondTable
        before changing it.
        """
        row, start, count = (np.asarray(each, dtype=np.int64) for each in (rows, starts, counts))
        num_tokens = self._check_slots(row, start, count, group_id, pad_to)
        size = self.block_sizes[group_id]
        place, offset = np.divmod(flat_ranges(start, count), size)
        place += (row * self.max_blocks).repeat(count)
        slots = self.slots[group_id]
        filled = slots[:num_tokens]
        blocks = self.blocks[group_id].view(-1)
        torch.index_select(blocks, 0, self._send(torch.from_numpy(place)), out=filled)
        filled.mul_(size).add_(self._send(torch.from_numpy(offset)))
        slots[num_tokens:pad_to] = PADDING_BLOCK * size
        return slots[: max(num_tokens, pad_to)]

    def check_reach(self, rows: Iterable[int], ends: Iterable[int], *, group_id: int = 0) -> None:
        """Raise BeyondTable if the table of rows[i] ends before position ends[i] - 1."""
        size, lengths = self.block_sizes[group_id], self._lengths[group_id].tolist()
        for row, end in zip(rows, ends, strict=True):
            if end > lengths[row] * size:
                raise BeyondTable(
                    row=row,
                    group_id=group_id,
                    position=end - 1,
                    needed=-(-end // size),
                    length=lengths[row],
                )

    def _check_changes(self, changes: Numbers) -> None:
        is_set = changes[KIND] == SetTable.kind
        _check_range("row", changes[ROW], self.max_rows - 1)
        _check_range("group", changes[GROUP], self.num_groups - 1)
        _check_range("position", changes[PLACE, is_set], self.max_blocks - 1)
        _check_range("length", changes[PLACE, ~is_set], self.max_blocks)
        _check_range("block", changes[BLOCK, is_set], torch.iinfo(torch.int32).max)

    def _check_slots(
        self, row: Numbers, start: Numbers, count: Numbers, group_id: int, pad_to: int
    ) -> int:
        for name, each in (("starts", start), ("counts", count)):
            if each.shape != row.shape or row.ndim != 1:
                raise lengths_differ("rows", row.size, name, each.size)
        _check_range("row", row, self.max_rows)
        if not 0 <= group_id < self.num_groups:
            raise TableOutOfRange(name="group", value=group_id, last=self.num_groups - 1)
        size = self.block_sizes[group_id]
        most = self.max_blocks * size
        _check_range("position", start, most)
        _check_range("count", count, most)
        num_tokens = int(count.sum())
        if max(num_tokens, pad_to) > self.max_tokens:
            raise SlotsOverflow(num_tokens=max(num_tokens, pad_to), max_tokens=self.max_tokens)
        ends = np.where(count, start + count, 0)
        self.check_reach(row.tolist(), ends.tolist(), group_id=group_id)
        return num_tokens

    def _send(self, values: Tensor) -> Tensor:
        """Send values to the tables' device, through pinned memory if it is a GPU."""
        if self.device.type == "cuda":
            return values.pin_memory().to(self.device, non_blocking=True)
        return values


def _check_range(name: str, values: Numbers, last: int) -> None:
    wrong = (values < 0) | (values > last)
    if wrong.any():
        raise TableOutOfRange(name=name, value=int(values[wrong][0]), last=last)
