# SPDX-License-Identifier: Apache-2.0
"""The counts of blocks by state are the pool's own, after every batch of random runs."""

from __future__ import annotations

from collections import Counter

import pytest
from kvcore_runtime.prometheus.block_counts import BlockCounts

from kvcore import Config, Group, KVCacheManager, Request
from kvcore.types.commands import Batch
from tests.conftest import Backend
from tests.oracle.run import run

RUNS = range(60)


def truth(manager: KVCacheManager) -> tuple[int, int, int, int]:
    """Return the counts of a walk of the pool: used, cached, free, quarantined."""
    found: Counter[str] = Counter()
    config, quarantined = manager.config, set(manager.quarantined_blocks)
    for block in range(config.num_blocks - config.num_usable_blocks, config.num_blocks):
        if manager.num_owners(block):
            found["used"] += 1
        elif block in quarantined:
            found["quarantined"] += 1
        else:
            found["cached" if manager.has_key(block) else "free"] += 1
    return found["used"], found["cached"], found["free"], found["quarantined"]


def counted(counts: BlockCounts) -> tuple[int, int, int, int]:
    states = counts.states()
    return states.used, states.cached, states.free, states.quarantined


def test_counts_are_those_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: dict[int, tuple[KVCacheManager, BlockCounts]] = {}
    seen: Counter[str] = Counter()
    take = KVCacheManager.take_batch

    def take_batch(manager: KVCacheManager) -> Batch:
        if id(manager) not in followed:
            followed[id(manager)] = manager, BlockCounts(manager)
        counts = followed[id(manager)][1]
        counts.rest()
        assert counted(counts) == truth(manager)
        assert manager.num_cached_blocks == truth(manager)[1]
        batch = take(manager)
        counts.update(batch)
        assert counted(counts) == truth(manager)
        seen.update(
            name for name in ("used", "cached", "quarantined") if getattr(counts.states(), name)
        )
        return batch

    monkeypatch.setattr(KVCacheManager, "take_batch", take_batch)
    for seed in RUNS:
        done = run(seed)
        assert done.wrong is None
        seen.update(name for name in ("cancel", "swap_out", "evict_blocks") if done.reached[name])
    wanted = {"used", "cached", "quarantined", "cancel", "swap_out", "evict_blocks"}
    assert set(seen) == wanted


def test_an_eviction_counts_the_tokens_of_the_blocks_group(backend: Backend) -> None:
    groups = (Group(4), Group(8))
    config = Config(num_blocks=7, groups=groups)
    manager = KVCacheManager(config, backend)
    counts = BlockCounts(manager)
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        manager.add_request(Request(name, range(first, first + 16)))
        assert manager.allocate_slots(name, 16)  # the pool: four blocks of 4 tokens, two of 8
        counts.update(manager.take_batch())
        manager.free(name)
    assert counts.num_evicted_tokens == 2 * (16 + 16)  # of a and b, in both groups
    counts.update(manager.take_batch())
    assert counts.states().cached == 6


def test_a_manager_in_use_is_read_once(backend: Backend) -> None:
    manager = KVCacheManager(Config(num_blocks=9, block_size=4), backend)
    manager.add_request(Request("a", range(8)))
    manager.allocate_slots("a", 8)
    manager.take_batch()
    manager.free("a")
    manager.take_batch()
    assert counted(BlockCounts(manager)) == (0, 2, 6, 0)
