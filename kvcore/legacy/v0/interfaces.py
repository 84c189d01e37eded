# SPDX-License-Identifier: Apache-2.0
"""The types of V0's block managers, blocks and allocators, for callers that name types.

This file defines nothing. It has the names of both vLLM modules called `interfaces`.
Source: S002-08, 14, 15, 28, 51, 65.
"""

from __future__ import annotations

from kvcore.legacy.blocks.named_enum import Device

# Both managers are imported so that `get_block_space_manager_class` finds them by name.
from kvcore.legacy.v0 import block_manager, placeholder_block_space_manager  # noqa: F401
from kvcore.legacy.v0.block import Block, BlockId, chain
from kvcore.legacy.v0.block_allocator import BlockAllocator
from kvcore.legacy.v0.cpu_gpu_block_allocator import DeviceAwareBlockAllocator
from kvcore.legacy.v0.manager_interfaces import BlockSpaceManager
from kvcore.legacy.v0.sequences import AllocStatus

__all__ = [
    "AllocStatus",
    "Block",
    "BlockAllocator",
    "BlockId",
    "BlockSpaceManager",
    "Device",
    "DeviceAwareBlockAllocator",
    "chain",
]
