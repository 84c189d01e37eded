# SPDX-License-Identifier: Apache-2.0
"""A manager with the calls of vLLM's V1 `KVCacheManager`, for engines written for that.

Every call takes the engine's own request object (`EngineRequest`), returns None if a request does
not fit, and batches close automatically. `docs/from_vllm.md` goes through it name by name.
"""

from kvcore.compat.blocks import KVCacheBlocks
from kvcore.compat.engine_request import EngineRequest
from kvcore.compat.errors import (
    BehindWindow,
    CommandsNotKept,
    NoSlotLeft,
    NotOneGroup,
    TokensChanged,
    UnreadCommands,
)
from kvcore.compat.manager import KVCacheManager
from kvcore.compat.pool_config import make_config

__all__ = [
    "BehindWindow",
    "CommandsNotKept",
    "EngineRequest",
    "KVCacheBlocks",
    "KVCacheManager",
    "NoSlotLeft",
    "NotOneGroup",
    "TokensChanged",
    "UnreadCommands",
    "make_config",
]
