# SPDX-License-Identifier: Apache-2.0
"""kvcore: the KV-cache block manager for LLM inference engines, as a pure library.

The manager decides and emits commands; it never touches a tensor (`kvcore_runtime` applies the
commands). The pure functions under it take a state and return a new one:
`kvcore.transitions.allocate`, `kvcore.transitions.fork`, `kvcore.transitions.swap` and so on, and
the pool layer in `kvcore.pool.transitions`. The errors for misuse are in `kvcore.errors`.
"""

from typing import TYPE_CHECKING

from kvcore.manager import KVCacheManager
from kvcore.metrics import BlockObserver, PrefixCachingMetrics
from kvcore.state.state import State, make_state
from kvcore.types.commands import (
    Allocate,
    Batch,
    Command,
    CopyOnWrite,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Load,
    SetTable,
    Store,
    SwapIn,
    SwapOut,
    Touch,
    Zero,
)
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, KvcoreError
from kvcore.types.event_log import Events
from kvcore.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.types.extra_inputs import LoRA, MediaItem, PromptEmbeds
from kvcore.types.groups import Group
from kvcore.types.policy import EvictionPolicy
from kvcore.types.values import (
    Appended,
    Hit,
    KVCacheBlocks,
    Outcome,
    PrefixCacheStats,
    Reason,
    Refused,
    Request,
    Status,
    Swapped,
    Verdict,
)

if TYPE_CHECKING:
    from kvcore.types.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
else:

    def __getattr__(name: str) -> object:
        """Import names that few engines use on first access."""
        if name not in ("KvCacheRetentionConfig", "TokenRangeRetentionConfig"):
            raise AttributeError(f"module 'kvcore' has no attribute {name!r}")
        from kvcore.types import retention

        return getattr(retention, name)


__version__ = "0.1.0"

__all__ = [
    "AllBlocksCleared",
    "Allocate",
    "Appended",
    "Batch",
    "BlockObserver",
    "BlockRemoved",
    "BlockStored",
    "Command",
    "Config",
    "CopyOnWrite",
    "CutTable",
    "Event",
    "Events",
    "Evict",
    "EvictAll",
    "EvictionPolicy",
    "Free",
    "Group",
    "Hit",
    "InvariantViolation",
    "KVCacheBlocks",
    "KVCacheManager",
    "KvCacheRetentionConfig",
    "KvcoreError",
    "LoRA",
    "Load",
    "MediaItem",
    "Outcome",
    "PrefixCacheStats",
    "PrefixCachingMetrics",
    "PromptEmbeds",
    "Reason",
    "Refused",
    "Request",
    "SetTable",
    "State",
    "Status",
    "Store",
    "SwapIn",
    "SwapOut",
    "Swapped",
    "TokenRangeRetentionConfig",
    "Touch",
    "Verdict",
    "Zero",
    "__version__",
    "make_state",
]
