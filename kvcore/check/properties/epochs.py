# SPDX-License-Identifier: Apache-2.0
"""Properties of the end of an epoch: older blocks are evicted first.

No transition calls anything here. Twin: rust/src/check/properties/epochs.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvcore.pool.block_pool import BlockPool
from kvcore.pool.free_queue import num_older
from kvcore.state.state import State
from kvcore.trace.calls import Call
from kvcore.types.commands import Allocate
from kvcore.types.values import Outcome


def epoch_first(before: State, call: Call, outcome: Outcome[State, Any]) -> Iterator[str]:
    """EPOCH-FIRST: when an epoch ends, its free blocks and its blocks with keys become older
    blocks, and leave before blocks with keys of the new epoch.
    """
    old, pool = before.device, outcome.state.device
    held = set(old.older)
    first = [*pool.queue][: num_older(pool.queue)]
    if outcome.state.epoch > before.epoch:
        held |= {block for block in range(old.num_blocks) if old.has_key(block)}
        if first != list(old.queue):
            yield f"{call.name} puts {first} first, but {list(old.queue)} were free"
    held -= {each.block for each in outcome.commands if isinstance(each, Allocate)}
    free = set(pool.queue)
    if pool.older != held - free:
        yield f"{call.name} leaves {set(pool.older)} as older blocks, not {held - free}"
    late = held & free - set(first)
    if late:
        yield f"{call.name} lets older blocks {sorted(late)} leave among others"


def join(queue: list[int], before: BlockPool, block: int, num_first: int, *, cached: bool) -> bool:
    """Put a block into a queue that begins with this many blocks of older epochs. Return whether
    there is one more.
    """
    if block in before.older:
        queue.insert(num_first, block)
        return True
    if before.eviction == "uncached_first" and not cached:
        queue.insert(0, block)
        return num_first > 0
    queue.append(block)
    return False
