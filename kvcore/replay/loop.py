# SPDX-License-Identifier: Apache-2.0
"""The replay: a continuous-batching loop over the real manager, in virtual time.

Rules: a step brings back who was swapped, gives each decoding request one slot (one `append` for
all), goes on with prompts under the token budget, then admits who waits, first come first served,
where the whole prompt fits; then its batch is taken. Who is refused a block takes it from the
youngest that runs and is not scheduled in this step, or sits the step out. Nobody is admitted in a
step in which somebody gave way or sat out, nor before all prompts that run are computed: so the
order of look-ups is the order in which contents come. Nothing depends on real time but the costs.
A step takes `base_seconds`, and so many for each prompt token and each decoding request.
Twin: none.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import attrs

from kvcore.manager import KVCacheManager
from kvcore.replay.arrivals import Arrivals
from kvcore.replay.costs import Meter
from kvcore.replay.errors import InvalidOption
from kvcore.replay.expand import output_token, prompt_tokens
from kvcore.replay.record import Record
from kvcore.replay.results import BackendName, Options, Result, Sample
from kvcore.replay.trace_file import TraceReader
from kvcore.replay.workload import Chunk, Step, TraceRequest
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch, Evict
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Refused, Request

Watch = Callable[[Sample], object]
Apply = Callable[[Batch, Step], object]


def replay(
    requests: Iterable[TraceRequest],
    options: Options,
    *,
    backend: BackendName | None = None,
    watch: Watch | None = None,
    apply: Apply | None = None,
) -> Result:
    """Run the requests through a manager; returns what came of it.

    requests: in the order of their arrival; a `TraceReader` gives the result its name and its count
    of skipped lines. watch: called with a sample after each step. apply: called with each step's
    batch before the next step. A KeyboardInterrupt ends the run, and the result has what was done.
    Raises InvalidOption, InvalidConfig, InvalidCount, and what reading the requests raises.
    """
    config = make_config(options)
    loop = Loop(requests, options, KVCacheManager(config, backend), apply)
    try:
        while (sample := loop.step()) is not None:
            if watch is not None:
                watch(sample)
    except KeyboardInterrupt:
        loop.record.interrupted = True
    if isinstance(requests, TraceReader):
        return loop.result((requests.name, requests.num_skipped))
    return loop.result(("requests", 0))


def make_config(options: Options) -> Config:
    """The configuration of the manager that the options ask for.

    Raises InvalidConfig, InvalidCount, InvalidOption.
    """
    for name in ("max_running", "token_budget"):
        read_count(name, getattr(options, name), 1)
    if options.num_requests is not None:
        read_count("num_requests", options.num_requests, 1)
    for name in ("base_seconds", "seconds_per_prefill_token", "seconds_per_decode"):
        value = getattr(options, name)
        if not 0 <= value < float("inf"):
            raise InvalidOption(name=name, value=value, reason="must be at least 0, and finite")
    num_host_blocks = 0
    if options.preempt == "swap":
        given = options.num_host_blocks
        num_host_blocks = options.num_blocks if given is None else given
    elif options.preempt != "recompute":
        reason = "must be one of recompute, swap"
        raise InvalidOption(name="preempt", value=repr(options.preempt), reason=reason)
    return Config(
        options.num_blocks,
        options.block_size,
        num_host_blocks=num_host_blocks,
        eviction=options.policy,
        hashing=options.hashing,
        hash_seed=b"kvcore replay",
    )


@attrs.define(eq=False)
class Sequence:
    """A request that the manager knows.

    tokens: those that the manager has. num_computed: those of them that have slots. num_sampled:
    outputs so far; the newest of a decoding request is not among the tokens yet.
    """

    request: TraceRequest
    number: int
    name: str
    tokens: array[int]
    row: int
    num_computed: int = 0
    num_sampled: int = 0
    is_new: bool = True
    is_decoding: bool = False

    @property
    def num_left(self) -> int:
        """Tokens without slots."""
        return len(self.tokens) - self.num_computed

    def newest_output(self) -> int:
        """The output that is not among the tokens."""
        return output_token(self.number, self.num_sampled - 1)


class Loop:
    """One run.

    Running sequences are ordered by when they came to run, preempted and swapped ones by who is to
    come back first; behind the preempted ones may be one that is new.
    """

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        options: Options,
        manager: KVCacheManager,
        apply: Apply | None = None,
    ) -> None:
        self.record = Record(options, manager.config)
        self.now = 0.0
        self._options = options
        self._manager = manager
        self._meter = Meter()
        self._apply = apply
        self._arrivals = Arrivals(requests, options.num_requests, self.record.accept)
        self._running: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._swapped: list[Sequence] = []
        self._chunks: dict[Sequence, Chunk] = {}
        self._budget = 0
        self._is_short = False

    def step(self) -> Sample | None:
        """One step, from arrivals to what finishes in it; None if nothing is left to do."""
        arrivals = self._arrivals
        arrivals.pull(self.now)
        if not (self._running or self._swapped or self._preempted or arrivals.waiting):
            upcoming = arrivals.next_time()
            if upcoming is None:
                return None
            self.now = max(self.now, upcoming)
            arrivals.pull(self.now)
        self._schedule()
        if not self._chunks:
            raise InvariantViolation("REPLAY", f"step {self.record.steps} computes nothing")
        self._finish_step()
        sample = self._sample()
        self.record.samples.add(sample)
        self.record.steps += 1
        return sample

    def result(self, trace: tuple[str, int]) -> Result:
        """What the steps so far came to. trace: its name, and its skipped lines."""
        num_read, backend = self._arrivals.num_read, self._manager.backend
        return self.record.result(trace, num_read, backend, self.now, self._meter)

    def _schedule(self) -> None:
        """Fill the open batch."""
        self._chunks = {}
        self._budget = self._options.token_budget
        self._is_short = False
        self._swap_in()
        self._decode()
        self._continue_prompts()
        if not (self._is_short or self._swapped):
            self._admit()

    def _swap_in(self) -> None:
        """Bring back swapped sequences while each that runs could grow by a block."""
        manager = self._manager
        while self._swapped:
            oldest = self._swapped[0]
            spare = len(self._running) + 1
            needed = manager.config.blocks_for(oldest.num_computed) + spare
            if self._running and needed > manager.num_free_blocks:
                return
            if self._meter.call(manager.swap_in, [oldest.name]) is not None:
                return
            self._running.append(self._swapped.pop(0))
            self.record.swapped_in(oldest.request)

    def _decode(self) -> None:
        """One token for every sequence that decodes, oldest first.

        They fit the budget: who is admitted had some left in a step that all others took part in.
        """
        ready = [each for each in self._running if each.is_decoding]
        while ready:
            rows = array("i", [each.row for each in ready])
            tokens = array("I", [each.newest_output() for each in ready])
            appended = self._meter.call(self._manager.append, rows, tokens)
            for sequence, token in zip(ready[: appended.done], tokens, strict=False):
                sequence.tokens.append(token)
                self._computes(sequence, 1)
            ready = ready[appended.done :]
            if appended.refused is not None:
                if not self._make_room(ready[0]):
                    return
                ready = [each for each in ready if each in self._running]

    def _continue_prompts(self) -> None:
        """The next chunk of every sequence whose known tokens are not all computed."""
        for sequence in list(self._running):
            if sequence.num_left == 0 or sequence not in self._running:
                continue
            length = min(sequence.num_left, self._budget)
            while length:
                got = self._meter.call(self._manager.allocate_slots, sequence.name, length)
                if not isinstance(got, Refused):
                    self._computes(sequence, length)
                    break
                if not self._make_room(sequence):
                    break

    def _admit(self) -> None:
        """The first chunk of those that wait, preempted ones first, while whole prompts fit."""
        manager, meter = self._manager, self._meter
        while self._budget and len(self._running) < self._options.max_running:
            sequence = self._next_waiting()
            if sequence is None:
                return
            hit = meter.call(manager.get_computed_blocks, sequence.name)
            length = min(len(sequence.tokens) - hit.num_tokens, self._budget)
            got = meter.call(
                manager.allocate_slots, sequence.name, length, hit, full_sequence_must_fit=True
            )
            if isinstance(got, Refused):
                return
            request = sequence.request
            if sequence.is_new:
                self.record.admitted(request, self.now - request.arrival, hit.num_tokens)
            else:
                self.record.admitted_again(request, len(sequence.tokens), hit.num_tokens)
            sequence.is_new = False
            sequence.num_computed = hit.num_tokens
            self._running.append(self._preempted.pop(0))
            self._computes(sequence, length)

    def _next_waiting(self) -> Sequence | None:
        """Who is to be admitted next; the manager knows it then, and it leads the preempted."""
        if not self._preempted and self._arrivals.waiting:
            arrived = self._arrivals.waiting.popleft()
            request, name = arrived.request, str(arrived.number)
            tokens = prompt_tokens(request.hash_ids, request.prompt_len, request.unit)
            row = self._meter.call(self._manager.add_request, Request(name, tokens))
            self._preempted.append(Sequence(request, arrived.number, name, tokens, row))
        return self._preempted[0] if self._preempted else None

    def _computes(self, sequence: Sequence, length: int) -> None:
        """Note that a sequence got slots for so many tokens."""
        start = sequence.num_computed
        end = sequence.num_computed = start + length
        chunk = Chunk(sequence.name, sequence.row, start, end, sequence.tokens)
        self._chunks[sequence] = chunk
        self._budget -= length

    def _make_room(self, taker: Sequence) -> bool:
        """Preempt the youngest sequence that may give way to this one; False if there is none."""
        self._is_short = True
        younger = self._running[self._running.index(taker) + 1 :]
        victim = next((each for each in reversed(younger) if each not in self._chunks), None)
        if victim is None:
            return False
        self._running.remove(victim)
        manager, meter = self._manager, self._meter
        swaps = manager.config.num_host_blocks > 0
        if swaps and meter.call(manager.swap_out, [victim.name]) is None:
            self.record.swaps += 1
            self._swapped.insert(0, victim)
            return True
        meter.call(manager.free, victim.name)
        if victim.is_decoding:
            token = victim.newest_output()
            meter.call(manager.add_tokens, victim.name, array("I", [token]))
            victim.tokens.append(token)
            victim.is_decoding = False
        victim.num_computed = 0
        self.record.recomputed += 1
        self._preempted.insert(0, victim)
        return True

    def _finish_step(self) -> None:
        """Take the batch, let its time pass, and release who got the last output."""
        manager, meter, options = self._manager, self._meter, self._options
        batch = meter.call(manager.take_batch)
        self.record.evictions += batch.column("kind").tolist().count(Evict.kind)
        num_decodes = sum(each.is_decoding for each in self._chunks)
        num_prefill = options.token_budget - self._budget - num_decodes
        if self._apply is not None:
            chunks = tuple(self._chunks.values())
            step = Step(self.record.steps, self.now, chunks, num_prefill, num_decodes)
            self._apply(batch, step)
        self.now += (
            options.base_seconds
            + options.seconds_per_prefill_token * num_prefill
            + options.seconds_per_decode * num_decodes
        )
        for sequence in self._chunks:
            if sequence.num_left == 0:
                self._sample_output(sequence)
        meter.end_step()

    def _sample_output(self, sequence: Sequence) -> None:
        """Give a computed sequence its next output; the last one ends it."""
        wanted = sequence.request.output_len
        sequence.num_sampled += 1
        sequence.is_decoding = True
        if sequence.num_sampled < wanted:
            return
        self.record.output_tokens += wanted
        self.record.finished += 1
        self._running.remove(sequence)
        self._meter.call(self._manager.free, sequence.name)
        self._meter.call(self._manager.remove_request, sequence.name)

    def _sample(self) -> Sample:
        record, usable = self.record, self._manager.config.num_usable_blocks
        return Sample(
            step=record.steps,
            time=self.now,
            running=len(self._running),
            waiting=len(self._preempted) + len(self._arrivals.waiting),
            swapped=len(self._swapped),
            used_blocks=usable - self._manager.num_free_blocks,
            num_blocks=usable,
            finished=record.finished,
            hit_tokens=record.hit_tokens,
            looked_up_tokens=record.looked_up_tokens,
            evictions=record.evictions,
            preemptions=record.preemptions,
        )
