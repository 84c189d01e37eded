# SPDX-License-Identifier: Apache-2.0
"""Beside recurrent states, too, all is right after batches that fail or are cancelled.

A state is overwritten, so there is no way back into a step that ran: a request that loses one
begins again at a state that is still there, or at none.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from kvcore_runtime.engine.forward import Begun, Computed
from kvcore_runtime.engine.sequence import Completion

from tests.conftest import Backend
from tests.runtime.engine.test_hybrid_engine import IN_ORDER, Life

LIVES = range(IN_ORDER, IN_ORDER + 4)
"""Lives with batches in flight; they differ in layers, hits inside blocks, drafts, publication."""


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


class Broken(RuntimeError):
    """The error that a forward pass raises on demand."""


class TakenBack(Life):
    """Takes back all batches in flight behind some of the steps."""

    def __init__(self, seed: int, backend: Backend) -> None:
        super().__init__(seed, backend)
        self.chance = random.Random(seed)

    def step(self) -> list[Completion]:
        done = self.engine.step()
        if self.chance.random() < 0.3:
            self.engine.cancel()
            self.engine.manager.check()
            assert self.engine.manager.in_flight == ()
        return done


class Failing(Life):
    """Lets some forward passes fail, after they spoilt the states and slots that they write."""

    def __init__(self, seed: int, backend: Backend) -> None:
        super().__init__(seed, backend)
        self.chance = random.Random(seed)
        self.compute = self.engine.forward.compute
        self.engine.forward.compute = self.fail  # type: ignore[method-assign] # broken

    def fail(self, begun: Begun) -> Computed:
        if self.chance.random() < 0.75:
            return self.compute(begun)
        tables, cache, reads = self.engine.runtime.tables, self.engine.runtime.cache, begun.reads
        counts = [end - start for start, end in zip(reads.starts, reads.ends, strict=True)]
        for group_id, size in enumerate(tables.block_sizes):
            if group_id not in cache.states:
                slots = tables.slot_mapping(reads.rows, reads.starts, counts, group_id=group_id)
                slots = slots.long()
                cache.groups[group_id].data[slots // size, :, :, slots % size] = math.nan
                continue
            for row, end in zip(reads.rows, reads.ends, strict=True):
                written = tables.row_blocks(int(row), group_id)[(int(end) - 1) // size :]
                for part in cache.states[group_id]:
                    part[written] = math.nan
        raise Broken

    def step(self) -> list[Completion]:
        try:
            return self.engine.step()
        except Broken:
            self.seen["failed"] += 1
            self.engine.manager.check()
            assert self.engine.manager.in_flight == ()
            return []


def test_all_in_flight_may_be_taken_back_at_any_step(backend: Backend) -> None:
    seen, num_cancelled = Counter[str](), 0
    for seed in LIVES:
        life = TakenBack(seed, backend)
        life.live()
        seen += life.seen
        num_cancelled += life.engine.metrics.num_cancelled
    assert num_cancelled > 10
    assert {"CopyOnWrite", "hits", "hits inside", "accepted", "forks"} <= set(seen)


def test_a_batch_that_fails_is_computed_anew(backend: Backend) -> None:
    seen = Counter[str]()
    for seed in LIVES:
        life = Failing(seed, backend)
        life.live()
        seen += life.seen
    assert seen["failed"] > 10
    assert {"CopyOnWrite", "hits", "hits inside", "accepted", "forks"} <= set(seen)
