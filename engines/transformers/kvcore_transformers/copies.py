# SPDX-License-Identifier: Apache-2.0
"""The copies that a batch of kvcore asks for, on the tensors of transformers' cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.continuous_batching.utils import stream_context

from kvcore import Batch, CopyOnWrite, SwapIn, SwapOut
from kvcore_transformers.statistics import Statistics

KINDS = {CopyOnWrite.kind, SwapIn.kind, SwapOut.kind}


class Copies:
    """Copies whole blocks inside the device's tensor, and between it and the host's.

    device: bytes, a row per sector; block n of kvcore is row n + 1. host: bytes, a row per host
    block, or None. stream: the stream of the forward passes, None on the CPU. The copies are
    enqueued on it, so each sees what earlier forward passes wrote, and the host does not wait for
    them.
    """

    def __init__(self, device: torch.Tensor, host: torch.Tensor | None, stream: Any) -> None:
        self.device, self.host, self.stream = device, host, stream

    def apply(self, batch: Batch, kinds: list[int], statistics: Statistics) -> None:
        """Make a batch's copies segment by segment; within a segment the order is free."""
        segments: dict[int, dict[int, list[tuple[int, int]]]] = {}
        columns = (batch.column(name) for name in ("segment", "a", "b"))
        for kind, segment, source, target in zip(kinds, *columns, strict=True):
            if kind in KINDS:
                segments.setdefault(segment, {}).setdefault(kind, []).append((source, target))
        with stream_context(self.stream):
            for pairs in segments.values():
                self._copy(pairs, statistics)

    def _copy(self, pairs: dict[int, list[tuple[int, int]]], statistics: Statistics) -> None:
        """Make the copies of a segment."""
        inside, out, back = (pairs.get(each.kind, []) for each in (CopyOnWrite, SwapOut, SwapIn))
        statistics.copies += len(inside)
        statistics.offloaded += len(out)
        statistics.restored += len(back)
        if out:
            rows = self.device[self._rows([source for source, _ in out])]
            for (_, target), row in zip(out, rows, strict=True):
                self._host()[target].copy_(row, non_blocking=True)
        if inside:
            sources, targets = zip(*inside, strict=True)
            self.device[self._rows(targets)] = self.device[self._rows(sources)]
        for source, target in back:
            self.device[target + 1].copy_(self._host()[source], non_blocking=True)

    def _rows(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the row numbers of blocks as a tensor."""
        return torch.tensor(blocks, dtype=torch.int64, device=self.device.device) + 1

    def _host(self) -> torch.Tensor:
        """Return the host's tensor, which exists if the manager has host blocks."""
        assert self.host is not None
        return self.host
