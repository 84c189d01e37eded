# SPDX-License-Identifier: Apache-2.0
"""What V0's allocators have in common, as engines import it.

Rules: this file defines nothing. Source: S002-05, 34, 49, 66, 73.
"""

from __future__ import annotations

from kvcore.legacy.v0.block_interfaces import Block, BlockAllocator, BlockId
from kvcore.legacy.v0.block_interfaces import chain as get_all_blocks_recursively
from kvcore.legacy.v0.block_objects import BlockList, BlockPool
from kvcore.legacy.v0.block_tracker import (
    CacheMetricData,
    CopyOnWriteTracker,
    ReadOnlyRefCounter,
    RefCount,
    RefCounter,
    RefCounterProtocol,
)

__all__ = [
    "Block",
    "BlockAllocator",
    "BlockId",
    "BlockList",
    "BlockPool",
    "CacheMetricData",
    "CopyOnWriteTracker",
    "ReadOnlyRefCounter",
    "RefCount",
    "RefCounter",
    "RefCounterProtocol",
    "get_all_blocks_recursively",
]
