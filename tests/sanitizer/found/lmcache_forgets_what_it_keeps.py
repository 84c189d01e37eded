# SPDX-License-Identifier: Apache-2.0
"""LMCache 0.5.6, `cache_policy: LFU` and `use_layerwise: true`: chunks that can never be evicted.

Stores chunks as `store_layer` does, in a memory of four, and looks them up as `lookup` does. Exits
with 1 as long as the bug exists.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

torch: Any = importlib.import_module("torch")
LAYERS, CHUNKS, ALIGNED = 2, 4, 4096
SHAPE = torch.Size([256, 4])  # of one layer: one aligned unit of memory


def of(module: str, name: str) -> Any:
    """Return a name of a module of LMCache."""
    return getattr(importlib.import_module(f"lmcache.{module}"), name)


def backend(policy: str) -> Any:
    """Return LMCache's backend in host memory, with room for some chunks."""
    config = of("v1.config", "LMCacheEngineConfig").from_defaults(
        local_cpu=True, use_layerwise=True, cache_policy=policy
    )
    of("v1.pin_monitor", "PinMonitor").GetOrCreate(config)
    memory = of("v1.memory_allocators.mixed_memory_allocator", "MixedMemoryAllocator")(
        ALIGNED * LAYERS * CHUNKS
    )
    made = of("v1.storage_backend.local_cpu_backend", "LocalCPUBackend")
    return made(config, memory_allocator=memory, dst_device="cpu")


def layers(chunk: int) -> Any:
    """Return the keys of a chunk, one per layer."""
    key = of("utils", "CacheEngineKey")("model", 1, 0, chunk, torch.float32)
    return key.split_layers(LAYERS)


def store(of_host: Any, chunk: int) -> None:
    """Store a chunk, which evicts others if there is no room."""
    form = of("v1.memory_management", "MemoryFormat").KV_T2D
    objects = of_host.batched_allocate(SHAPE, torch.float32, LAYERS, form, busy_loop=False)
    for key, each in zip(layers(chunk), objects, strict=True):
        of_host.batched_submit_put_task([key], [each])
        each.ref_count_down()


def look_up(of_host: Any, chunk: int) -> bool:
    """Look a chunk up and pin it, then touch and unpin it."""
    found = [key for key in layers(chunk) if of_host.contains(key, pin=True)]
    of_host.touch_cache()
    for key in found:
        of_host.unpin(key)
    return len(found) == LAYERS


def problems(policy: str) -> list[str]:
    """Return what is wrong after some stores."""
    of_host, found = backend(policy), []
    for chunk in range(40):
        store(of_host, chunk)
    old = [chunk for chunk in range(20) if all(of_host.contains(key) for key in layers(chunk))]
    if old:
        found.append(f"{policy}: {len(old)} of {CHUNKS} chunks, {old}, outlive 20 later ones")
    for chunk in range(40):
        try:
            look_up(of_host, chunk)
        except KeyError:
            found.append(f"{policy}: KeyError in the lookup of chunk {chunk}, which is stored")
            break
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    assert not problems("LRU")
    wrong = problems("LFU")
    print("\n".join(wrong))
    sys.exit(bool(wrong))
