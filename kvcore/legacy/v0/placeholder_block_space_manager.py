# SPDX-License-Identifier: Apache-2.0
"""V0's manager for models without attention caches: it accepts every call and does nothing.

Each call returns what the original returns. Source: S002-72.
"""

from __future__ import annotations

from typing import Any

from kvcore.legacy.v0.manager_interfaces import BlockSpaceManager
from kvcore.legacy.v0.sequences import AllocStatus


def _says(make: Any) -> Any:
    """Return a method that ignores its arguments. make: returns the method's result."""
    return lambda _self, *_args, **_fields: make()


class PlaceholderBlockSpaceManager(BlockSpaceManager, version="placeholder"):
    """A manager without blocks."""

    def __init__(self, **kwargs: object) -> None:
        """Accepts and ignores the settings of any manager."""

    can_allocate = can_swap_in = _says(lambda: AllocStatus.OK)
    can_append_slots = can_swap_out = reset_prefix_cache = _says(lambda: True)
    append_slots = get_common_computed_block_ids = _says(list)
    get_num_free_gpu_blocks = get_num_free_cpu_blocks = _says(lambda: 1)
    get_num_cached_tokens = _says(int)
    get_prefix_cache_hit_rate = _says(lambda: -1)
    allocate = fork = free = swap_in = swap_out = get_block_table = _says(lambda: None)
    access_all_blocks_in_seq = mark_blocks_as_computed = _says(lambda: None)
