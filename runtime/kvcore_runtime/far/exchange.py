# SPDX-License-Identifier: Apache-2.0
"""Keeps an engine's blocks in a far tier, and loads them from there for later prompts.

What is asked for, believed and loaded is decided in kvcore/far/client.py; the memory of the slots,
the names of the pages, and the waiting are here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcore.far.client import FarClient
from kvcore.far.engine import Clock
from kvcore.far.errors import EpochHasWeights, InvalidTier
from kvcore.far.options import FarOptions
from kvcore.far.page import PageOwner, identify_pages
from kvcore.far.tier import FarTier
from kvcore_runtime.engine.exchange import Exchange
from kvcore_runtime.events.endpoints import Warnings
from kvcore_runtime.far.staging import Staging
from kvcore_runtime.model.identity import describe, identify

if TYPE_CHECKING:
    from kvcore_runtime.engine.engine import Engine

NAP_S = 0.001
"""Seconds that an idle exchange sleeps between two polls of its tier."""
WAIT_S = 0.005
"""The same for a tier with `wait`, which returns as soon as a ticket ends. It is longer, because
each wake-up takes the core from the tier's threads.
"""
CLOSE_S = 2.0


class FarExchange(FarClient, Exchange):
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
        self._engine: Engine = engine
        self._options = options
        self._clock = clock
        self._wait: Callable[[float], object] = getattr(tier, "wait", clock.sleep)
        self._nap_s = WAIT_S if hasattr(tier, "wait") else NAP_S
        staging = Staging(options.staging_pages, engine.runtime.cache.layout.page_size_bytes)
        tier.attach(staging.memory, staging.slot_bytes)
        warn = Warnings().warn
        super().__init__(engine, tier, staging, options, clock, engine.spans.end, warn)
        weights = options.weights or identify(engine.model, config.groups)
        self._weights = self._epoch(), weights
        self.set_weights(weights)
        engine.runtime.external = staging

    @property
    def identity(self) -> str | None:
        """The identity in the names of this engine's pages, in hexadecimal, or None."""
        place = self._link.place
        return None if place is None else place.identity.hex()

    def idle(self) -> None:
        """See `Exchange`."""
        if self._fetches.is_waiting:
            self._nap()

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
        self._link.set_place(None if weights is None else self._owner(weights, self._options.rank))

    def flush(self, timeout_s: float) -> bool:
        """See `Exchange`: wait until the tier has answered all stores.

        Returns False, too, if a step is still to copy blocks, which nothing here can wait for.
        """
        end = self._clock.monotonic() + timeout_s
        self._hear()
        while self._link.num_stores:
            if self._clock.monotonic() >= end:
                return False
            self._nap()
            self._hear()
        return not self._stores.is_copying

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Close the tier; tickets that it has not answered within timeout_s are given up."""
        self._link.close(timeout_s)

    def _nap(self) -> None:
        try:
            self._wait(self._nap_s)
        except Exception:  # of a client library
            self._clock.sleep(NAP_S)

    def _owner(self, weights: str, rank: int) -> PageOwner:
        """Return the owner of a rank's pages: all that decides their bytes besides their keys."""
        engine, world = self._engine, self._options.world
        config = engine.manager.config
        cache = engine.runtime.cache
        groups = (
            f"group {group.kind} {group.block_size} {group.window} {each.layout.page_shape}"
            for group, each in zip(config.groups, cache.groups, strict=True)
        )
        lines = (
            f"weights {weights}",
            f"model {describe(engine.model, config.groups)}",
            f"{cache.layout.dtype}",
            *groups,
            f"hash {config.hashing} {config.hash_block_size} {config.hash_seed.hex()}",
            f"rank {rank} of {world}",
        )
        return PageOwner(identify_pages(lines), rank, world)
