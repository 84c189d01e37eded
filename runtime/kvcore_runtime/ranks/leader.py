# SPDX-License-Identifier: Apache-2.0
"""Rank 0: an engine whose steps the other ranks follow.

One message carries a step: its batch, and its forward pass with all tokens. Each rank reports to
rank 0 that it has applied the batch, and computes; rank 0 reads the reports when it has computed,
too. So they cost no waiting, and nothing of the step counts before all have come. A rank that
cannot apply a batch adds zeros to the sums of its pass, so no rank waits for one that never comes.
The sums of the layers keep the ranks in step: when rank 0 has its logits, all ranks have written
their blocks. A batch with stores or loads is sent, and reported, before its forward pass, since the
engine counts them as done before that.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
from torch import Tensor

from kvcore.types.commands import Batch
from kvcore_runtime.engine.batch_executor import runs_in_fork
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.forward import Begun
from kvcore_runtime.ranks.errors import NotLed, RankLost, StepFailed
from kvcore_runtime.ranks.exchange import RankExchange
from kvcore_runtime.ranks.links import Links
from kvcore_runtime.ranks.step_wire import RankOrder, RankPass, RankStep, encode_step


class Leader:
    """Leads the other ranks through the steps of an engine, which is used as usual.

    engine: over rank 0's shard, before its first step. Its `step` raises RankLost if a rank dies or
    stops, StepFailed if another rank could not apply a batch, and the same in every call from then
    on. Raises NotLed if the engine has an exchange for one rank, drafts beside states, or computes
    in a process of its own.
    """

    def __init__(self, engine: Engine, links: Links) -> None:
        exchange = engine.exchange
        self._exchange = exchange if isinstance(exchange, RankExchange) else None
        if self._exchange is None and type(exchange) is not Exchange:
            raise NotLed(reason="its exchange stores and loads pages of one rank alone")
        if self._exchange is not None and engine.manager.config.max_in_flight:
            raise NotLed(reason="it has a far tier: max_in_flight must be 0")
        if engine.manager.config.max_in_flight and runs_in_fork(engine.model.device):
            raise NotLed(reason="its batches run in a process of its own: max_in_flight must be 0")
        if engine.options.drafter is not None and engine.manager.config.has_states:
            raise NotLed(reason="it has drafts beside states, which other ranks do not know of")
        if engine.open_number:
            raise NotLed(reason=f"it has taken {engine.open_number} batches already")
        self._engine = engine
        self._links = links
        self._pending: Batch | None = None
        self._next_number = 0
        self._failed: RankLost | StepFailed | None = None
        self._num_sent = 0
        self.num_steps = 0
        """Number of messages that were sent."""
        self.seconds = 0.0
        """Time in which steps were written and sent, and their batches applied by all."""
        engine.runtime.on_applied = self._applied
        engine.forward.on_pass, engine.forward.on_passed = self._pass, self._collect

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
        self._hear()
        try:
            if not isinstance(self._failed, RankLost):
                if self._failed is None:
                    self._flush()
                end = Batch(self._next_number, bytearray(), b"")
                self._links.broadcast(encode_step(RankStep(batch=end, ends=True)))
                self._links.collect()
        finally:
            if self._failed is None:
                self._failed = RankLost(number=self._next_number, reason="it was closed")
            self._links.close()

    def _applied(self, batch: Batch) -> None:
        """Keep a batch until its step's forward pass is known, unless it stores or loads."""
        self._flush()
        self._pending = batch
        marks = () if self._exchange is None else self._exchange.marks(batch)
        if marks:
            self._send(None, marks)
            self._collect()

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
            self._collect()

    def _send(self, computes: RankPass | None, orders: tuple[RankOrder, ...] = ()) -> None:
        """Send the pending batch, or the pass of the one that was sent before."""
        self._check()
        batch, self._pending = self._pending, None
        is_applied = batch is None
        if batch is None:
            batch = Batch(self._next_number - 1, bytearray(), b"")
        skips = not is_applied and batch.number != self._next_number
        self._links.number, self._next_number = batch.number, batch.number + 1
        started = time.perf_counter()
        message = encode_step(
            RankStep(
                batch=batch, computes=computes, orders=orders, is_applied=is_applied, skips=skips
            )
        )
        try:
            self._links.broadcast(message)
        except RankLost as error:
            self._fail(error)
        seconds = time.perf_counter() - started
        self._engine.spans.end("kvcore.ranks.send", seconds, {"num_bytes": len(message)})
        self.seconds += seconds
        self.num_steps += 1
        self._num_sent = len(message)

    def _collect(self) -> None:
        """Wait until all ranks have applied the batch that was sent last."""
        started = time.perf_counter()
        try:
            least = self._links.collect()
        except RankLost as error:
            self._fail(error)
        seconds = time.perf_counter() - started
        self._engine.spans.end("kvcore.ranks.agree", seconds, {"num_bytes": self._num_sent})
        self.seconds += seconds
        if least < 0:
            number = self._links.number
            self._fail(StepFailed(number=number, reason=f"rank {-least} says why"))

    def _check(self) -> None:
        self._hear()
        if self._failed is not None:
            raise self._failed

    def _hear(self) -> None:
        """Note that another rank could not carry out an order of the exchange."""
        if self._failed is None and self._exchange is not None:
            self._failed = self._exchange.failed

    def _fail(self, error: RankLost | StepFailed) -> NoReturn:
        """Raise an error, now and in each later call."""
        self._failed = error
        if isinstance(error, RankLost):
            self._links.close()
        raise error
