# SPDX-License-Identifier: Apache-2.0
"""Build the immutable value of the Python backend from the twin's blocks.

The twin hands out columns (`rust/src/bindings/tiers.rs`); the position of each block under its key
gives the order of the blocks in the index.
"""

from __future__ import annotations

from typing import Any

from immutables import Map
from pyrsistent import pvector

from kvcore.legacy.blocks.tiers import Tiers
from kvcore.pool.block_pool import BlockPool, PoolEviction
from kvcore.pool.free_queue import make_free_queue
from kvcore.pool.hash_index import HashIndex, HashIndexTransaction
from kvcore.types.commands import Batch

Columns = tuple[list[int], list[bytes | None], list[int], list[int], list[Any], int | None]
"""Owner counts, keys, free queue from its front, position of each block under its key, priorities,
and the block most recently placed by priority.
"""


def from_columns(
    device: Columns, host: Columns | None, batch: Batch, *, first_block: int, eviction: PoolEviction
) -> Tiers:
    """Return the tiers that have these columns."""
    return Tiers(
        _pool(device, first_block, eviction),
        None if host is None else _pool(host, 0, eviction),
        batch.number,
        pvector(batch),
    )


def _pool(columns: Columns, first_block: int, eviction: PoolEviction) -> BlockPool:
    ref_counts, keys, queue, places, priorities, last_placed = columns
    index = HashIndexTransaction(HashIndex())
    for block in sorted(range(len(keys)), key=places.__getitem__):
        key = keys[block]
        if key is not None:
            index.insert(key, block)
    return BlockPool(
        first_block,
        eviction,
        pvector(ref_counts),
        pvector(keys),
        make_free_queue(len(ref_counts), queue),
        index.freeze(),
        Map(),
        None,
        Map(priorities),
        last_placed,
    )
