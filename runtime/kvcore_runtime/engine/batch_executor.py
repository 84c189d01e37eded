# SPDX-License-Identifier: Apache-2.0
"""Applies batches and runs their forward passes while the caller plans the next step.

Batches run strictly in the order of submission, each with its forward pass before the next is
applied, since a copy may read what the previous forward pass wrote. While a batch is pending, the
cache and the tables belong to the executor; the manager and the sequences belong to the caller, so
a step's inputs are passed as plain data. After an error nothing more runs until `clear`.

On the CPU of Linux this is a process (forked_worker.py), with the cache and the tables in shared
memory; elsewhere a thread, with a stream of its own on a GPU, whose results are complete when
returned. The inputs of a step are announced before its batch, so that it is set up while the caller
takes the batch.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import attrs
import torch

from kvcore.types.commands import Batch
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.transfers import Finished
from kvcore_runtime.engine.errors import ExecutorDied, NotExecuted
from kvcore_runtime.engine.forked_worker import ForkedWorker, Reply, shared_bytes
from kvcore_runtime.engine.forward import Begun, Computed, Forward, StepInputs

_NO_CHANGE = contextlib.nullcontext()


@attrs.frozen(kw_only=True, eq=False)
class Executed:
    """The results of a batch. computed: of its step, None if it computes nothing. finished: the
    ended stores and loads, done or failed.
    """

    computed: Computed | None
    finished: list[Finished]


class BatchExecutor:
    """The pending batches, oldest first. core: as in `ForkedWorker`, which raises for it. Raises
    ExecutorNotStarted.
    """

    def __init__(self, runtime: Runtime, forward: Forward, core: int | None = None) -> None:
        self._side = _OtherSide(runtime, forward)
        device = runtime.cache.device
        self._worker = (
            ForkedWorker(self._side, core)
            if runs_in_fork(device)
            else ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvcore-executor")
        )
        self._submitted: collections.deque[Future[Any] | Reply] = collections.deque()

    def begin(self) -> None:
        """Start the process if there is one and it has not started. Raises ExecutorNotStarted."""
        if isinstance(self._worker, ForkedWorker):
            self._worker.begin()

    def announce(self, inputs: StepInputs) -> None:
        """Announce what the next submitted batch computes; without this it computes nothing."""
        send = self._worker.send if isinstance(self._worker, ForkedWorker) else self._worker.submit
        send(self._side.announce, *inputs)

    def submit(self, batch: Batch) -> None:
        """Submit a batch to be applied, with its step to be computed."""
        plain = (batch.number, batch.buffer, batch.keys, batch.epoch)
        self._submitted.append(self._worker.submit(self._side.execute, *plain))

    def wait(self) -> Executed:
        """Wait for the oldest batch.

        Raises what applying or computing raised, NotExecuted, ExecutorDied, ExecutorFailed.
        """
        given, finished = self._submitted[0].result()
        self._submitted.popleft()
        computed = None if given is None else Computed(logits=given[0], tokens=given[1])
        logits = None if computed is None else computed.logits
        if logits is not None and logits.is_cuda:
            # Created on the executor's stream, read on the caller's.
            logits.record_stream(torch.cuda.current_stream(logits.device))
        return Executed(computed=computed, finished=finished)

    def drain(self) -> bool:
        """Wait until nothing runs; return whether all succeeded. Results can still be fetched."""
        errors = [each.exception() for each in self._submitted]
        return not any(errors)

    def clear(self, next_number: int) -> list[Finished]:
        """Drop all pending batches; those that have not begun are not run.

        next_number: of the batch after the cancelled ones. Returns the ended stores and loads.
        """
        self._side.stop()
        self.drain()
        finished = [
            each
            for done in self._submitted
            if done.exception() is None
            for each in done.result()[1]
        ]
        with contextlib.suppress(ExecutorDied):  # the next batch will raise it
            finished += self._worker.submit(self._side.restart, next_number).result()
        self._submitted.clear()
        return finished


def runs_in_fork(device: torch.device) -> bool:
    """Tell whether batches run in a process, so that cache and tables must be in shared memory."""
    return device.type == "cpu" and sys.platform == "linux"


class _OtherSide:
    """The part of an executor that runs in parallel with the caller."""

    def __init__(self, runtime: Runtime, forward: Forward) -> None:
        self._runtime = runtime
        self._forward = forward
        self._begun: Begun | Exception | None = None
        self._stopped = shared_bytes(1)  # both sides see it
        self._stream: torch.cuda.Stream | None = None
        device = runtime.cache.device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def stop(self) -> None:
        """Stop further batches from beginning."""
        self._stopped[0] = 1

    def announce(self, *inputs: Any) -> None:
        """Set up the step of the next batch from its `StepInputs`; an error counts as the
        batch's.
        """
        try:
            with self._in_mode():
                self._begun = self._forward.begin(StepInputs(*inputs))
        except Exception as error:
            self._begun = error

    def execute(
        self, *batch_fields: Any
    ) -> tuple[tuple[torch.Tensor | None, list[int]] | None, list[Finished]]:
        """Apply a batch and compute its step; return the fields of `Executed`, which pickle faster
        than the object.
        """
        number, buffer, *others = batch_fields
        batch = Batch(number, bytearray(buffer), *others)
        begun, self._begun = self._begun, None
        if self._stopped[0]:
            raise NotExecuted(number=batch.number)
        try:
            if isinstance(begun, Exception):
                raise begun
            with self._in_mode():
                self._runtime.apply(batch)
                computed = None if begun is None else self._forward.compute(begun)
                if self._stream is not None:
                    self._stream.synchronize()
        except BaseException:
            self.stop()
            raise
        given = None if computed is None else (computed.logits, computed.tokens)
        return given, self._runtime.take_finished()

    def _in_mode(self) -> contextlib.AbstractContextManager[object]:
        """Enter torch's inference mode and this side's stream. A fork keeps the mode on, since
        turning it on takes 4 us.
        """
        if self._stream is None and torch.is_inference_mode_enabled():
            return _NO_CHANGE
        stack = contextlib.ExitStack()
        stack.enter_context(torch.inference_mode())
        if self._stream is not None:
            stack.enter_context(torch.cuda.stream(self._stream))
        return stack

    def restart(self, next_number: int) -> list[Finished]:
        """Continue with a batch of this number; return the ended operations of the failed one."""
        self._runtime.skip(next_number)
        self._begun = None
        self._stopped[0] = 0
        return self._runtime.take_finished()
