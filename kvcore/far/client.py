# SPDX-License-Identifier: Apache-2.0
"""The client of a far tier: what an engine's stores and loads do at each moment of its step.

Fetch first, load later: a far tier never sees a cache block. It fills and drains staging slots; the
manager then loads the pages that have arrived and were verified. That is a copy from a slot, which
no network can make fail. So a tier that is slow, wrong or dead costs tokens that are computed
instead, never a block and never a wrong byte. None of its failures raises here. `kvcore check`
explores this code (check/far); the runtime's exchange gives it memory and a tier.
Invariants: STAGING, FAR-KV, FAR-HINT, NEVER-STUCK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcore.far.engine import Clock, FarEngine, FarSequence, Tell, Warn
from kvcore.far.fetches import Fetches
from kvcore.far.known import KnownNames
from kvcore.far.link import TierLink
from kvcore.far.options import FarCounts, FarOptions
from kvcore.far.slots import Slots
from kvcore.far.stores import Stores
from kvcore.far.tier import FarTier

if TYPE_CHECKING:
    from kvcore import Hit, Refused


def ignore(*_: object) -> None:
    """Do nothing."""


class FarClient:
    """The decisions of an engine about one far tier. staging: its slots."""

    def __init__(
        self,
        engine: FarEngine,
        tier: FarTier,
        staging: Slots,
        options: FarOptions,
        clock: Clock,
        tell: Tell = ignore,
        warn: Warn = ignore,
    ) -> None:
        self.staging = staging
        self._engine = engine
        self._link = TierLink(
            tier, staging, self._epoch, clock, options.fetch_timeout_s, tell, warn
        )
        known = KnownNames(2 * engine.manager.config.num_blocks)
        self._fetches = Fetches(engine, self._link, staging, options, clock, known)
        self._stores = Stores(engine, self._link, staging, options, known)

    @property
    def counts(self) -> FarCounts:
        """The counts so far."""
        return self._link.counts

    @property
    def is_up(self) -> bool:
        """Whether the tier is used, because it answers."""
        return self._link.is_up

    @property
    def is_busy(self) -> bool:
        """Whether a step makes progress here. Nothing waits for stores without an answer."""
        fetches = self._fetches
        return self._stores.is_copying or fetches.is_waiting or fetches.is_loading

    def is_fetching(self, sequence: FarSequence) -> bool:
        """Return whether a sequence must keep waiting; for a new one, the fetch begins."""
        return self._fetches.is_fetching(sequence)

    def begin(self, sequence: FarSequence, hit: Hit) -> int | Refused:
        """Load the ready pages behind a hit; return the number of their tokens."""
        return self._fetches.begin(sequence, hit)

    def poll(self) -> list[Any]:
        """Process what has ended; return the sequences whose loads are done."""
        for each in self._engine.take_finished():
            self._engine.manager.complete_operation(each.operation, each.done)
            owner = self._stores if self._stores.owns(each.operation) else self._fetches
            owner.end(each.operation, each.done)
        self._hear()
        for sequence in self._engine.scheduler.running:
            self._stores.look(sequence)
        return self._fetches.take_loaded()

    def cancelled(self, number: int) -> list[Any]:
        """Give up the operations of batch `number` and all later ones; return the sequences whose
        load was among them. `poll` reports the operations that have run; the others failed.
        """
        reported = {each.operation for each in self._engine.finished}
        lost, failed = self._fetches.cancelled(number, reported)
        for operation in (*failed, *self._stores.cancelled(number, reported)):
            self._engine.manager.complete_operation(operation, False)
        return lost

    def finished(self, sequence: FarSequence) -> None:
        """Store the last blocks of a sequence that is about to free them."""
        self._stores.look(sequence)

    def forget(self, sequence: FarSequence) -> None:
        """Forget a sequence that ends here, finished or aborted."""
        self._fetches.forget(sequence)
        self._stores.forget(sequence.sequence_id)

    def check(self) -> None:
        """Raise AssertionError unless each slot is free or has one user, and the marked ones are
        those of unfinished operations (STAGING).
        """
        held = [*self._link.held, *self._fetches.held, *self._stores.held]
        assert len(held) == len(set(held)), f"slots {sorted(held)} have two users"
        assert set(held) == self.staging.used, f"{self.staging.used} used, {sorted(held)} held"
        marked, under_way = self.staging.with_marks, {*self._fetches.loading, *self._stores.copying}
        assert marked == under_way, f"slots {sorted(marked)} marked, {sorted(under_way)} under way"

    def _epoch(self) -> int:
        return self._engine.manager.epoch

    def _hear(self) -> None:
        """Process the tier's answers."""
        for ended in self._link.poll():
            if ended.ticket.operation == "store":
                self._stores.answered(ended)
            else:
                self._fetches.answered(ended)
        self._fetches.settle()
        self._stores.submit()
