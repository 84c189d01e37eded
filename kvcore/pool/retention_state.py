# SPDX-License-Identifier: Apache-2.0
"""What a pool keeps for levels; changed in retention.py. Twin: rust/src/pool/retention_state.rs."""

from __future__ import annotations

from immutables import Map
from msgspec import Struct

from kvcore.pool.free_queue import CURRENT
from kvcore.types.retention import LEVEL_MAX

Kept = tuple[int, int, int]
"""Base, level, and the time until which the level holds."""
NOTHING: Kept = (0, 0, 0)
NUM_RINGS = CURRENT + LEVEL_MAX + 1
"""The rings of a free queue by level: the first has blocks of older epochs behind those without
content, the others have a level each."""


class RetentionState(Struct, frozen=True, gc=False):
    """What a pool keeps for levels. now: in ms. kept: block id -> what was wished for it."""

    now: int = 0
    kept: Map[int, Kept] = Map()


def level_of(kept: Kept, now: int) -> int:
    """The level that a block has now."""
    base, level, until = kept
    return max(base, level) if now < until else base
