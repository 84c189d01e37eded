# SPDX-License-Identifier: Apache-2.0
"""Applies batches: kvcore's commands to cache tensors and block tables.

Rules: batches come in number order, each exactly once (CMD-ONCE). A batch is checked whole before
anything changes. Its meaning is program order; copies run segment by segment (segments.py), table
changes, which do not depend on contents, at once. In guard mode commands run one at a time, and the
guard's errors are the only ones that come in the middle of a batch. Commands of batch n run before
forward pass n, on the current stream; nothing here synchronises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore.commands import COLUMNS, KINDS, Allocate, Batch, Evict, Free, SetTable, Touch
from kvcore_runtime.cache import Cache
from kvcore_runtime.cache_errors import BatchOutOfOrder, UnsupportedCommand
from kvcore_runtime.copies import check_blocks
from kvcore_runtime.guard import Guard
from kvcore_runtime.segments import (
    COPYING,
    Copying,
    Run,
    check_segments,
    run_program_order,
    run_segments,
)
from kvcore_runtime.tables import BlockTables
from kvcore_runtime.visibility import Visibility

KIND, SEGMENT, A, B, _, D = range(len(COLUMNS))
_COPYING = torch.tensor(COPYING, dtype=torch.int32)
_OWNING = torch.tensor([Allocate.kind, Touch.kind, Evict.kind, Free.kind], dtype=torch.int32)
_KNOWN = torch.tensor(sorted(KINDS), dtype=torch.int32)


class Runtime:
    """One cache and its tables, and the number of the batch that is next.

    kept: what each cache group keeps for a query, everything if not said; guard mode takes what is
    behind for not read. next_number: the first batch to come; a new manager's is 0.
    """

    def __init__(
        self,
        cache: Cache,
        tables: BlockTables,
        *,
        kept: Sequence[Visibility] = (),
        next_number: int = 0,
    ) -> None:
        self.cache = cache
        self.tables = tables
        self.next_number = next_number
        self.guard = Guard(cache, kept) if cache.guard else None

    @property
    def slots(self) -> Tensor:
        """The persistent slot mappings, [num_groups, max_tokens] int32; `tables` fills them."""
        return self.tables.slots

    def apply(self, batch: Batch, run: Run = run_segments) -> None:
        """Carry out a batch.

        run: how its copies are run; the other orders of segments.py give the same contents. In
        guard mode it is always program order. Raises BatchOutOfOrder, UnsupportedCommand,
        BadSegments, BlockOutOfRange, CopyHazard, TableOutOfRange or TableGap before anything
        changes, and StaleRead or UnownedWrite in guard mode.
        """
        if batch.number != self.next_number:
            raise BatchOutOfOrder(number=batch.number, expected=self.next_number)
        columns = batch_columns(batch)
        copying = _check(self.cache, batch.number, columns)
        planned = self.tables.plan(columns)
        if self.guard is not None:
            self._run_guarded(self.guard, columns, batch.number)
        else:
            run(self.cache, copying)
        self.tables.commit(planned)
        self.next_number += 1

    def check_reads(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        requests: Sequence[str],
    ) -> None:
        """In guard mode check what the forward pass of the last batch will read; else do nothing.

        starts: the first position of each row that the step computes. lengths: tokens of each row,
        this step's included. Raises StaleRead.
        """
        if self.guard is not None:
            last = self.next_number - 1
            self.guard.check_reads(self.tables, rows, starts, lengths, requests, last)

    def check_content(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        requests: Sequence[str],
    ) -> None:
        """In guard mode check that the forward pass of the last batch left no slot unwritten.

        Arguments as for `check_reads`. Raises StaleRead.
        """
        if self.guard is not None:
            last = self.next_number - 1
            self.guard.check_content(self.tables, rows, starts, lengths, requests, last)

    def _run_guarded(self, guard: Guard, columns: Tensor, number: int) -> None:
        for kind, segment, a, b, _, _ in columns.t().tolist():
            if kind in COPYING:
                guard.before(kind, a, b, number)
                run_program_order(self.cache, [Copying(kind, segment, a, b)])
            guard.after(kind, a, b)


def batch_columns(batch: Batch) -> Tensor:
    """A batch's columns as [6, n] int32 on the CPU, sharing its memory."""
    if len(batch) == 0:
        return torch.zeros((len(COLUMNS), 0), dtype=torch.int32)
    return torch.frombuffer(batch.buffer, dtype=torch.int32).view(len(COLUMNS), -1)


def _check(cache: Cache, number: int, columns: Tensor) -> list[Copying]:
    """Check kinds, block ids and segments; the copying commands in program order."""
    kinds = columns[KIND]
    unknown = kinds[~torch.isin(kinds, _KNOWN)]
    if unknown.numel():
        raise UnsupportedCommand(number=number, kind=int(unknown[0]))
    for named in (columns[A, torch.isin(kinds, _OWNING)], columns[D, kinds == SetTable.kind]):
        if named.numel():
            check_blocks(cache.blocks, [int(named.min()), int(named.max())])
    chosen = columns[:, torch.isin(kinds, _COPYING)][[KIND, SEGMENT, A, B]]
    copying = [Copying(*row) for row in chosen.t().tolist()]
    check_segments(cache, number, copying)
    return copying
