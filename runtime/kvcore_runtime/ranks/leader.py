# SPDX-License-Identifier: Apache-2.0
"""Rank 0: an engine whose steps the other ranks follow.

One broadcast carries a step: its batch, and its forward pass with all tokens. Before any rank
computes, all agree that each has applied the batch. So a batch that a rank cannot apply is an error
on rank 0, and no rank waits for a sum that never comes. From there on the sums of the layers keep
the ranks in step: when rank 0 has its logits, all ranks have written their blocks.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import numpy as np
from torch import Tensor

from kvcore.types.commands import Batch
from kvcore_runtime.engine.batch_executor import runs_in_fork
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.forward import Begun
from kvcore_runtime.ranks.errors import NotLed, RankLost, StepFailed
from kvcore_runtime.ranks.links import Links
from kvcore_runtime.ranks.step_wire import RankPass, RankStep, encode_step


class Leader:
    """Leads the other ranks through the steps of an engine, which is used as usual.

    engine: over rank 0's shard, before its first step. Its `step` raises RankLost if a rank dies or
    stops, and in every call from then on; StepFailed if another rank could not apply a batch.
    Raises NotLed if the engine has an exchange, or computes in a process of its own.
    """

    def __init__(self, engine: Engine, links: Links) -> None:
        if type(engine.exchange) is not Exchange:
            raise NotLed(reason="its exchange stores and loads pages of one rank alone")
        if engine.manager.config.max_in_flight and runs_in_fork(engine.model.device):
            raise NotLed(reason="its batches run in a process of its own: max_in_flight must be 0")
        if engine.open_number:
            raise NotLed(reason=f"it has taken {engine.open_number} batches already")
        self._engine = engine
        self._links = links
        self._pending: Batch | None = None
        self._next_number = 0
        self._lost: RankLost | None = None
        self.num_steps = 0
        """Number of messages that were sent."""
        self.seconds = 0.0
        """Time in which steps were written and sent, and their batches applied by all."""
        engine.runtime.on_applied = self._applied
        engine.forward.on_pass = self._pass

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages that were sent."""
        return self._links.num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the other ranks. Raises RankLost if one is gone; the groups are left in any case."""
        try:
            if self._lost is None:
                self._flush()
                end = Batch(self._next_number, bytearray(), b"")
                self._links.broadcast(encode_step(RankStep(batch=end, ends=True)))
                self._links.agree(0)
        finally:
            self._lost = self._lost or RankLost(number=self._next_number, reason="it was closed")
            self._links.close()

    def _applied(self, batch: Batch) -> None:
        """Keep a batch until its step's forward pass is known."""
        self._flush()
        self._pending = batch

    def _pass(self, begun: Begun, tokens: Tensor) -> None:
        """Send the step that is about to be computed."""
        reads = begun.inputs.reads
        self._send(
            RankPass(
                rows=np.array(reads[0], np.uint32),
                starts=np.array(reads[1], np.uint32),
                ends=np.array(reads[2], np.uint32),
                tokens=tokens.cpu().numpy().astype(np.uint32),
                wanted=begun.wanted.cpu().numpy().astype(np.uint32),
            )
        )

    def _flush(self) -> None:
        """Send a batch that computes nothing."""
        if self._pending is not None:
            self._send(None)

    def _send(self, computes: RankPass | None) -> None:
        if self._lost is not None:
            raise self._lost
        batch, self._pending = self._pending, None
        assert batch is not None, "each pass follows the application of its batch"
        self._links.number = batch.number
        skips = batch.number != self._next_number
        started = time.perf_counter()
        message = encode_step(RankStep(batch=batch, computes=computes, skips=skips))
        try:
            self._links.broadcast(message)
            sent = time.perf_counter()
            least, *_ = self._links.agree(batch.number, 0, 0, 0)
        except RankLost as error:
            self._lost = error
            self._links.close()
            raise
        agreed = time.perf_counter()
        spans, sizes = self._engine.spans, {"num_bytes": len(message)}
        spans.end("kvcore.ranks.send", sent - started, {**sizes})
        spans.end("kvcore.ranks.agree", agreed - sent, {**sizes})
        self.seconds += agreed - started
        self.num_steps += 1
        self._next_number = batch.number + 1
        if least < 0:
            raise StepFailed(number=batch.number, reason=f"rank {-least} says why")
