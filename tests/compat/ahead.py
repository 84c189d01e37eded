# SPDX-License-Identifier: Apache-2.0
"""The engine of `engine.py` with asynchronous scheduling: one step is always in flight."""

from __future__ import annotations

import random

import attrs

from kvcore.compat import KVCacheManager
from tests.compat.engine import Chunk, Engine
from tests.compat.worker import EngineRequest


class AheadEngine(Engine):
    """Schedules each step before the tokens of the one before are known; no drafts."""

    def __init__(self, manager: KVCacheManager, *, budget: int, dice: random.Random) -> None:
        super().__init__(manager, budget=budget, dice=dice)
        self._computed: list[Chunk] = []

    def step(self) -> None:
        """Schedule, sample the step before, compute."""
        chunks = self._schedule()
        for chunk in self._computed:
            if not chunk.request.status.startswith("FINISHED"):
                self._sample(chunk)
        known = [
            attrs.evolve(chunk, tokens=chunk.request.all_token_ids)
            for chunk in chunks
            if chunk.request in self.running
        ]
        wrong = self._compute(known)
        self._computed = [
            chunk
            for chunk in known
            if chunk.request not in wrong and chunk.end >= chunk.request.num_tokens
        ]
        self._count_what_is_there()

    def _num_ahead(self, request: EngineRequest) -> int:
        return sum(chunk.request is request for chunk in self._computed)

    def _propose(self, request: EngineRequest) -> None:
        if request.num_computed_tokens == request.num_tokens:
            self.happened.add("ahead")
