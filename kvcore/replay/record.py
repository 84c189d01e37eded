# SPDX-License-Identifier: Apache-2.0
"""Counts a replay while it runs, and makes its result.

Memory is bounded whatever the length of the run, except for the look-ups of the bounds: samples are
thinned evenly, waits go into a histogram, at most REFUSED_MAX refused requests are named. A look-up
is noted for the bounds before it is counted, so that they stay bounds after an interrupt at any
point.
"""

from __future__ import annotations

from kvcore.replay.arrivals import Arrived
from kvcore.replay.bounds.ideal import Ideal
from kvcore.replay.bounds.optimum import LookUps
from kvcore.replay.bounds.prefix_tree import PrefixTree
from kvcore.replay.costs import NANO, Histogram, Meter
from kvcore.replay.results import (
    REFUSED_MAX,
    SAMPLES_MAX,
    Options,
    Queueing,
    RefusedRequest,
    Result,
    Sample,
    Spent,
)
from kvcore.replay.workload import TraceRequest
from kvcore.scheduler import Preemptions
from kvcore.types.config import Config


class Samples:
    """Keeps one sample per stride of steps, at most SAMPLES_MAX, and always the newest."""

    def __init__(self) -> None:
        self._kept: list[Sample] = []
        self._stride = 1
        self._newest: Sample | None = None

    def keeps(self, step: int) -> bool:
        """Return whether the sample of a step is one of a stride."""
        return step % self._stride == 0

    def add(self, sample: Sample) -> None:
        """Add the sample of the next step."""
        self._newest = sample
        if self.keeps(sample.step):
            self._kept.append(sample)
            if len(self._kept) == SAMPLES_MAX:
                self._stride *= 2
                self._kept = self._kept[::2]

    def all(self) -> tuple[Sample, ...]:
        """Return the kept samples, in order."""
        last = self._newest
        if last is None or last is self._kept[-1]:
            return tuple(self._kept)
        return (*self._kept, last)


class Record:
    """The counts of one run."""

    def __init__(self, options: Options, config: Config) -> None:
        self.finished = self.evictions = self.steps = 0
        self.preempted = Preemptions()
        self.hit_tokens = self.looked_up_tokens = self.far_hit_tokens = 0
        self.again_hit_tokens = self.again_looked_up_tokens = 0
        self.output_tokens = 0
        self.interrupted = False
        self.samples, self.spent, self.idle_time = Samples(), Spent(), 0.0
        self._options = options
        self._config = config
        self._prompt_tokens = 0
        self._num_refused = 0
        self._refused: list[RefusedRequest] = []
        self._waits = Histogram()
        tree = PrefixTree()
        whole = not options.groups and options.hash_block_size is None
        self._ideal = Ideal(config.hit_alignment, tree) if options.bounds else None
        self._look_ups = LookUps(options.block_size, tree) if options.bounds and whole else None

    @property
    def preemptions(self) -> int:
        """Number of preemptions, by recompute and by swap."""
        return self.preempted.total

    def accept(self, arrived: Arrived) -> bool:
        """Count a request that was read; False if even an empty pool could not hold it."""
        request = arrived.request
        self._prompt_tokens += request.prompt_len
        num_tokens = request.prompt_len + max(0, request.output_len - 1)
        needed, usable = self._config.blocks_for(num_tokens), self._config.num_usable_blocks
        if needed <= usable:
            return True
        self._num_refused += 1
        if len(self._refused) < REFUSED_MAX:
            refused = RefusedRequest(
                request=str(arrived.number),
                line=request.line,
                num_tokens=num_tokens,
                needed_blocks=needed,
                usable_blocks=usable,
            )
            self._refused.append(refused)
        return False

    def admitted(self, request: TraceRequest, waited: float, num_hit: int) -> None:
        """Count a first look-up that led to admission, and the wait before it."""
        self._waits.add(round(waited * NANO))
        if self._ideal is not None:
            self._ideal.look_up(request.hash_ids, request.prompt_len, request.unit)
        self._note(request, counts=True)
        self.looked_up_tokens += request.prompt_len
        self.hit_tokens += num_hit

    def admitted_again(self, request: TraceRequest, num_tokens: int, num_hit: int) -> None:
        """Count the look-up of a preempted request, over all its tokens."""
        self._note(request, counts=False)
        self.again_looked_up_tokens += num_tokens
        self.again_hit_tokens += num_hit

    def swapped_in(self, request: TraceRequest) -> None:
        """Note for the optimum that a request's blocks were swapped in."""
        self._note(request, counts=False)

    def result(
        self,
        trace: tuple[str, int],
        num_read: int,
        backend: str,
        now: float,
        meter: Meter,
        far_written: int | None = None,
    ) -> Result:
        """Make the result. trace: its name, its skipped lines. far_written: None without tier."""
        best = None
        if self._look_ups is not None:
            best = self._look_ups.best_hit_tokens(self._config.num_usable_blocks)
        waits = (self._waits.percentile(0.5), self._waits.percentile(0.99), self._waits.worst)
        return Result(
            trace=trace[0],
            options=self._options,
            backend=backend,
            requests=num_read,
            finished=self.finished,
            num_refused=self._num_refused,
            refused=tuple(self._refused),
            skipped_lines=trace[1],
            interrupted=self.interrupted,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self.output_tokens,
            looked_up_tokens=self.looked_up_tokens,
            hit_tokens=self.hit_tokens,
            again_looked_up_tokens=self.again_looked_up_tokens,
            again_hit_tokens=self.again_hit_tokens,
            ideal_hit_tokens=None if self._ideal is None else self._ideal.hit_tokens,
            optimum_hit_tokens=best,
            evictions=self.evictions,
            preemptions=self.preemptions,
            swaps=self.preempted.by_swap,
            steps=self.steps,
            virtual_seconds=now,
            queueing=Queueing(*(each / NANO for each in waits)),
            samples=self.samples.all(),
            spent=self.spent,
            costs=meter.costs(),
            far_hit_tokens=None if far_written is None else self.far_hit_tokens,
            far_written=far_written,
        )

    def _note(self, request: TraceRequest, *, counts: bool) -> None:
        if self._look_ups is not None:
            ids, num_tokens = request.hash_ids, request.prompt_len
            self._look_ups.add(ids, num_tokens, request.unit, counts=counts)
