# SPDX-License-Identifier: Apache-2.0
"""Which positions of which sequences the next step computes, and who gives way for lack of blocks.

A step first brings swapped sequences back, then gives every decoding sequence one slot (one
`append` for all), or with a drafter slots for its drafts too, then continues prompts that are
computed in chunks, then admits waiting sequences. All of it happens in the manager's open batch.

A sequence whose first tokens are computed elsewhere (exchange.py) loads before it runs: it holds
blocks, computes nothing and gives way to nobody.

Who is refused a block takes it from the youngest running sequence. So the oldest one always gets
on, and nothing waits forever:
  * a victim is younger than the one that takes, and not yet scheduled in this step (others of
    the step may have hit blocks that only its forward pass will write);
  * without a victim a sequence skips the step and keeps its blocks;
  * nobody new is admitted while a sequence is swapped out, or in a step that preempted one.

Where batches are in flight (`Config.max_in_flight`), a step is planned while others are computed.
A sequence whose next token is computed there sits out, the next chunk of its prompt apart: so
sequences take turns, and a step gets no more than a fair share of those that decode. What a batch
in flight uses is not free before it is completed, so:
  * who is refused while blocks are pending waits for that batch, and preempts nobody (catalogue,
    row 68);
  * who is in flight is no victim: its blocks would not be free in time;
  * in a plan in which somebody waits nobody is admitted, and in the one after it nobody comes back.
"""

from array import array
from bisect import insort
from collections.abc import Collection
from typing import Literal

import attrs

from kvcore import KVCacheManager, Refused, Status
from kvcore_runtime.engine.drafts import Drafter
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.sequence import Sequence

Preemption = Literal["swap", "recompute"]
"""swap: to the host tier where it has room, else as recompute. recompute: give back the blocks."""


@attrs.frozen(kw_only=True)
class Chunk:
    """Positions [start, end) of a sequence, computed in one step.

    drafts: guesses at the last of these positions.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: tuple[int, ...] = ()

    @property
    def num_wanted(self) -> int:
        """Last positions of the chunk whose logits are sampled from."""
        is_last = self.end == self.sequence.num_tokens + len(self.drafts)
        return 1 + len(self.drafts) if is_last else 0

    def tokens(self) -> list[int]:
        """Token ids at the chunk's positions, drafts too."""
        known = self.sequence.tokens(self.start, self.end - len(self.drafts))
        return [*known, *self.drafts]


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

    token_budget: positions that a step computes at most. drafter: guesses tokens of sequences that
    decode. exchange: brings what is computed elsewhere. num_waits: plans in which somebody waited
    for the blocks of a batch in flight. has_moved: whether the last plan swapped, preempted or
    began to load, so that its batch is to be taken even if it computes nothing.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        token_budget: int,
        preemption: Preemption = "swap",
        drafter: Drafter | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._manager = manager
        self._drafter = drafter
        self._exchange = exchange or Exchange()
        self._token_budget = token_budget
        self._swaps = preemption == "swap" and manager.config.num_host_blocks > 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.preemptions = Preemptions()
        self.num_waits = 0
        self.has_moved = False
        self._turns = manager.config.max_in_flight + 1
        self._in_flight: Collection[Sequence] = ()
        self._short = False

    def unfinished(self) -> list[Sequence]:
        """All sequences on their way, those that hold device blocks first."""
        return [*self.running, *self.loading, *self.swapped, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that the manager knows and that holds nothing."""
        insort(self.waiting, sequence, key=_age)

    def add_running(self, sequence: Sequence) -> None:
        """Take over a sequence that already holds device blocks: a fork."""
        insort(self.running, sequence, key=_age)

    def loaded(self, sequence: Sequence) -> None:
        """Let a sequence go on whose load is done, with what the manager now counts of it."""
        self.loading.remove(sequence)
        insort(self._queue(self._manager.status(sequence.sequence_id)), sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or aborted; its blocks are the caller's to free."""
        for queue in (self.running, self.loading, self.swapped, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def taken_back(self, abandoned: Collection[Sequence]) -> None:
        """Sort all sequences anew, since batches were cancelled: their tokens are computed again.

        abandoned: those whose load was cancelled with its batch.
        """
        loading = [each for each in self.loading if each not in abandoned]
        others = [each for each in self.unfinished() if each not in loading]
        self.running, self.swapped, self.waiting, self.loading = [], [], [], loading
        for sequence in others:
            name = sequence.sequence_id
            status = self._manager.status(name)
            behind = self._manager.num_computed_tokens(name) < self._manager.num_tokens(name)
            if sequence.pending and behind and status is not Status.SWAPPED:
                self._give_pending(sequence)
            insort(self._queue(status), sequence, key=_age)

    def schedule(self, in_flight: Collection[Sequence] = ()) -> list[Chunk]:
        """Fill the open batch with the next step; returns what its forward pass computes.

        in_flight: sequences of the batches that are not completed.
        """
        preempted_before = self.preemptions.total
        chunks: list[Chunk] = []
        self._in_flight = in_flight
        self.has_moved = False
        was_short, self._short = self._short, False
        if not was_short:
            self._swap_in()
        if self._drafter is None:
            self._decode(chunks)
        else:
            self._decode_with_drafts(self._drafter, chunks)
        self._continue_prompts(chunks)
        if not self.swapped and self.preemptions.total == preempted_before and not self._short:
            self._admit(chunks)
        self.num_waits += self._short
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
            self.has_moved = True

    def _ready(self) -> list[Sequence]:
        """Those that decode in this step, oldest first: their fair share of all that decode."""
        ready = [each for each in self.running if each.pending]
        num_decoding = len(ready) + sum(each in self._in_flight for each in self.running)
        return ready[: -(-num_decoding // self._turns)]

    def _decode(self, chunks: list[Chunk]) -> None:
        """One token for every sequence that has one pending, oldest first."""
        ready = self._ready()[: self._token_budget]
        while ready:
            rows = array("i", [each.row for each in ready])
            tokens = array("i", [each.generated[-1] for each in ready])
            appended = self._manager.append(rows, tokens)
            for sequence in ready[: appended.done]:
                sequence.pending = False
                end = sequence.num_tokens
                chunks.append(Chunk(sequence=sequence, start=end - 1, end=end))
            ready = ready[appended.done :]
            refused = appended.refused
            if refused is None or not self._make_room(ready[0], refused, chunks):
                return
            ready = [each for each in ready if each in self.running]

    def _decode_with_drafts(self, drafter: Drafter, chunks: list[Chunk]) -> None:
        """As `_decode`, with drafts behind the token while the pool has room for them."""
        for sequence in self._ready():
            room = self._budget_left(chunks) - 1
            if room < 0:
                return
            if sequence not in self.running:
                continue
            name, start = sequence.sequence_id, sequence.num_tokens - 1
            self._manager.add_tokens(name, sequence.generated[-1:])
            sequence.pending = False
            room = min(room, sequence.sampling.max_tokens - len(sequence.generated) - 1)
            drafts = tuple(drafter.propose(sequence.tokens(0, start + 1), room)) if room else ()
            if drafts:
                self._manager.add_drafts(name, drafts)
                end = start + 1 + len(drafts)
                if self._manager.allocate_slots(name, end - start):
                    chunks.append(Chunk(sequence=sequence, start=start, end=end, drafts=drafts))
                    continue
                self._manager.add_drafts(name, ())
            self._allocate(sequence, start, start + 1, chunks)

    def _continue_prompts(self, chunks: list[Chunk]) -> None:
        """The next chunk of every prompt that is not wholly computed yet, oldest first."""
        for sequence in list(self.running):
            if sequence.pending or sequence not in self.running:
                continue
            start = self._manager.num_computed_tokens(sequence.sequence_id)
            length = min(sequence.num_tokens - start, self._budget_left(chunks))
            if length > 0:
                self._allocate(sequence, start, start + length, chunks)

    def _allocate(self, sequence: Sequence, start: int, end: int, chunks: list[Chunk]) -> None:
        """Schedule positions of a running sequence, at the cost of younger ones if need be."""
        while True:
            got = self._manager.allocate_slots(sequence.sequence_id, end - start)
            if not isinstance(got, Refused):
                chunks.append(Chunk(sequence=sequence, start=start, end=end))
                return
            if not self._make_room(sequence, got, chunks):
                return

    def _admit(self, chunks: list[Chunk]) -> None:
        """The first chunk of waiting sequences behind what is cached, while whole sequences fit."""
        while self.waiting:
            sequence = self.waiting[0]
            hit = self._manager.get_computed_blocks(sequence.sequence_id)
            start = hit.num_tokens
            external = self._exchange.begin(sequence, hit)
            if isinstance(external, Refused):
                return
            if not sequence.generated:
                sequence.num_reused = start
            if external:
                self.has_moved = True
                self.loading.append(self.waiting.pop(0))
                continue
            length = min(sequence.num_tokens - start, self._budget_left(chunks))
            if length == 0:
                return
            got = self._manager.allocate_slots(
                sequence.sequence_id, length, hit, full_sequence_must_fit=True
            )
            if isinstance(got, Refused):
                return
            insort(self.running, self.waiting.pop(0), key=_age)
            chunks.append(Chunk(sequence=sequence, start=start, end=start + length))

    def _make_room(self, taker: Sequence, refused: Refused, chunks: list[Chunk]) -> bool:
        """Take the blocks of the youngest running sequence that may be preempted for this one.

        Where blocks come back by waiting, or only by waiting, nobody is preempted.
        """
        in_flight = bool(self._in_flight) or (self._turns > 1 and self.has_moved)
        if in_flight and refused.pending:
            self._short = True
            return False
        busy = {chunk.sequence for chunk in chunks}.union(self._in_flight)
        younger = [each for each in self.running if each.age > taker.age]
        victim = next((each for each in reversed(younger) if each not in busy), None)
        if victim is None:
            self._short |= in_flight
            return False
        self._preempt(victim)
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take a running sequence's blocks, to the host tier where it has room."""
        self.running.remove(victim)
        self.has_moved = True
        name = victim.sequence_id
        if self._swaps and not isinstance(self._manager.swap_out([name]), Refused):
            self.preemptions.by_swap += 1
            insort(self.swapped, victim, key=_age)
            return
        self._manager.free(name)
        if victim.pending:
            self._give_pending(victim)
        self.preemptions.by_recompute += 1
        insort(self.waiting, victim, key=_age)

    def _give_pending(self, sequence: Sequence) -> None:
        """Give the manager the newest token of a sequence that is going to be computed as known."""
        self._manager.add_tokens(sequence.sequence_id, sequence.generated[-1:])
        sequence.pending = False

    def _queue(self, status: Status) -> list[Sequence]:
        queues = {Status.RUNNING: self.running, Status.SWAPPED: self.swapped}
        return queues.get(status, self.waiting)

    def _budget_left(self, chunks: list[Chunk]) -> int:
        return self._token_budget - sum(chunk.end - chunk.start for chunk in chunks)


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.age
