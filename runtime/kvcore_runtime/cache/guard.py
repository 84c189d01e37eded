# SPDX-License-Identifier: Apache-2.0
"""Guard mode: derives from the commands what each block may be read for, and poisons the rest.

A device block has an owner from Allocate, Touch or SetTable to Free, and a key from Free(cached) to
Evict or EvictAll; a block that has lost both is filled with NaN, and so is a newly allocated block,
whose content is undefined. Such fills are writes, so commands run one at a time, in program order.
A forward pass may read only owned blocks; a copy may also read cached ones. A host block may be
read once a SwapOut has written it. Positions that have left a group's window are not read: there
the table names the null block, which has no owner, so that reading it is detected like any stale
read. Of a group of states a forward pass reads the block that it then overwrites, so this is
checked for NaN before the pass, and slots of tokens after it. A table names only blocks that its
request owns; after a cancelled batch, whose commands may never have been applied, this determines
the owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvcore.types.commands import (
    Allocate,
    CopyOnWrite,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    SwapIn,
    SwapOut,
    Touch,
    Zero,
)
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.copies import ids
from kvcore_runtime.cache.errors import StaleRead, UnownedWrite
from kvcore_runtime.cache.tables import PADDING_BLOCK, BlockTables

_READS = (CopyOnWrite.kind, SwapOut.kind, Store.kind)
_WRITES = {each.kind: each.__name__ for each in (Zero, CopyOnWrite, SwapIn, Load)}


@attrs.frozen
class Reads:
    """The forward pass of one step: it computes positions starts[i] to ends[i] of rows[i].

    requests: the requests of the rows, for messages. num_drafts: how many of the last positions of
    each are drafts; default: none.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]
    requests: Sequence[str]
    num_drafts: Sequence[int] | None = None


@attrs.frozen
class _Seen:
    """The positions of one row that a step sees in one group, and the blocks that hold them."""

    step: int
    request: str
    row: int
    group_id: int
    positions: range
    blocks: Tensor

    def stale(self, block: int | None, reason: str, **fields: Any) -> StaleRead:
        """Make the error for one of the blocks."""
        fields |= {"row": self.row, "group_id": self.group_id}
        return StaleRead(step=self.step, request=self.request, block=block, reason=reason, **fields)


class CacheGuard:
    """Owners and keys of one cache's blocks, by the commands so far.

    kept: what each cache group keeps for a query, default everything. owned, keyed:
    [num_blocks] bool on the CPU. written: [num_host_blocks] bool on the CPU. null_block: whether
    block 0 is kvcore's null block.
    """

    def __init__(
        self, cache: Cache, kept: Sequence[Visibility] = (), *, null_block: bool = True
    ) -> None:
        self._cache = cache
        self._null = PADDING_BLOCK if null_block else None
        self._kept = tuple(kept) or (FULL,) * len(cache.groups)
        self.owned = torch.zeros(cache.num_blocks, dtype=torch.bool)
        self.keyed = torch.zeros(cache.num_blocks, dtype=torch.bool)
        self.written = torch.zeros(cache.num_host_blocks, dtype=torch.bool)

    def before(self, kind: int, a: int, b: int, step: int) -> None:
        """Check what a copying command is about to read and write; does not modify the guard.

        kind, a, b: as in `segments.Copying`. Raises StaleRead or UnownedWrite.
        """
        if kind in _READS and not self.owned[a] and not self.keyed[a]:
            raise StaleRead(step=step, request=None, block=a, reason="it has neither owner nor key")
        if kind == SwapIn.kind and not self.written[a]:
            reason = "no SwapOut has written this host block"
            raise StaleRead(step=step, request=None, block=a, reason=reason)
        if kind in _WRITES:
            block = a if kind == Zero.kind else b
            if not self.owned[block]:
                raise UnownedWrite(step=step, command=_WRITES[kind], block=block)

    def after(self, kind: int, a: int, b: int) -> None:
        """Note an executed command, and poison blocks that may not be read any more. a: of
        SetTable, the block.
        """
        if kind == Allocate.kind:
            self.owned[a], self.keyed[a] = True, False
            self._poison([a])
        elif kind == Touch.kind or (kind == SetTable.kind and a != self._null):
            self.owned[a] = True
        elif kind == Free.kind:
            self.owned[a], self.keyed[a] = False, bool(b)
            if not b:
                self._poison([a])
        elif kind == Evict.kind:
            self.keyed[a] = False
            if not self.owned[a]:
                self._poison([a])
        elif kind == EvictAll.kind:
            self._poison((self.keyed & ~self.owned).nonzero().view(-1).tolist())
            self.keyed.fill_(False)
        elif kind == SwapOut.kind:
            self.written[b] = True

    def check_reads(self, tables: BlockTables, reads: Reads, step: int) -> None:
        """Check that all positions that a step reads or writes lie in owned blocks, in every group,
        and that no state that it reads holds NaN.

        To be called after batch `step` was applied and before its forward pass. Raises StaleRead.
        """
        for seen in self._seen(tables, reads, step):
            stale = seen.blocks[~self.owned[seen.blocks]]
            if stale.numel():
                reason = f"it has no owner, and is in row {seen.row}, group {seen.group_id}"
                raise seen.stale(int(stale[0]), reason)
            block = seen.blocks[:1].to(self._cache.device)
            parts = self._cache.states.get(seen.group_id, ())
            if any(each[block].isnan().any() for each in parts):
                reason = "its state holds NaN: neither zeros nor a copy came before the step"
                raise seen.stale(int(seen.blocks[0]), reason)

    def check_content(self, tables: BlockTables, reads: Reads, step: int) -> None:
        """Check that no slot that a step read or wrote holds NaN, in any layer: all was written.

        To be called after the forward pass of `step`. Raises StaleRead.
        """
        for seen in self._seen(tables, reads, step):
            if seen.group_id in self._cache.states:
                continue
            size, positions = tables.block_sizes[seen.group_id], seen.positions
            content = self._cache.groups[seen.group_id].data[seen.blocks.to(self._cache.device)]
            first = positions.start // size * size
            by_slot = content.isnan().movedim(3, 1).flatten(2).any(2).view(-1).cpu()
            empty = by_slot[positions.start - first : positions.stop - first].nonzero()
            if empty.numel():
                position = positions.start + int(empty[0])
                block = int(seen.blocks[(position - first) // size])
                reason = f"position {position} of row {seen.row} holds NaN, it was never written"
                raise seen.stale(block, reason, position=position)

    def _seen(self, tables: BlockTables, reads: Reads, step: int) -> Iterator[_Seen]:
        """Return the blocks that a step sees, group by group. Raises StaleRead if a table is too
        short.
        """
        drafts = [0] * len(reads.rows) if reads.num_drafts is None else reads.num_drafts
        columns = (reads.rows, reads.starts, reads.ends, reads.requests, drafts)
        for group_id in range(tables.num_groups):
            size = tables.block_sizes[group_id]
            for row, start, end, request, count in zip(*columns, strict=True):
                positions = self._kept[group_id].seen(start, end)
                places = self._kept[group_id].blocks(start, end, size, count)
                needed, held = places.stop, int(tables.lengths[group_id, row])
                blocks = tables.blocks[group_id, row, places.start : places.stop]
                blocks = blocks.cpu().to(torch.int64)
                seen = _Seen(step, request, row, group_id, positions, blocks)
                if needed > held:
                    has = f"row {row}, group {group_id} has {held} blocks"
                    reason = f"{has}, {end} tokens lie in {needed}"
                    raise seen.stale(None, reason, length=held, needed=needed)
                yield seen

    def _poison(self, blocks: Sequence[int]) -> None:
        """Set all bits, which is NaN in every element type, of pages and of states in them."""
        if blocks:
            self._cache.blocks.pieces[:, ids(blocks, self._cache.device)] = -1
