# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0's `KVCacheManager`, called as its scheduler calls it.

    kvcore check --manager kvcore.check.managers.vllm:Manager

It runs in vLLM's environment; nothing else of vLLM is started.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvcore import Config, Group
from kvcore.check.managers.copies import copied

logging.getLogger("vllm").setLevel(logging.ERROR)  # it warns about each refused reset
LONGEST = 1024
SAMPLING = SamplingParams(max_tokens=LONGEST)
LAYER = {"num_kv_heads": 1, "head_size": 1, "dtype": STR_DTYPE_TO_TORCH_DTYPE["float32"]}


def made(config: Config) -> Any:
    """Make vLLM's manager for such a pool, with the null block that it always has."""
    init_none_hash(sha256)
    groups = [KVCacheGroupSpec([str(n)], spec(each)) for n, each in enumerate(config.groups)]
    sizes = [group.block_size for group in config.groups]
    return KVCacheManager(
        KVCacheConfig(config.num_usable_blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=LONGEST,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
    )


def spec(group: Group) -> Any:
    """Return a group in vLLM's form."""
    if group.window is None:
        return FullAttentionSpec(block_size=group.block_size, **LAYER)
    return SlidingWindowSpec(block_size=group.block_size, sliding_window=group.window, **LAYER)


class Manager:
    """The manager, with the requests of a scheduler."""

    def __init__(self, config: Config) -> None:
        self.manager, self.requests = made(config), dict[str, Any]()
        self.hasher = get_request_block_hasher(config.hash_block_size, sha256)
        self.first = 1 - config.null_block  # the world counts no null block if none is needed

    def __deepcopy__(self, _: Any) -> Manager:
        other = copy.copy(self)
        shared = (SAMPLING, self.hasher, self.manager.kv_cache_config)
        other.manager, other.requests = copied((self.manager, self.requests), shared)
        return other

    def add_request(self, request: Any) -> None:
        tokens = list(request.tokens)
        self.requests[request.request_id] = Request(
            request.request_id, tokens, SAMPLING, None, block_hasher=self.hasher
        )

    def get_computed_blocks(self, name: str) -> Any:
        return self.manager.get_computed_blocks(self.requests[name])[:2]

    def allocate_slots(self, name: str, count: int, hit: Any = (None, 0)) -> Any:
        request = self.requests[name]
        if self.manager.allocate_slots(request, count, hit[1], hit[0]) is None:
            return None
        request.num_computed_tokens += hit[1] + count
        request.status = RequestStatus.RUNNING
        return self.get_block_ids(name)

    def append(self, names: list[str], tokens: list[int]) -> Any:
        (name,), before = names, copy.deepcopy(self.requests[names[0]])
        self.requests[name].append_output_token_ids(tokens[0])
        found = self.allocate_slots(name, 1)
        self.requests[name] = self.requests[name] if found is not None else before
        return found

    def free(self, name: str) -> None:
        self.manager.free(self.requests[name])
        self.requests[name].num_computed_tokens = 0
        self.requests[name].status = RequestStatus.PREEMPTED

    def remove_request(self, name: str) -> None:
        del self.requests[name]

    def reset_prefix_cache(self) -> bool:
        return bool(self.manager.reset_prefix_cache())

    def get_block_ids(self, name: str) -> Any:
        tables = self.manager.get_block_ids(name)
        return [[block - self.first for block in table] for table in tables]

    def take_batch(self) -> tuple[()]:
        self.manager.new_step_starts()
        return ()

    @property
    def num_free_blocks(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def state_name(self, slots: Callable[[int], object]) -> bytes:
        pool, kinds = self.manager.block_pool, self.manager.coordinator.single_type_managers
        held = [sorted(kind.req_to_blocks.items()) for kind in kinds]
        tables = [block for kind in held for _, table in kind for block in table]
        order = [*tables, *pool.free_block_queue.get_all_free_blocks()]
        places = {block.block_id: place for place, block in reversed([*enumerate(order)])}
        rows = []
        for block in map(pool.blocks.__getitem__, sorted(places, key=places.__getitem__)):
            live = block.ref_cnt or block.block_hash
            held_slots = slots(block.block_id - self.first) if live else None
            rows.append((block.is_null, block.ref_cnt, block.block_hash, held_slots))
        index = [
            (key, [places[i] for i in found] if isinstance(found, dict) else places[found.block_id])
            for key, found in sorted(pool.cached_block_hash_to_block._cache.items())
        ]
        names = [[(n, [places[b.block_id] for b in table]) for n, table in kind] for kind in held]
        counts = [sorted(kind.num_cached_block.items()) for kind in kinds]
        return repr((rows, index, names, counts)).encode()
