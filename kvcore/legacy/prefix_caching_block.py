# SPDX-License-Identifier: Apache-2.0
"""The names of V0's prefix caching, as engines import them.

Rules: this file defines nothing. Source: S002-01 to 64.
"""

from __future__ import annotations

from kvcore.legacy.block_errors import NoFreeBlocksError
from kvcore.legacy.block_interfaces import Block, BlockAllocator, BlockId, Device
from kvcore.legacy.block_interfaces import chain as get_all_blocks_recursively
from kvcore.legacy.block_objects import BlockPool
from kvcore.legacy.block_tracker import (
    BlockTracker,
    CacheMetricData,
    CopyOnWriteTracker,
    ReadOnlyRefCounter,
    RefCounter,
)
from kvcore.legacy.content_block import PrefixCachingBlock
from kvcore.legacy.content_block import check_previous as assert_prefix_caching_block_or_none
from kvcore.legacy.device_interfaces import DeviceAwareBlockAllocator
from kvcore.legacy.evictor import EvictionPolicy, Evictor, LRUEvictor, make_evictor
from kvcore.legacy.naive_block import NaiveBlock, NaiveBlockAllocator
from kvcore.legacy.prefix_caching_allocator import PrefixCachingBlockAllocator
from kvcore.legacy.sequence_trackers import ComputedBlocksTracker, LastAccessBlocksTracker

PrefixHash = int

__all__ = [
    "Block",
    "BlockAllocator",
    "BlockId",
    "BlockPool",
    "BlockTracker",
    "CacheMetricData",
    "ComputedBlocksTracker",
    "CopyOnWriteTracker",
    "Device",
    "DeviceAwareBlockAllocator",
    "EvictionPolicy",
    "Evictor",
    "LRUEvictor",
    "LastAccessBlocksTracker",
    "NaiveBlock",
    "NaiveBlockAllocator",
    "NoFreeBlocksError",
    "PrefixCachingBlock",
    "PrefixCachingBlockAllocator",
    "PrefixHash",
    "ReadOnlyRefCounter",
    "RefCounter",
    "assert_prefix_caching_block_or_none",
    "get_all_blocks_recursively",
    "make_evictor",
]
