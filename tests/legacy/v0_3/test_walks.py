# SPDX-License-Identifier: Apache-2.0
"""Random walks of the first block manager hold its promises, and both backends walk alike."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from tests.conftest import need_twin
from tests.legacy.v0_3.walk import Walk

NUM_WALKS = 24
NUM_STEPS = 150


@cache
def walked(seed: int) -> Walk:
    """Return a walk in Python, for several tests."""
    walk = Walk("python", seed)
    walk.run(NUM_STEPS)
    return walk


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_walks_lose_no_block(seed: int) -> None:
    manager = walked(seed).manager
    assert manager.get_num_free_gpu_blocks() == manager.num_total_gpu_blocks
    assert manager.get_num_free_cpu_blocks() == manager.num_total_cpu_blocks


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_both_backends_walk_alike(seed: int) -> None:
    need_twin()
    ours, theirs = walked(seed).record, Walk("rust", seed).run(NUM_STEPS)
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == other, f"seed {seed}, call {number}"


def test_the_walks_come_by_everything() -> None:
    """Each call, and each error that a caller can provoke, happens at least this often."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        for entry in walked(seed).record:
            if isinstance(entry, tuple):
                name, said, _ = entry
                seen[name] += 1
                seen[said[0] if isinstance(said, tuple) else f"{name} gives {said[:5]}"] += 1
    for name in ("allocate", "append_slot", "fork", "swap_out", "swap_in", "free_prefix", "reset"):
        assert seen[name] >= 10, (name, seen)
    for name in (
        *("OutOfMemory", "AlreadyFreed", "UnknownSequence", "AlreadyAllocated", "OnOtherDevice"),
        *("PrefixNotReady", "NoWaitingSequence"),
    ):
        assert seen[name] >= 3, (name, seen)
    copies = sum(count for name, count in seen.items() if name.startswith("append_slot gives ("))
    assert copies >= 50, seen
