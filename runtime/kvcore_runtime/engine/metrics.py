# SPDX-License-Identifier: Apache-2.0
"""Counts of a running engine: tokens, commands, use of the pool, the manager's time."""

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from kvcore import KVCacheManager
from kvcore.metrics import measured
from kvcore.types.commands import Batch, CopyOnWrite, Evict, SwapIn, SwapOut
from kvcore_runtime.engine.scheduler import ScheduledChunk


@attrs.define
class Metrics:
    """Sums over the steps so far.

    commands: number of each kind, by the kind's number. usages: share of the usable blocks with an
    owner, 0.0 to 1.0, one per step. seconds: time in `Engine.step`; manager_seconds: the part in
    the manager. num_overlapped: steps planned while another one was computed; num_stalls: plans
    that could schedule nothing before a batch in flight was completed; num_cancelled: cancelled
    batches. wait_seconds: time spent waiting for a batch to be computed.
    """

    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    commands: collections.Counter[int] = attrs.field(factory=collections.Counter)
    usages: list[float] = attrs.field(factory=list)
    seconds: float = 0.0
    manager_seconds: float = 0.0
    num_overlapped: int = 0
    num_stalls: int = 0
    num_cancelled: int = 0
    wait_seconds: float = 0.0

    def count_step(self, batch: Batch, chunks: Sequence[ScheduledChunk], usage: float) -> None:
        """Add one step."""
        self.commands.update(batch.column("kind"))
        self.usages.append(usage)
        self.num_computed_tokens += sum(each.end - each.start for each in chunks)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Add the drafts of one sequence in one step."""
        self.num_drafts += num_drafts
        self.num_accepted_drafts += num_accepted

    @property
    def num_steps(self) -> int:
        """Number of steps so far."""
        return len(self.usages)

    @property
    def num_evictions(self) -> int:
        """Number of evicted contents."""
        return self.commands[Evict.kind]

    @property
    def num_copies(self) -> int:
        """Number of blocks copied on write."""
        return self.commands[CopyOnWrite.kind]

    @property
    def num_blocks_out(self) -> int:
        """Number of blocks swapped out to the host tier."""
        return self.commands[SwapOut.kind]

    @property
    def num_blocks_in(self) -> int:
        """Number of blocks swapped in from the host tier, without hits, which are not copied."""
        return self.commands[SwapIn.kind]

    @property
    def peak_usage(self) -> float:
        """Largest share of the pool in use."""
        return max(self.usages, default=0.0)

    @property
    def mean_usage(self) -> float:
        """Mean share of the pool in use, over steps."""
        return sum(self.usages) / len(self.usages) if self.usages else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the time of the steps."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def manager_share(self) -> float:
        """The manager's share of the time, 0.0 to 1.0."""
        return self.manager_seconds / self.seconds if self.seconds else 0.0

    @property
    def manager_us_per_step(self) -> float:
        """The manager's time per step, in microseconds."""
        return 1e6 * self.manager_seconds / self.num_steps if self.num_steps else 0.0


def timed(manager: KVCacheManager, metrics: Metrics) -> KVCacheManager:
    """Return the same manager, adding the time of its calls to `metrics.manager_seconds`."""

    def call(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            metrics.manager_seconds += time.perf_counter() - started

    return measured(manager, call)
