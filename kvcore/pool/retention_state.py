# SPDX-License-Identifier: Apache-2.0
"""The records of a pool with levels; changed in retention.py. Twin:
rust/src/pool/retention_state.rs.
"""

from __future__ import annotations

import attrs
from immutables import Map

from kvcore.pool.free_queue import CURRENT
from kvcore.types.retention import LEVEL_MAX

Kept = tuple[int, int, int]
"""Base, level, and the time at which the level ends."""
NOTHING: Kept = (0, 0, 0)
NUM_RINGS = CURRENT + LEVEL_MAX + 1
"""Rings of a free queue with levels: the first has the blocks without content, then the blocks of
older epochs; each other ring is a level.
"""


@attrs.frozen
class RetentionState:
    """The records of a pool with levels. now: in ms. kept: block id -> its wish."""

    now: int = 0
    kept: Map[int, Kept] = Map()


def level_of(kept: Kept, now: int) -> int:
    """Return the level of a block now."""
    base, level, until = kept
    return max(base, level) if now < until else base
