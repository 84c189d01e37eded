# SPDX-License-Identifier: Apache-2.0
"""The reference engine: how to drive kvcore to serve a model, readable top to bottom.

A step (`Engine.step`) is: let the scheduler fill the manager's open batch; take the batch; apply it
to the cache; run the forward pass over the block tables; sample. One batch, one forward pass, in
this order: a taken batch counts as executed.

With `Config.max_in_flight` a step is planned while earlier batches are applied and computed in a
separate process (batch_executor.py): plan n+1; wait for n and complete it; take n+1 and submit it;
read the tokens of n while n+1 is computed. Step n+1 gets these tokens from a tensor (forward.py),
so it holds every sequence, and is wasted for one whose answer turns out to have ended. If a batch
fails, it and all later ones are cancelled, the error is raised, and the next step repeats the work.

Samples of one prompt are forked between two steps: the batch that computed the prompt is taken by
then, so the children share all of it, including the partial last block, which the manager copies
when one of them writes into it.

Drafts are guesses that are computed in the step of the token they follow (drafts.py). Keys and
values of other engines come and go through an exchange (exchange.py).
"""

import collections
import time
from collections.abc import Callable
from typing import Literal

import attrs
import torch

from kvcore import Config, KVCacheManager
from kvcore.record.recorder import record_if_requested
from kvcore.types.commands import Batch
from kvcore_runtime.cache.transfers import Finished
from kvcore_runtime.engine.batch_executor import BatchExecutor, Executed, runs_in_fork
from kvcore_runtime.engine.drafts import Drafter
from kvcore_runtime.engine.errors import EngineStuck, InvalidOption, NeverFits, RequestInProgress
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.failure import Failure
from kvcore_runtime.engine.forward import Computed, Forward, make_runtime
from kvcore_runtime.engine.metrics import Metrics, timed
from kvcore_runtime.engine.sample_step import Draw, plan_draws, split_tokens, take_tokens
from kvcore_runtime.engine.scheduler import EngineScheduler, Preemption
from kvcore_runtime.engine.sequence import (
    Completion,
    GenerationRequest,
    Sequence,
    as_core_request,
    name_sequence,
)
from kvcore_runtime.engine.spans import OnSpan, Spans
from kvcore_runtime.model.contiguous import Decode
from kvcore_runtime.model.model import Llama

Observer = Callable[["Engine", Batch], None]
"""Called in every step, after the batch was applied: to record, to draw, to test. With batches in
flight it is called when the batch was handed over, and must not look at the cache."""


@attrs.frozen(eq=False)
class Flight:
    """A batch in flight, and the draws of its step."""

    number: int
    draws: list[Draw]


@attrs.frozen(kw_only=True)
class EngineOptions:
    """The options of an engine besides its model and its pool.

    backend: of the manager; None for the twin if it is built. token_budget: most positions that a
    step computes. max_sequences: most sequences known to the manager at a time, each with a row of
    the block tables; others wait outside. drafter: guesses tokens (drafts.py). guard: check every
    read of a block (guard.py). keep_logits: return the logits of every token. executor_core: if a
    process computes the batches in flight, the only core that it uses. on_span: see spans.py.
    """

    backend: Literal["rust", "python"] | None = None
    token_budget: int = 256
    max_sequences: int = 64
    preemption: Preemption = "swap"
    drafter: Drafter | None = None
    guard: bool = False
    keep_logits: bool = False
    executor_core: int | None = None
    on_span: OnSpan | None = None

    def __attrs_post_init__(self) -> None:
        for name in ("token_budget", "max_sequences"):
            value = getattr(self, name)
            if value < 1:
                raise InvalidOption(name=name, value=value, least=1)


class Engine:
    """Answers requests with one model out of one pool of blocks.

    config: of the manager; its groups hold the layers of the model (layer_groups.py). exchange:
    makes this engine's exchange. decode: ids to text, needed only for stop strings. observe: see
    `Observer`. open_number: of the batch to be taken next. finished: ended stores and loads, for
    the exchange. Raises GroupsDoNotHoldModel, UnequalPages, InvalidOption, NoMemory, NoSuchCore,
    ExecutorNotStarted.
    """

    def __init__(
        self,
        model: Llama,
        config: Config,
        options: EngineOptions | None = None,
        *,
        exchange: Callable[["Engine"], Exchange] | None = None,
        decode: Decode | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.model = model
        self.options = options or EngineOptions()
        self.metrics = Metrics()
        self.spans = Spans(self.options.on_span)
        manager = KVCacheManager(config, self.options.backend)
        record_if_requested(manager)
        self.manager = timed(manager, self.metrics)
        _check_budget(config, self.options)
        self.runtime, groups = make_runtime(
            model,
            config,
            max_rows=config.max_rows(self.options.max_sequences),
            max_tokens=self.options.token_budget,
            guard=self.options.guard,
            shared=config.max_in_flight > 0 and runs_in_fork(model.device),
        )
        self.forward = Forward(model, self.runtime, groups, keep_logits=self.options.keep_logits)
        self._executor: BatchExecutor | None = None
        if config.max_in_flight:
            self._executor = BatchExecutor(self.runtime, self.forward, self.options.executor_core)
        self._failure = Failure()
        self._flights: collections.deque[Flight] = collections.deque()
        self.open_number = 0
        self.finished: list[Finished] = []
        self.exchange = Exchange() if exchange is None else exchange(self)
        self.scheduler = EngineScheduler(
            self.manager,
            token_budget=self.options.token_budget,
            preemption=self.options.preemption,
            drafter=self.options.drafter,
            exchange=self.exchange,
        )
        self._decode = decode
        self._observe = observe
        self._backlog: collections.deque[GenerationRequest] = collections.deque()
        self._open: dict[str, int] = {}  # request id -> its unfinished samples
        self._num_arrived = 0
        self._completions: list[Completion] = []

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return not (self._open or self._flights or self._completions or self.exchange.is_busy)

    def add_request(self, request: GenerationRequest) -> None:
        """Accept a request. Raises RequestInProgress, NeverFits, and then changes nothing."""
        if request.request_id in self._open:
            raise RequestInProgress(request=request.request_id)
        self._check_fits(request)
        self._open[request.request_id] = request.num_samples
        self._backlog.append(request)
        self.metrics.num_prompt_tokens += len(request.prompt)

    def abort(self, request_id: str) -> None:
        """Drop a request and all its samples, in any state; unknown ids are ignored."""
        if self._open.pop(request_id, None) is None:
            return
        kept = [each for each in self._backlog if each.request_id != request_id]
        self._backlog = collections.deque(kept)
        for sequence in self.scheduler.unfinished():
            if sequence.request.request_id == request_id:
                self._release(sequence)

    def cancel(self) -> None:
        """Cancel all batches in flight; their tokens are computed again."""
        if self._flights:
            self._take_back(self._flights[0].number)

    def step(self) -> list[Completion]:
        """Compute one step; return the requests that finished in it. Does nothing if idle.

        Raises EngineStuck, ExecutorNotStarted, and what a batch or its pass raised: again in each
        later call, unless it was a batch in flight, which is cancelled and repeated (failure.py).
        """
        if self.is_idle:
            return []
        with self.spans.step(self.metrics):
            self._take_in()
            with self._failure.watch():
                if self._executor is None:
                    self._step_in_order()
                else:
                    self._step_ahead(self._executor)
        completions, self._completions = self._completions, []
        return completions

    def take_finished(self) -> list[Finished]:
        """Return the ended stores and loads of executed batches."""
        finished, self.finished = self.finished, []
        return finished

    def run(self) -> list[Completion]:
        """Step until idle; return all finished requests, in order."""
        completions = []
        while not self.is_idle:
            completions += self.step()
        return completions

    def _check_fits(self, request: GenerationRequest) -> None:
        """Raise NeverFits for a request that could not be served even alone."""
        name, config = request.request_id, self.manager.config
        num_tokens = len(request.prompt) + request.sampling.max_tokens
        num_blocks = config.num_usable_blocks - config.watermark_blocks
        limits = {
            "tokens": (num_tokens, self.model.config.max_model_len),
            # The last token is sampled, never computed, so it takes no slot.
            "blocks": (config.blocks_for(num_tokens - 1), num_blocks),
            "sequences": (request.num_samples, self.options.max_sequences),
            "token ids": (1 + max(request.prompt + request.answered), self.model.config.vocab_size),
        }
        for what, (needed, available) in limits.items():
            if needed > available:
                raise NeverFits(request=name, what=what, needed=needed, available=available)

    def _take_in(self) -> None:
        """Add requests to the manager, in order, while there is a row for each sample."""
        num_known = sum(self._open.values()) - sum(each.num_samples for each in self._backlog)
        while self._backlog:
            request = self._backlog[0]
            num_known += request.num_samples
            if num_known > self.options.max_sequences:
                return
            self._backlog.popleft()
            row = self.manager.add_request(as_core_request(request, name_sequence(request)))
            self.scheduler.add(Sequence(request, arrival=self._num_arrived, row=row))
            self._num_arrived += 1

    def _step_in_order(self) -> None:
        """Plan, apply, compute, sample."""
        was_busy = self.exchange.is_busy
        chunks = self.scheduler.schedule()
        was_busy = was_busy or self.exchange.is_busy
        batch = self._take_batch()
        self.runtime.apply(batch)
        self.finished += self.runtime.take_finished()
        if self._observe is not None:
            self._observe(self, batch)
        if not chunks and not was_busy:
            self._raise_stuck()
        self.metrics.count_step(batch, chunks, self.manager.usage)
        self._poll()
        if chunks:
            draws = plan_draws(chunks)
            inputs = self.forward.prepare(chunks, draws)
            with torch.inference_mode():
                computed = self.forward.compute(self.forward.begin(inputs))
            self._sample(Flight(batch.number, draws), computed)

    def _step_ahead(self, executor: BatchExecutor) -> None:
        """Plan the next step while others are computed; read the oldest's tokens meanwhile."""
        executor.begin()
        was_busy = self.exchange.is_busy
        chunks = self.scheduler.schedule(bool(self._flights))
        was_busy = was_busy or self.exchange.is_busy
        executed: tuple[Flight, Executed] | None = None
        if chunks or self.scheduler.has_moved or was_busy:
            self.metrics.num_overlapped += bool(chunks and self._flights)
            draws = plan_draws(chunks)
            if chunks:
                executor.announce(self.forward.prepare(chunks, draws))
            if len(self._flights) == self.manager.config.max_in_flight:
                executed = self._complete(executor)
            batch = self._take_batch()
            self._flights.append(Flight(batch.number, draws))
            executor.submit(batch)
            if self._observe is not None:
                self._observe(self, batch)
            self.metrics.count_step(batch, chunks, self.manager.usage)
        elif self._flights:
            self.metrics.num_stalls += 1
            executed = self._complete(executor)
        else:
            self._raise_stuck()
        goes_well = executor.drain() if self.exchange.needs_idle_cache else True
        if executed is not None:
            flight, done = executed
            self.finished += done.finished
            if done.computed is not None:
                self._sample(flight, done.computed)
        if goes_well:
            self._poll()

    def _complete(self, executor: BatchExecutor) -> tuple[Flight, Executed]:
        """Wait for the oldest batch in flight and complete it. Raises as `step` does."""
        flight, started = self._flights[0], time.perf_counter()
        try:
            done = executor.wait()
        except Exception:
            self._take_back(flight.number)
            self._failure.is_undone = True
            raise
        finally:
            self.metrics.wait_seconds += time.perf_counter() - started
        self._flights.popleft()
        self.manager.complete(flight.number)
        return flight, done

    def _take_back(self, number: int) -> None:
        """Cancel the oldest batch in flight, and so all; their tokens are computed again."""
        assert self._executor is not None
        self.open_number += 1
        self.finished += self._executor.clear(self.open_number)
        self.manager.cancel(number)
        self.metrics.num_cancelled += len(self._flights)
        self._flights.clear()
        self.scheduler.taken_back(self.exchange.cancelled(number))

    def _take_batch(self) -> Batch:
        batch = self.manager.take_batch()
        self.open_number = batch.number + 1
        return batch

    def _poll(self) -> None:
        """Resume sequences whose load is done."""
        for sequence in self.exchange.poll():
            self.scheduler.loaded(sequence)

    def _raise_stuck(self) -> None:
        num_unfinished, num_free = len(self.scheduler.unfinished()), self.manager.num_free_blocks
        raise EngineStuck(num_unfinished=num_unfinished, num_free_blocks=num_free)

    def _sample(self, flight: Flight, computed: Computed) -> None:
        """Give each sequence the tokens that a step sampled for it, unless they are stale."""
        takers = [self._taker(draw) for draw in flight.draws]
        read = split_tokens(flight.draws, computed.tokens)
        for sequence, (draw, sampled) in zip(takers, read, strict=True):
            if sequence is None:
                continue
            if sequence.has_new_token:
                self.scheduler.give_new_token(sequence)
            taken = take_tokens(sequence, draw, sampled, computed.logits, self._decode)
            sequence.sampled_by = flight.number
            sequence.num_to_come -= sequence is draw.sequence
            self.metrics.num_generated_tokens += taken.num_tokens
            if draw.drafts:
                self.manager.accept(sequence.sequence_id, taken.num_accepted)
                self.metrics.count_drafts(len(draw.drafts), taken.num_accepted)
            if taken.completion is not None:
                self._finish(sequence)
                self._completions.append(taken.completion)
            elif sequence is not draw.sequence:
                self.scheduler.give_to_fork(sequence)

    def _taker(self, draw: Draw) -> Sequence | None:
        """Return the sequence for the tokens of a draw, None if they are stale.

        Other samples of a prompt that was just computed begin here, sharing its blocks.
        """
        first = draw.sequence
        if draw.is_stale:
            return None
        if draw.sample == first.sample:
            if draw.place == 0 and draw.sample == 0:
                self.exchange.prompt_computed(first)
            return first
        row = self.manager.fork(first.sequence_id, name_sequence(first.request, draw.sample))
        child = Sequence(first.request, arrival=first.age[0], row=row, sample=draw.sample)
        self.scheduler.add_fork(child)
        return child

    def _finish(self, sequence: Sequence) -> None:
        """Release an answered sequence; positions computed ahead of its end are wasted."""
        if sequence in self.scheduler.running:
            self.exchange.finished(sequence)
        if sequence.num_to_come:
            self.scheduler.give_new_token(sequence)  # the block that it fills can be hit
        self._release(sequence)
        name = sequence.request.request_id
        self._open[name] -= 1
        if self._open[name] == 0:
            del self._open[name]

    def _release(self, sequence: Sequence) -> None:
        """Free everything that a sequence holds, and forget it."""
        sequence.is_gone = True
        self.exchange.forget(sequence)
        self.scheduler.remove(sequence)
        self.manager.free(sequence.sequence_id)
        self.manager.remove_request(sequence.sequence_id)


def _check_budget(config: Config, options: EngineOptions) -> None:
    """Raise InvalidOption if a step may compute more of a request than the pool allows for."""
    most = config.max_num_batched_tokens
    if most is not None and most < options.token_budget:
        raise InvalidOption(name="max_num_batched_tokens", value=most, least=options.token_budget)
