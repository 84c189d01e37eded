# SPDX-License-Identifier: Apache-2.0
"""Which positions of which sequences the next step computes, and who gives way for lack of blocks.

A step first brings swapped sequences back, then gives every decoding sequence one slot (one
`append` for all), then continues prompts that are computed in chunks, then admits waiting
sequences. All of it happens in the manager's open batch.

Who is refused a block takes it from the youngest running sequence. So the oldest one always gets
on, and nothing waits forever:
  * a victim is younger than the one that takes, and not yet scheduled in this step (others of
    the step may have hit blocks that only its forward pass will write);
  * without a victim a sequence skips the step and keeps its blocks;
  * nobody new is admitted while a sequence is swapped out, or in a step that preempted one.
"""

from array import array
from bisect import insort
from typing import Literal

import attrs

from kvcore import KVCacheManager, Refused
from kvcore_runtime.sequence import Sequence

Preemption = Literal["swap", "recompute"]
"""swap: to the host tier where it has room, else as recompute. recompute: give back the blocks."""


@attrs.frozen(kw_only=True)
class Chunk:
    """Positions [start, end) of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the next token of the sequence is sampled from this chunk."""
        return self.end == self.sequence.num_tokens


@attrs.define
class Preemptions:
    """How often a sequence gave way, and by which way."""

    by_swap: int = 0
    by_recompute: int = 0

    @property
    def total(self) -> int:
        """By both ways."""
        return self.by_swap + self.by_recompute


class Scheduler:
    """Queues of sequences, each ordered by age.

    token_budget: positions that a step computes at most.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        token_budget: int,
        preemption: Preemption = "swap",
    ) -> None:
        self._manager = manager
        self._token_budget = token_budget
        self._swaps = preemption == "swap" and manager.config.num_host_blocks > 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.preemptions = Preemptions()

    def unfinished(self) -> list[Sequence]:
        """All sequences on their way, those that hold device blocks first."""
        return [*self.running, *self.swapped, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that the manager knows and that holds nothing."""
        insort(self.waiting, sequence, key=_age)

    def add_running(self, sequence: Sequence) -> None:
        """Take over a sequence that already holds device blocks: a fork."""
        insort(self.running, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or aborted; its blocks are the caller's to free."""
        for queue in (self.running, self.swapped, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """Fill the open batch with the next step; returns what its forward pass computes."""
        preempted_before = self.preemptions.total
        chunks: list[Chunk] = []
        self._swap_in()
        self._decode(chunks)
        self._continue_prompts(chunks)
        if not self.swapped and self.preemptions.total == preempted_before:
            self._admit(chunks)
        return chunks

    def _swap_in(self) -> None:
        """Bring back swapped sequences, oldest first, while each that runs can grow by a block."""
        manager = self._manager
        while self.swapped:
            oldest = self.swapped[0]
            cached = manager.get_computed_blocks(oldest.sequence_id).num_tokens
            copied = manager.config.blocks_for(oldest.num_tokens - cached)
            spare = len(self.running) + 1
            if self.running and copied + spare > manager.num_free_blocks:
                return
            if isinstance(manager.swap_in([oldest.sequence_id]), Refused):
                return
            insort(self.running, self.swapped.pop(0), key=_age)

    def _decode(self, chunks: list[Chunk]) -> None:
        """One token for every sequence that has one pending, oldest first."""
        ready = [each for each in self.running if each.pending][: self._token_budget]
        while ready:
            rows = array("i", [each.row for each in ready])
            tokens = array("i", [each.generated[-1] for each in ready])
            appended = self._manager.append(rows, tokens)
            for sequence in ready[: appended.done]:
                sequence.pending = False
                end = sequence.num_tokens
                chunks.append(Chunk(sequence=sequence, start=end - 1, end=end))
            ready = ready[appended.done :]
            if appended.refused is None or not self._preempt_for(ready[0], chunks):
                return
            ready = [each for each in ready if each in self.running]

    def _continue_prompts(self, chunks: list[Chunk]) -> None:
        """The next chunk of every prompt that is not wholly computed yet, oldest first."""
        scheduled = {chunk.sequence for chunk in chunks}
        for sequence in list(self.running):
            if sequence.pending or sequence in scheduled:
                continue
            start = self._manager.num_computed_tokens(sequence.sequence_id)
            length = min(sequence.num_tokens - start, self._budget_left(chunks))
            while length > 0 and sequence in self.running:
                got = self._manager.allocate_slots(sequence.sequence_id, length)
                if not isinstance(got, Refused):
                    chunks.append(Chunk(sequence=sequence, start=start, end=start + length))
                    break
                if not self._preempt_for(sequence, chunks):
                    break

    def _admit(self, chunks: list[Chunk]) -> None:
        """The first chunk of waiting sequences behind what is cached, while whole sequences fit."""
        while self.waiting:
            sequence = self.waiting[0]
            hit = self._manager.get_computed_blocks(sequence.sequence_id)
            start = hit.num_tokens
            length = min(sequence.num_tokens - start, self._budget_left(chunks))
            if length == 0:
                return
            got = self._manager.allocate_slots(
                sequence.sequence_id, length, hit, full_sequence_must_fit=True
            )
            if isinstance(got, Refused):
                return
            if not sequence.generated:
                sequence.num_reused = start
            insort(self.running, self.waiting.pop(0), key=_age)
            chunks.append(Chunk(sequence=sequence, start=start, end=start + length))

    def _preempt_for(self, taker: Sequence, chunks: list[Chunk]) -> bool:
        """Take the blocks of the youngest running sequence that may be preempted for this one."""
        scheduled = {chunk.sequence for chunk in chunks}
        younger = [each for each in self.running if each.age > taker.age]
        victim = next((each for each in reversed(younger) if each not in scheduled), None)
        if victim is None:
            return False
        self.running.remove(victim)
        name = victim.sequence_id
        if self._swaps and not isinstance(self._manager.swap_out([name]), Refused):
            self.preemptions.by_swap += 1
            insort(self.swapped, victim, key=_age)
            return True
        self._manager.free(name)
        if victim.pending:
            self._manager.add_tokens(name, victim.generated[-1:])
            victim.pending = False
        self.preemptions.by_recompute += 1
        insort(self.waiting, victim, key=_age)
        return True

    def _budget_left(self, chunks: list[Chunk]) -> int:
        return self._token_budget - sum(chunk.end - chunk.start for chunk in chunks)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
