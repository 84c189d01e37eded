# SPDX-License-Identifier: Apache-2.0
"""The scheduler of the reference engine: drafts, external loads and cancelled batches.

`kvcore.scheduler` has the policy. Here a decoding sequence with a drafter also gets slots for its
drafts. A sequence whose first tokens are computed elsewhere (exchange.py) loads before it runs: it
holds blocks, computes nothing and is never preempted. Before that its exchange may fetch the
content to load; meanwhile others are admitted.
"""

from bisect import insort
from collections.abc import Collection
from typing import Literal, TypeAlias

from kvcore import Hit, KVCacheManager, Refused, Status
from kvcore import scheduler as batching
from kvcore_runtime.engine.drafts import Drafter
from kvcore_runtime.engine.errors import NotWithStates
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.engine.sequence import Sequence

Preemption = Literal["swap", "recompute"]
"""swap: to the host tier if it has room, else as recompute. recompute: give back the blocks."""

ScheduledChunk: TypeAlias = batching.ScheduledChunk[Sequence]


class EngineScheduler(batching.Scheduler[Sequence]):
    """Queues of sequences, each ordered by age.

    drafter: guesses tokens of decoding sequences. exchange: loads tokens computed elsewhere.
    num_hits_inside: hits that ended inside a block. Raises NotWithStates for an exchange beside
    states, and for a drafter beside states without places for drafts.
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
        states = [group.draft_states for group in manager.config.groups if group.is_state]
        self._most_drafts = min(states, default=None)
        if drafter is not None and self._most_drafts == 0:
            raise NotWithStates(option="drafter", unless=", unless its groups have draft_states")
        if states and exchange is not None and type(exchange) is not Exchange:
            raise NotWithStates(option="exchange", unless="")
        swaps = preemption == "swap" and manager.config.num_host_blocks > 0
        super().__init__(manager, token_budget=token_budget, swaps=swaps)
        self._drafter = drafter
        self._exchange = exchange or Exchange()
        self.fetching: list[Sequence] = []
        self.num_hits_inside = 0

    def schedule(self, in_flight: bool = False) -> list[ScheduledChunk]:
        """Choose the chunks of a step as `kvcore.scheduler` does, skipping sequences that fetch."""
        candidates = sorted((*self.waiting, *self.fetching), key=lambda each: each.age)
        self.fetching, self.waiting = [], []
        for each in candidates:
            queue = self.fetching if self._exchange.is_fetching(each) else self.waiting
            queue.append(each)
        chunks = super().schedule(in_flight)
        if not chunks:
            self._exchange.idle()
        return chunks

    def unfinished(self) -> list[Sequence]:
        """List all unfinished sequences, those that hold device blocks first."""
        return [*self.running, *self.loading, *self.swapped, *self.fetching, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that the manager knows, without blocks."""
        self._place(self.waiting, sequence)

    def add_fork(self, sequence: Sequence) -> None:
        """Add a sequence that was forked: running, or waiting if its state could not be shared."""
        self._place(self._queue(self._manager.status(sequence.sequence_id)), sequence)

    def give_to_fork(self, sequence: Sequence) -> None:
        """Give the manager the first token of a fork that waits, since it gets no position now."""
        if sequence in self.waiting:
            sequence.sampled_by = None  # the fork is in no batch
            self.give_new_token(sequence)

    def _admitted(self, sequence: Sequence, hit: Hit) -> None:
        super()._admitted(sequence, hit)
        self.num_hits_inside += hit.num_tokens % self._manager.config.block_alignment > 0

    def loaded(self, sequence: Sequence) -> None:
        """Resume a sequence whose load is done, with the manager's current count."""
        self.loading.remove(sequence)
        self._place(self._queue(self._manager.status(sequence.sequence_id)), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence; the caller must free its blocks."""
        for queue in (self.running, self.loading, self.swapped, self.fetching, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _may_give_way(self, victim: Sequence) -> bool:
        """Keep a sequence while a batch in flight computes its prompt or drafts, until the tokens
        are read: the prompt's other samples begin on its blocks, and the drafts must be accepted.
        """
        if not super()._may_give_way(victim):
            return False
        has_drafts = self._manager.num_draft_tokens(victim.sequence_id) > 0
        return victim.num_to_come == 0 or (bool(victim.generated) and not has_drafts)

    def taken_back(self, abandoned: Collection[Sequence]) -> None:
        """Sort all sequences again after batches were cancelled; their tokens are computed again.

        abandoned: those whose load was cancelled with its batch.
        """
        loading = [each for each in self.loading if each not in abandoned]
        others = [each for each in self.unfinished() if each not in loading]
        self.running, self.swapped, self.waiting, self.loading = [], [], [], loading
        self.fetching = []
        for sequence in others:
            name = sequence.sequence_id
            sequence.drop_output()
            status = self._manager.status(name)
            behind = self._manager.num_computed_tokens(name) < self._manager.num_tokens(name)
            if sequence.has_new_token and behind and status is not Status.SWAPPED:
                self.give_new_token(sequence)
            self._place(self._queue(status), sequence)

    def _ready(self) -> list[Sequence]:
        """List the sequences to decode. With a drafter, all of them wait for the newest token of
        each, since drafts follow it. If the exchange reads a prompt's blocks, its sequence waits
        until then.
        """
        ready = super()._ready()
        if self._drafter is not None:
            is_known = all(each.num_to_come == 0 for each in ready if each.generated)
            return [each for each in ready if each.num_to_come == 0] if is_known else []
        if self._exchange.takes_prompts:
            return [each for each in ready if each.generated]
        return ready

    def _decode(self) -> None:
        """Schedule one token per sequence and, with a drafter, also drafts after it while the pool
        has space for them.
        """
        if self._drafter is None:
            super()._decode()
            return
        for sequence in self._ready():
            room = self._budget - 1
            if room < 0:
                return
            if sequence not in self.running:
                continue
            name, start = sequence.sequence_id, sequence.num_tokens - 1
            self.give_new_token(sequence)
            room = min(room, sequence.sampling.max_tokens - len(sequence.generated) - 1)
            if self._most_drafts is not None:
                room = min(room, self._most_drafts)
            known = sequence.tokens(0, start + 1)
            drafts = tuple(self._drafter.propose(known, room)) if room else ()
            if drafts:
                self._manager.add_drafts(name, drafts)
                end = start + 1 + len(drafts)
                if self._manager.allocate_slots(name, end - start):
                    self._computes(sequence, start, end, drafts)
                    continue
                self._manager.add_drafts(name, ())
            self._allocate(sequence, start, start + 1)

    def _computes(
        self, sequence: Sequence, start: int, end: int, drafts: tuple[int, ...] = ()
    ) -> None:
        super()._computes(sequence, start, end, drafts)
        sequence.num_to_come += self._chunks[-1].num_wanted > 0

    def _begin_load(self, sequence: Sequence, hit: Hit) -> int | Refused:
        loads = self._exchange.begin(sequence, hit)
        if not isinstance(loads, Refused) and not sequence.generated:
            sequence.num_reused = hit.num_tokens
        return loads

    def _place(self, queue: list[Sequence], sequence: Sequence) -> None:
        insort(queue, sequence, key=lambda each: each.age)

    def _queue(self, status: Status) -> list[Sequence]:
        queues = {Status.RUNNING: self.running, Status.SWAPPED: self.swapped}
        return queues.get(status, self.waiting)
