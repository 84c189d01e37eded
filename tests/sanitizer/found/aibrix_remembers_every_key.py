# SPDX-License-Identifier: Apache-2.0
"""AIBrix's KV cache 0.8.0 with its default policy, S3FIFO: it keeps every key for ever.

Puts blocks into caches of ten. Exits with 1 as long as the bug exists.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

torch: Any = importlib.import_module("torch")
CAPACITY, BLOCKS = 10, 5_000
policies: Any = importlib.import_module("aibrix_kvcache.l1.eviction_policy")
keys: Any = importlib.import_module("aibrix_kvcache.cache_hashable")
memory: Any = importlib.import_module("aibrix_kvcache.memory.external_memory_region")
options: Any = importlib.import_module("aibrix_kvcache.envs")


def remembered(name: str) -> int:
    """Return how many keys a cache has after many puts, each of another block."""
    slab = torch.zeros(1, dtype=torch.uint8)
    cache = policies.BaseEvictionPolicy.create(name, CAPACITY)
    for block in range(BLOCKS):
        tokens = keys.TokenListView((block, block + 1))
        cache.put(keys.KVCacheKey(None, tokens), memory.ExternalMemoryRegion(slab, 0, 1))
    assert len(cache) <= CAPACITY
    return len(cache._hashmap)


if __name__ == "__main__":
    assert remembered("LRU") == remembered("FIFO") == CAPACITY
    default = options.AIBRIX_KV_CACHE_OL_L1_CACHE_EVICTION_POLICY
    found = remembered(default)
    if found > 3 * CAPACITY:
        print(f"{default}: {found:,} keys are kept for {CAPACITY} blocks")
    sys.exit(found > 3 * CAPACITY)
