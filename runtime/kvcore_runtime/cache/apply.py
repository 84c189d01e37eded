# SPDX-License-Identifier: Apache-2.0
"""Applies batches: kvcore's commands to cache tensors and block tables.

Batches come in number order, each exactly once (CMD-ONCE); cancelled ones may be left out
(`skip`). The whole batch is checked before anything changes. Its meaning is program order; copies
run segment by segment (segments.py), and table changes, which do not depend on contents, run at
once. Stores and loads are separate operations, whose ends `take_finished` returns: a failed one is
not an error of the batch. In guard mode commands run one at a time, and only the guard's errors can
occur in the middle of a batch. Commands of batch n run before forward pass n, on the current
stream; nothing here synchronises, except the reads of a store from a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvcore.types.commands import (
    COLUMNS,
    KINDS,
    Allocate,
    Batch,
    Evict,
    Free,
    Load,
    SetTable,
    Store,
    Touch,
)
from kvcore_runtime.attention.visibility import Visibility
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.copies import check_blocks
from kvcore_runtime.cache.errors import BatchNotNext, NoTier, NotSkipped, UnsupportedCommand
from kvcore_runtime.cache.guard import CacheGuard, Reads
from kvcore_runtime.cache.segments import (
    COPYING,
    Copying,
    Run,
    check_segments,
    run_program_order,
    run_segments,
)
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.cache.transfers import (
    TRANSFERS,
    ExternalTier,
    Finished,
    Transfer,
    read_transfers,
    run_transfers,
)

KIND, _, A, _, _, D = range(len(COLUMNS))
_MOVING = (*COPYING, *TRANSFERS)
_OWNING = (Allocate.kind, Touch.kind, Evict.kind, Free.kind)
_IS_MOVING, _IS_OWNING = (np.isin(np.arange(max(KINDS) + 1), each) for each in (_MOVING, _OWNING))


class Runtime:
    """One cache and its tables, and the number of the batch that is next.

    kept: what each cache group keeps for a query, default everything; guard mode ignores positions
    outside it. external: the tier for stores and loads. next_number: of the next batch; 0 for a new
    manager. null_block: whether block 0 is kvcore's null block.
    """

    def __init__(
        self,
        cache: Cache,
        tables: BlockTables,
        *,
        kept: Sequence[Visibility] = (),
        external: ExternalTier | None = None,
        next_number: int = 0,
        null_block: bool = True,
    ) -> None:
        self.cache = cache
        self.tables = tables
        self.external = external
        self.next_number = next_number
        self._finished: list[Finished] = []
        self.on_applied: Callable[[Batch], None] | None = None
        """Called with each batch after it was applied; what it raises is raised."""
        self.guard = CacheGuard(cache, kept, null_block=null_block) if cache.guard else None

    def apply(self, batch: Batch, run: Run = run_segments) -> None:
        """Execute a batch.

        run: how to run its copies; the other orders of segments.py give the same contents. Guard
        mode always uses program order. Raises BatchNotNext, UnsupportedCommand, BadSegments,
        BlockOutOfRange, CopyHazard, NoTier, TableOutOfRange or TableGap before anything changes,
        and StaleRead or UnownedWrite in guard mode.
        """
        if batch.number != self.next_number:
            raise BatchNotNext(number=batch.number, expected=self.next_number)
        if len(batch) > 0:  # the case of most steps that only decode have nothing to apply
            self._apply(batch, run)
        self.next_number += 1
        if self.on_applied is not None:
            self.on_applied(batch)

    def _apply(self, batch: Batch, run: Run) -> None:
        columns = batch_columns(batch)
        moves = _check(self.cache, batch.number, columns)
        has_transfers = any(each.kind in TRANSFERS for each in moves)
        transfers = read_transfers(batch, columns) if has_transfers else []
        if transfers and self.external is None:
            raise NoTier(number=batch.number, operation=transfers[0].operation)
        planned = self.tables.plan(columns)
        if self.guard is not None:
            self._run_guarded(self.guard, columns, transfers, batch.number)
        elif transfers:
            self._run_by_segment(run, moves, transfers)
        else:
            run(self.cache, moves)
        self.tables.commit(planned)

    def skip(self, next_number: int) -> None:
        """Set the number of the next batch: earlier ones that were not applied, or that an error
        stopped halfway, are cancelled.

        The first batch after a `cancel` names the whole table of each row that they touched. Raises
        NotSkipped if the number would go back.
        """
        if next_number < self.next_number:
            raise NotSkipped(number=next_number, expected=self.next_number)
        self.next_number = next_number

    def take_finished(self) -> list[Finished]:
        """Return the stores and loads that have ended since the last call, done or failed."""
        finished, self._finished = self._finished, []
        return finished

    def check_reads(self, reads: Reads) -> None:
        """Check, in guard mode, what the forward pass of the last batch will read.

        Raises StaleRead. Without guard mode does nothing.
        """
        if self.guard is not None:
            self.guard.check_reads(self.tables, reads, self.next_number - 1)

    def check_content(self, reads: Reads) -> None:
        """Check, in guard mode, that the forward pass of the last batch left no slot unwritten.

        Raises StaleRead. Without guard mode does nothing.
        """
        if self.guard is not None:
            self.guard.check_content(self.tables, reads, self.next_number - 1)

    def _run_guarded(
        self, guard: CacheGuard, columns: Tensor, transfers: Sequence[Transfer], number: int
    ) -> None:
        waiting = iter(transfers)
        for kind, segment, a, b, c, d in columns.t().tolist():
            if kind in COPYING or kind in TRANSFERS:
                move = _move(kind, segment, a, b, c)
                guard.before(kind, move.a, move.b, number)
                if kind in COPYING:
                    run_program_order(self.cache, [move])
                else:
                    self._transfer([next(waiting)])
            guard.after(kind, d if kind == SetTable.kind else a, b)

    def _run_by_segment(
        self, run: Run, moves: Sequence[Copying], transfers: Sequence[Transfer]
    ) -> None:
        """Run segment by segment. Inside a segment the order is free, so its stores and loads come
        last.
        """
        for segment in sorted({each.segment for each in moves}):
            copying = [each for each in moves if each.kind in COPYING]
            run(self.cache, [each for each in copying if each.segment == segment])
            self._transfer([each for each in transfers if each.segment == segment])

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        assert self.external is not None
        self._finished += run_transfers(self.cache.blocks, self.external, transfers)


def batch_columns(batch: Batch) -> Tensor:
    """Return a batch's columns as [6, n] int32 on the CPU, sharing its memory."""
    if len(batch) == 0:
        return torch.zeros((len(COLUMNS), 0), dtype=torch.int32)
    return torch.frombuffer(batch.buffer, dtype=torch.int32).view(len(COLUMNS), -1)


def _check(cache: Cache, number: int, columns: Tensor) -> list[Copying]:
    """Check kinds, block ids and segments; return the commands that read or write blocks, in
    program order.
    """
    numbers = columns.numpy()
    kinds = numbers[KIND]
    for kind in kinds.tolist():
        if kind not in KINDS:
            raise UnsupportedCommand(number=number, kind=kind)
    for named in (numbers[A, _IS_OWNING[kinds]], numbers[D, kinds == SetTable.kind]):
        if len(named):
            check_blocks(cache.blocks, [int(named.min()), int(named.max())])
    moves = [_move(*row) for row in numbers[:D, _IS_MOVING[kinds]].T.tolist()]
    check_segments(cache, number, moves)
    return moves


def _move(kind: int, segment: int, a: int, b: int, c: int) -> Copying:
    """Return what a row of the columns reads and writes."""
    if kind == Store.kind:
        return Copying(kind, segment, b, b)
    if kind == Load.kind:
        return Copying(kind, segment, c, c)
    return Copying(kind, segment, a, b)
