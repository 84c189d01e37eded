# SPDX-License-Identifier: Apache-2.0
"""The names of V0's prefix caching, as engines import them.

Rules: this file defines nothing. Source: S002-01 to 64.
"""

from __future__ import annotations

from kvcore.legacy.block_errors import NoFreeBlocksError
from kvcore.legacy.block_tracker import BlockTracker, CacheMetricData
from kvcore.legacy.content_block import PrefixCachingBlock
from kvcore.legacy.evictor import EvictionPolicy, LRUEvictor, make_evictor
from kvcore.legacy.interfaces import Block, BlockAllocator, Device
from kvcore.legacy.prefix_caching_allocator import PrefixCachingBlockAllocator
from kvcore.legacy.sequence_trackers import ComputedBlocksTracker, LastAccessBlocksTracker

__all__ = [
    "Block",
    "BlockAllocator",
    "BlockTracker",
    "CacheMetricData",
    "ComputedBlocksTracker",
    "Device",
    "EvictionPolicy",
    "LRUEvictor",
    "LastAccessBlocksTracker",
    "NoFreeBlocksError",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "make_evictor",
]
