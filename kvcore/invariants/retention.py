# SPDX-License-Identifier: Apache-2.0
"""The property of a state whose free blocks leave by level.

Twin: rust/src/invariants/retention.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcore.pool.free_queue import CURRENT, OLDER
from kvcore.pool.retention_state import NOTHING, level_of
from kvcore.state.state import State


def rank_order(state: State) -> Iterator[str]:
    """RANK-ORDER: each free block stands in the part of its level, one without a key in the first;
    nothing is wished for those.
    """
    pool, known = state.device, state.device.retention
    if known is None:
        return
    following = pool.queue.following
    for ring in range(pool.queue.num_rings):
        block = following[pool.num_blocks + ring]
        while block < pool.num_blocks:
            kept = known.kept.get(block, NOTHING)
            level = CURRENT + level_of(kept, known.now)
            expected = OLDER if pool.keys[block] is None else level
            if ring != expected or (ring == OLDER and kept != NOTHING):
                yield f"block {block} with {kept} stands in part {ring} at {known.now} ms"
            block = following[block]
