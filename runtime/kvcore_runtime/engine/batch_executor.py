# SPDX-License-Identifier: Apache-2.0
"""One thread that applies batches and runs their forward passes, beside the thread that plans.

Batches run strictly in the order they were submitted, each with its forward pass before the
next is applied: a copy may read what the forward pass before it wrote. While anything is on its way
the cache and the tables belong to the executor; the manager and the sequences belong to the caller,
so what a step needs of them is handed over as plain data. After an error nothing more is run until
`clear`. On a GPU the executor has a stream of its own, and what it hands out is computed.
"""

from __future__ import annotations

import collections
import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

import attrs
import torch

from kvcore.types.commands import Batch
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.transfers import Finished
from kvcore_runtime.engine.errors import NotExecuted
from kvcore_runtime.engine.forward import Computed, Forward, StepInputs


@attrs.frozen(kw_only=True, eq=False)
class Executed:
    """What a batch gave. computed: of its step, None if it computes nothing.

    finished: the stores and loads that were over, done or failed.
    """

    computed: Computed | None
    finished: list[Finished]


class BatchExecutor:
    """The batches on their way, oldest first."""

    def __init__(self, runtime: Runtime, forward: Forward) -> None:
        self._runtime = runtime
        self._forward = forward
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvcore-executor")
        self._submitted: collections.deque[Future[Executed]] = collections.deque()
        self._stopped = False
        self._stream: torch.cuda.Stream | None = None
        device = runtime.cache.device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def submit(self, batch: Batch, inputs: StepInputs | None) -> None:
        """Let a batch be applied and its step be computed, None for nothing to compute."""
        self._submitted.append(self._thread.submit(self._execute, batch, inputs))

    def wait(self) -> Executed:
        """Wait for the oldest batch. Raises what applying or computing it raised, NotExecuted."""
        done = self._submitted[0].result()
        self._submitted.popleft()
        if self._stream is not None and done.computed is not None:
            # Made on the executor's stream, read on the caller's.
            logits = done.computed.logits
            logits.record_stream(torch.cuda.current_stream(logits.device))
        return done

    def drain(self) -> bool:
        """Wait until nothing runs; returns whether all went well. What came out stays to be had."""
        errors = [each.exception() for each in self._submitted]
        return not any(errors)

    def clear(self, next_number: int) -> list[Finished]:
        """Forget all batches on their way: those that have not begun are not run.

        next_number: of the batch that comes after what is cancelled. Returns the stores and loads
        that are over.
        """
        self._stopped = True
        self.drain()
        finished = [
            each
            for done in self._submitted
            if done.exception() is None
            for each in done.result().finished
        ]
        finished += self._runtime.take_finished()  # of the batch that failed
        self._submitted.clear()
        self._runtime.skip(next_number)
        self._stopped = False
        return finished

    def _execute(self, batch: Batch, inputs: StepInputs | None) -> Executed:
        """Run on the thread."""
        if self._stopped:
            raise NotExecuted(number=batch.number)
        try:
            with contextlib.ExitStack() as stack:
                if self._stream is not None:
                    stack.enter_context(torch.cuda.stream(self._stream))
                self._runtime.apply(batch)
                computed = None if inputs is None else self._forward.compute(inputs)
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException:
            self._stopped = True
            raise
        return Executed(computed=computed, finished=self._runtime.take_finished())
