# SPDX-License-Identifier: Apache-2.0
"""The property of free blocks that leave by level.

Twin: rust/src/invariants/retention.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.pool.block_pool import BlockPool
from kvcore.pool.free_queue import CURRENT, OLDER
from kvcore.pool.retention_state import NOTHING, RetentionState, level_of


def misplaced(pool: BlockPool, known: RetentionState) -> Iterator[str]:
    """Yield the free blocks in the part of another level, and those with a wish but no key."""
    following = pool.queue.following
    for ring in range(pool.queue.num_rings):
        block = following[pool.num_blocks + ring]
        while block < pool.num_blocks:
            kept = known.kept.get(block, NOTHING)
            level = CURRENT + level_of(kept, known.now)
            expected = OLDER if pool.keys[block] is None else level
            if ring != expected or (ring == OLDER and kept != NOTHING):
                yield f"block {block} with {kept} is in part {ring} at {known.now} ms"
            block = following[block]
