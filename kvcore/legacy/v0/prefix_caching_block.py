# SPDX-License-Identifier: Apache-2.0
"""The names of V0's prefix caching, under the module name that engines import.

This file defines nothing. Source: S002-01 to 64.
"""

from __future__ import annotations

from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0.block import Block, BlockId, NaiveBlock, PrefixCachingBlock
from kvcore.legacy.v0.block import chain as get_all_blocks_recursively
from kvcore.legacy.v0.block import check_previous as assert_prefix_caching_block_or_none
from kvcore.legacy.v0.block_allocator import BlockAllocator
from kvcore.legacy.v0.common import (
    BlockPool,
    CacheMetricData,
    CopyOnWriteTracker,
    ReadOnlyRefCounter,
    RefCounter,
)
from kvcore.legacy.v0.cpu_gpu_block_allocator import DeviceAwareBlockAllocator
from kvcore.legacy.v0.errors import NoFreeBlocksError
from kvcore.legacy.v0.evictor import EvictionPolicy, Evictor, LRUEvictor, make_evictor
from kvcore.legacy.v0.naive_block import NaiveBlockAllocator
from kvcore.legacy.v0.prefix_caching_allocator import BlockTracker, PrefixCachingBlockAllocator
from kvcore.legacy.v0.sequence_trackers import ComputedBlocksTracker, LastAccessBlocksTracker

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
