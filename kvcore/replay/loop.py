# SPDX-License-Identifier: Apache-2.0
"""The replay: continuous batching (`kvcore.scheduler`) over the real manager, in virtual time.

Only costs depend on real time. A step takes `base_seconds`, and a time per prompt token and decode.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable

import attrs

from kvcore.manager import KVCacheManager
from kvcore.metrics import measured
from kvcore.replay.arrivals import Arrivals
from kvcore.replay.configuration import make_config
from kvcore.replay.costs import MEASURED, Meter
from kvcore.replay.expand import outputs, prompt_tokens
from kvcore.replay.far.replay_tier import ReplayTier
from kvcore.replay.record import Record
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import BackendName, Options, Result, Sample
from kvcore.replay.workload import TraceRequest
from kvcore.scheduler import ScheduledChunk, Scheduler
from kvcore.types.commands import Batch, Evict
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Hit, Refused, Request

Watch = Callable[[Sample], object]
Apply = Callable[[Batch, "Step"], object]
Observe = Callable[[KVCacheManager], KVCacheManager]


def replay(
    requests: Iterable[TraceRequest],
    options: Options,
    *,
    backend: BackendName | None = None,
    watch: Watch | None = None,
    apply: Apply | None = None,
    observe: Observe | None = None,
    costs: bool = True,
) -> Result:
    """Run the requests through a manager; return the result.

    requests: in the order of their arrival; a `TraceReader` also provides the name and the count of
    skipped lines. watch: called with a sample after each step. apply: called with each step's batch
    before the next step. observe: returns the manager for the loop, around the real one. costs:
    measure the calls, which can take half of the run's time. A KeyboardInterrupt ends the run, and
    the result contains what was done.
    Raises InvalidReplayOption, InvalidConfig, InvalidCount, and what reading the requests raises.
    """
    config = make_config(options)
    loop = Loop(requests, options, KVCacheManager(config, backend), apply, observe, costs)
    try:
        while (sample := loop.step()) is not None:
            if watch is not None:
                watch(sample)
    except KeyboardInterrupt:
        loop.record.interrupted = True
    if isinstance(requests, TraceReader):
        return loop.result((requests.name, requests.num_skipped))
    return loop.result(("requests", 0))


@attrs.define(eq=False)
class Sequence:
    """A request that the manager knows.

    prompt: its tokens. num_wanted: number of outputs after which it ends. outputs: all of them.
    num_sampled: number of outputs so far; newest: the last of them. has_new_token: the manager does
    not have that one yet. is_new: it never ran.
    """

    request: TraceRequest
    sequence_id: str
    prompt: array[int]
    row: int
    num_wanted: int
    outputs: array[int]
    num_sampled: int = 0
    newest: int = 0
    has_new_token: bool = False
    is_new: bool = True
    sampled_by: int | None = None
    num_to_come: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and outputs, including the new one."""
        return len(self.prompt) + self.num_sampled

    @property
    def num_known(self) -> int:
        """Number of tokens that the manager has."""
        return self.num_tokens - self.has_new_token

    @property
    def can_decode(self) -> bool:
        """Whether its newest output has no position yet."""
        return self.has_new_token

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the token ids at positions [start, end)."""
        length = len(self.prompt)
        tokens = self.prompt[start:end]
        first = max(0, start - length)
        tokens += self.outputs[first : max(0, end - length)]
        return tokens

    def give(self) -> None:
        """Note that the manager has the new token."""
        self.has_new_token = False

    def drop_output(self) -> None:
        """Do nothing: each output is known when the next step is planned."""


@attrs.frozen
class Step:
    """One step of the loop, from 0. time: when it starts, in virtual seconds."""

    number: int
    time: float
    chunks: Collection[ScheduledChunk[Sequence]]
    num_prefill_tokens: int
    num_decodes: int


class Batcher(Scheduler[Sequence]):
    """The policy of `kvcore.scheduler` for requests that arrive in virtual time.

    No request is admitted in a step in which a sequence was skipped, nor before all running prompts
    are computed, so the order of look-ups is the order in which contents appear. After the waiting
    preempted requests come those that the manager knows already, as many as `Options.num_known`.
    """

    def __init__(
        self, manager: KVCacheManager, options: Options, arrivals: Arrivals, record: Record
    ) -> None:
        swaps = manager.config.num_host_blocks > 0
        super().__init__(manager, token_budget=options.token_budget, swaps=swaps)
        self._max_running = options.max_running
        self._num_known = options.num_known
        self._spared = options.spared
        self._arrivals = arrivals
        self._record = record
        self._was_refused = False
        self.far = ReplayTier(manager, options)
        self.decoding: list[Sequence] = []
        self.now = 0.0

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold nothing."""
        return len(self.waiting) + len(self._arrivals.waiting)

    def schedule(self, in_flight: bool = False) -> list[ScheduledChunk[Sequence]]:
        """Fill the open batch; return chunks of prompts. Each sequence in `decoding` got a
        position.
        """
        self._was_refused = False
        self.decoding = []
        if self._num_known:
            self._make_known()
        return super().schedule(in_flight)

    def _num_copied(self, sequence: Sequence) -> int:
        return self._manager.config.blocks_for(sequence.num_known)

    def _came_back(self, sequence: Sequence) -> None:
        self._record.swapped_in(sequence.request)

    def _make_room(self, taker: Sequence, refused: Refused) -> bool:
        self._was_refused = True
        return super()._make_room(taker, refused)

    def _decoded(self, sequences: list[Sequence], given: bool) -> None:
        """Make no chunks, since a long run mostly decodes."""
        for each in sequences if given else ():
            each.has_new_token = False
        self.decoding += sequences
        self._scheduled.update(sequences)
        self._budget -= len(sequences)

    def _may_admit(self) -> bool:
        has_room = len(self.running) + len(self.loading) < self._max_running
        return has_room and self._budget > 0 and not self._was_refused

    def _next_waiting(self) -> Sequence | None:
        """Return the first waiting request that the manager knows."""
        self._make_known()
        return super()._next_waiting()

    def _make_known(self) -> None:
        """Add arrived requests to the manager, up to the number that it shall know, at
        least one.
        """
        while len(self.waiting) < max(1, self._num_known) and self._arrivals.waiting:
            arrived = self._arrivals.waiting.popleft()
            request, name = arrived.request, str(arrived.number)
            tokens = prompt_tokens(request.hash_ids, request.prompt_len, request.unit)
            row = self._manager.add_request(Request(name, tokens))
            answer = outputs(arrived.number, max(1, request.output_len))
            self.waiting.append(Sequence(request, name, tokens, row, request.output_len, answer))

    def _num_reserved(self, hit: Hit) -> int:
        """Return how many blocks are due to other requests, up to a share of the pool; 0 if nothing
        runs.
        """
        due = self._manager.num_due_blocks if self.running else 0
        own = sum(map(len, hit.blocks.blocks))
        return max(0, min(due - own, int(self._spared * self._manager.config.num_usable_blocks)))

    def _begin_load(self, sequence: Sequence, hit: Hit) -> int | Refused:
        reserved = self._num_reserved(hit)
        got = self.far.begin(sequence.sequence_id, sequence.num_known, hit, reserved)
        if not isinstance(got, Refused) and got > 0:
            self._record.far_hit_tokens += got if sequence.is_new else 0
            self._admitted(sequence, hit)
        return got

    def loads_end(self) -> None:
        """Let the sequences run whose load was in the batch that was taken."""
        self.far.end()
        self.running += self.loading
        self.loading = []

    def _admitted(self, sequence: Sequence, hit: Hit) -> None:
        request = sequence.request
        if sequence.is_new:
            self._record.admitted(request, self.now - request.arrival, hit.num_tokens)
        else:
            self._record.admitted_again(request, sequence.num_known, hit.num_tokens)
        sequence.is_new = False


class Loop:
    """One run."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        options: Options,
        manager: KVCacheManager,
        apply: Apply | None = None,
        observe: Observe | None = None,
        costs: bool = True,
    ) -> None:
        self.record = Record(options, manager.config)
        self._options = options
        self._manager = manager
        self._meter = Meter()
        self._metered = measured(manager, self._meter.call, MEASURED) if costs else manager
        if observe is not None:
            self._metered = observe(self._metered)
        self._apply = apply
        self._arrivals = Arrivals(requests, options.num_requests, self.record.accept)
        self._batcher = Batcher(self._metered, options, self._arrivals, self.record)
        self.record.preempted = self._batcher.preemptions
        self._cached = 0

    @property
    def now(self) -> float:
        """The virtual time."""
        return self._batcher.now

    def step(self) -> Sample | None:
        """Run one step, from arrivals to finished requests; None if nothing is left to do."""
        arrivals, batcher = self._arrivals, self._batcher
        arrivals.pull(self.now)
        if not (batcher.running or batcher.swapped or batcher.num_waiting):
            upcoming = arrivals.next_time()
            if upcoming is None:
                return None
            self._idle(upcoming)
            arrivals.pull(self.now)
        start = self.now
        chunks = batcher.schedule()
        if not (chunks or batcher.decoding or batcher.loading):
            raise InvariantViolation("REPLAY", f"step {self.record.steps} computes nothing")
        self._finish_step(chunks)
        sample = self._sample()
        self.record.samples.add(sample)
        self.record.spent.add(self.now - start, sample)
        self.record.steps += 1
        return sample

    def _idle(self, until: float) -> None:
        """Let time pass in which there is no request."""
        seconds = until - self.now
        if seconds > 0:
            sample = attrs.evolve(self._sample(), cached_blocks=self._manager.num_cached_blocks)
            self.record.spent.add(seconds, sample)
            self.record.idle_time += seconds
            self._batcher.now = until  # not the sum, which may be before the next arrival

    def result(self, trace: tuple[str, int]) -> Result:
        """Return the result of the steps so far. trace: provides its name and its skipped lines."""
        num_read, backend = self._arrivals.num_read, self._manager.backend
        written = self._batcher.far.num_written
        return self.record.result(trace, num_read, backend, self.now, self._meter, written)

    def _finish_step(self, chunks: list[ScheduledChunk[Sequence]]) -> None:
        """Take the batch, advance the time, and release the sequences that got their last
        output.
        """
        options = self._options
        batch = self._metered.take_batch()
        if batch:
            self.record.evictions += batch.column("kind").tobytes()[::4].count(Evict.kind)
        self._batcher.loads_end()
        decoding = self._batcher.decoding
        num_prefill = sum(each.end - each.start for each in chunks)
        if self._apply is not None:
            every = [*map(_decode, decoding), *chunks]
            self._apply(batch, Step(self.record.steps, self.now, every, num_prefill, len(decoding)))
        self._batcher.now += (
            options.base_seconds
            + options.seconds_per_prefill_token * num_prefill
            + options.seconds_per_decode * len(decoding)
        )
        for chunk in chunks:
            if chunk.num_wanted and not chunk.sequence.num_sampled:
                self._batcher.far.computed(chunk.sequence.sequence_id, len(chunk.sequence.prompt))
        self._sample_outputs([*decoding, *(each.sequence for each in chunks if each.num_wanted)])
        self._meter.end_step()

    def _sample_outputs(self, sequences: list[Sequence]) -> None:
        """Give computed sequences their next outputs; a sequence ends with its last one."""
        ended = []
        for each in sequences:
            sampled = each.num_sampled
            each.newest = each.outputs[sampled]
            each.num_sampled = sampled + 1
            each.has_new_token = True
            if sampled + 1 >= each.num_wanted:
                ended.append(each)
        for each in ended:
            self.record.output_tokens += each.num_wanted
            self.record.finished += 1
            self._batcher.running.remove(each)
            self._metered.free(each.sequence_id)
            self._metered.remove_request(each.sequence_id)

    def _sample(self) -> Sample:
        record, usable = self.record, self._manager.config.num_usable_blocks
        if record.samples.keeps(record.steps):
            self._cached = self._manager.num_cached_blocks
        return Sample(
            step=record.steps,
            time=self.now,
            running=len(self._batcher.running),
            waiting=self._batcher.num_waiting,
            swapped=len(self._batcher.swapped),
            used_blocks=usable - self._manager.num_free_blocks,
            cached_blocks=self._cached,
            num_blocks=usable,
            finished=record.finished,
            hit_tokens=record.hit_tokens,
            looked_up_tokens=record.looked_up_tokens,
            evictions=record.evictions,
            preemptions=record.preemptions,
            idle_time=record.idle_time,
        )


def _decode(sequence: Sequence) -> ScheduledChunk[Sequence]:
    """Note the position that a decoding sequence got."""
    last = sequence.num_tokens - 1
    return ScheduledChunk(sequence=sequence, start=last, end=last + 1)
