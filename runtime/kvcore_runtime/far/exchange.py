# SPDX-License-Identifier: Apache-2.0
"""Keeps an engine's blocks in a far tier, and loads them from there for later prompts.

Fetch first, load later: a far tier never sees a cache block. It fills and drains staging slots; the
manager then loads the pages that have arrived and were verified. That is a copy from a slot, which
no network can make fail. So a tier that is slow, wrong or dead costs tokens that are computed
instead, never a block and never a wrong byte. None of its failures raises here.
Invariants: STAGING, FAR-KV, FAR-HINT, NEVER-STUCK.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvcore import Hit, Refused
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.far.errors import EpochHasWeights, InvalidTier
from kvcore_runtime.far.fetches import Fetches
from kvcore_runtime.far.known import KnownNames
from kvcore_runtime.far.link import Clock, TierLink
from kvcore_runtime.far.options import FarCounts, FarOptions
from kvcore_runtime.far.page import Place, identify_pages
from kvcore_runtime.far.staging import Staging
from kvcore_runtime.far.stores import Stores
from kvcore_runtime.far.tier import FarTier
from kvcore_runtime.model.identity import identify

if TYPE_CHECKING:
    from kvcore_runtime.engine.engine import Engine
    from kvcore_runtime.engine.sequence import Sequence

NAP_S = 0.0005
CLOSE_S = 2.0


class FarExchange(Exchange):
    """An engine's stores to, and loads from, one far tier.

    clock: with the functions of the module `time`. Raises InvalidTier.
    """

    def __init__(
        self,
        engine: Engine,
        tier: FarTier,
        options: FarOptions | None = None,
        *,
        clock: Clock = time,
    ) -> None:
        config, options = engine.manager.config, options or FarOptions()
        if not config.enable_caching:
            raise InvalidTier(name="enable_caching", value=False, expected="True: pages have keys")
        self._engine = engine
        self._options = options
        self._clock = clock
        page_bytes = engine.runtime.cache.layout.page_size_bytes
        self.staging = Staging(options.staging_pages, page_bytes)
        self._link = TierLink(
            tier, self.staging, self._epoch, clock, options.fetch_timeout_s, engine.spans
        )
        weights = options.weights or identify(engine.model, config.groups)
        self._weights = self._epoch(), weights
        self.set_weights(weights)
        known = KnownNames(2 * config.num_blocks)
        self._fetches = Fetches(engine, self._link, self.staging, options, clock, known)
        self._stores = Stores(engine, self._link, self.staging, options, known)
        engine.runtime.external = self.staging

    @property
    def counts(self) -> FarCounts:
        """The counts so far."""
        return self._link.counts

    @property
    def identity(self) -> str | None:
        """The identity in the names of this engine's pages, in hexadecimal, or None."""
        place = self._link.place
        return None if place is None else place.identity.hex()

    @property
    def is_up(self) -> bool:
        """Whether the tier is used, because it answers."""
        return self._link.is_up

    @property
    def is_busy(self) -> bool:
        """See `Exchange`. Nothing waits for stores that the tier has not answered."""
        fetches = self._fetches
        return self._stores.is_copying or fetches.is_waiting or fetches.is_loading

    def is_fetching(self, sequence: Sequence) -> bool:
        """See `Exchange`."""
        return self._fetches.is_fetching(sequence)

    def begin(self, sequence: Sequence, hit: Hit) -> int | Refused:
        """See `Exchange`."""
        return self._fetches.begin(sequence, hit)

    def poll(self) -> list[Sequence]:
        """See `Exchange`."""
        for each in self._engine.take_finished():
            self._engine.manager.complete_operation(each.operation, each.done)
            owner = self._stores if self._stores.owns(each.operation) else self._fetches
            owner.end(each.operation, each.done)
        self._hear()
        for sequence in self._engine.scheduler.running:
            self._stores.look(sequence)
        return self._fetches.take_loaded()

    def idle(self) -> None:
        """See `Exchange`."""
        if self._fetches.is_waiting:
            self._clock.sleep(NAP_S)

    def cancelled(self, number: int) -> list[Sequence]:
        """See `Exchange`. `poll` reports the operations that have run; the others failed."""
        reported = {each.operation for each in self._engine.finished}
        lost, failed = self._fetches.cancelled(number, reported)
        for operation in (*failed, *self._stores.cancelled(number, reported)):
            self._engine.manager.complete_operation(operation, False)
        return lost

    def finished(self, sequence: Sequence) -> None:
        """See `Exchange`."""
        self._stores.look(sequence)

    def forget(self, sequence: Sequence) -> None:
        """See `Exchange`."""
        self._fetches.forget(sequence)
        self._stores.forget(sequence.sequence_id)

    def set_weights(self, weights: str | None) -> None:
        """Set the digest of the weights of this epoch. With None the tier is not used any more.

        The tier is not used from `KVCacheManager.advance_epoch` until this is called: an epoch
        number belongs to one process, and does not identify weights. Raises EpochHasWeights.
        """
        epoch = self._epoch()
        if weights is not None:
            if self._weights[0] == epoch and self._weights[1] != weights:
                raise EpochHasWeights(epoch=epoch, weights=self._weights[1], others=weights)
            self._weights = epoch, weights
        self._link.set_place(None if weights is None else self._place(weights))

    def flush(self, timeout_s: float) -> bool:
        """See `Exchange`: wait until the tier has answered all stores."""
        end = self._clock.monotonic() + timeout_s
        self._hear()
        while self._link.num_stores:
            if self._clock.monotonic() >= end:
                return False
            self._clock.sleep(NAP_S)
            self._hear()
        return True

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Close the tier; tickets that it has not answered within timeout_s are given up."""
        self._link.close(timeout_s)

    def check(self) -> None:
        """Raise AssertionError unless each slot is free or has one user (STAGING)."""
        held = [*self._link.held, *self._fetches.held, *self._stores.held]
        assert len(held) == len(set(held)), f"slots {sorted(held)} have two users"
        assert set(held) == self.staging.used, f"{self.staging.used} used, {sorted(held)} held"

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

    def _place(self, weights: str) -> Place:
        """Return the place of pages: all that decides their bytes apart from their keys."""
        engine, options = self._engine, self._options
        config = engine.manager.config
        cache = engine.runtime.cache
        groups = (
            f"group {group.kind} {group.block_size} {group.window} {each.layout.page_shape}"
            for group, each in zip(config.groups, cache.groups, strict=True)
        )
        lines = (
            f"weights {weights}",
            f"{cache.layout.dtype}",
            *groups,
            f"hash {config.hashing} {config.hash_block_size} {config.hash_seed.hex()}",
            f"rank {options.rank} of {options.world}",
        )
        return Place(identify_pages(lines), options.rank, options.world)
