# SPDX-License-Identifier: Apache-2.0
"""SAN-EQUAL: reading only what may have changed finds what reading everything finds."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcore.sanitizer import CacheGroup, Sanitizer
from tests.helpers.amount import examples
from tests.sanitizer.queues import Queue, play

GROUPS = {
    "one": [CacheGroup(block_size=2)],
    "window": [CacheGroup(block_size=2, window=3, num_null=1)],
    "chunked": [CacheGroup(block_size=2, window=4, num_null=1, chunked=True)],
    "two": [CacheGroup(block_size=2), CacheGroup(block_size=2, window=2)],
    "pools": [CacheGroup(block_size=2), CacheGroup(block_size=1, pool=1, zeros_readable=True)],
    "ring": [CacheGroup(block_size=2), CacheGroup(block_size=1, window=3, ring=True, pool=1)],
}

NUM_QUEUES = examples(60)
SIDES = [(kind, full) for kind in ("python", "rust") for full in (True, False)]


@pytest.mark.parametrize("name", GROUPS)
def test_reading_what_changed_finds_what_reading_everything_finds(name: str) -> None:
    names: Counter[str] = Counter()
    for seed in range(NUM_QUEUES):
        fault = (0, 0.02, 0.1)[seed % 3]
        moves = Queue(random.Random(seed), GROUPS[name], 8, fault).make(40)
        sides = [Sanitizer(GROUPS[name], 8, full=full, backend=kind) for kind, full in SIDES]
        found = [play(moves, side) for side in sides]
        for side, mine in zip(sides, found, strict=True):
            assert mine == found[0], f"seed {seed}"
            assert side.suspicions == sides[0].suspicions, f"seed {seed}"
        names.update(finding.name for finding in sides[0].findings)
    assert names.keys() >= {"wrong-kv", "unwritten-read"}
