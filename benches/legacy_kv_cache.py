# SPDX-License-Identifier: Apache-2.0
"""A story of vLLM 0.8.5's V1 manager: prompts of 512 tokens, hits, decoding, preemption.

Run by benches/legacy.py. A look-up makes a prompt's hashes by the engine's function and their keys
by the core's hashing, once per request; further look-ups are timed apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from benches.legacy import Each, Work
from kvcore import _twin
from kvcore.hashing import block_hash
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v1_0_8.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager

SIZE = 16
PROMPT = 512
NUM_REQUESTS = 128
NUM_BLOCKS = 8192


@attrs.define
class Request:
    """A request as the manager reads it."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    spec_token_ids: list[int] = attrs.field(factory=list)
    mm_positions: None = None
    lora_request: None = None
    status: str = "RUNNING"

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens."""
        return len(self.all_token_ids)


class V1:
    """Distinct requests, then as many that hit all their blocks, decode and end."""

    def __init__(self, backend: BackendName) -> None:
        spec = FullAttentionSpec(SIZE, num_kv_heads=1, head_size=1, dtype="float16")
        config = KVCacheConfig(NUM_BLOCKS, {}, [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 4096, backend=backend)
        self.backing = self.manager.block_pool.backing
        self.core_functions = ((_twin, "hash_block"), (block_hash, "hash_block"))
        tokens = [list(range(number, number + PROMPT)) for number in range(NUM_REQUESTS)]
        self.first = [Request(f"a{number}", list(each)) for number, each in enumerate(tokens)]
        self.second = [Request(f"b{number}", [*each, 1]) for number, each in enumerate(tokens)]

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield the phases of all requests."""
        manager, first, second = self.manager, self.first, self.second
        allocate = manager.allocate_slots
        yield "look-up, hashes and a miss", Each(manager.get_computed_blocks, first)
        yield "look-up, a miss", Each(manager.get_computed_blocks, first)
        yield "allocate, 32 blocks", Each(allocate, first, [PROMPT] * NUM_REQUESTS)
        for request in second:
            manager.get_computed_blocks(request)
        yield "look-up, 32 hits", Each(manager.get_computed_blocks, second)
        hits = [manager.get_computed_blocks(request)[0] for request in second]
        yield "allocate, 32 hits", Each(allocate, second, [1] * NUM_REQUESTS, hits)
        self._compute(first, PROMPT)
        yield "decode, a new block", Each(allocate, first, [1] * NUM_REQUESTS)
        self._compute(first, PROMPT + 1)
        yield "decode, in place", Each(allocate, first, [1] * NUM_REQUESTS)
        self._compute(first, PROMPT + SIZE - 1)
        yield "decode, a full block", Each(allocate, first, [1] * NUM_REQUESTS)
        common = manager.get_num_common_prefix_blocks
        yield "common prefix", Each(common, second, [2] * NUM_REQUESTS)
        yield "free", Each(manager.free, (*first, *second))
        yield "take_batch", manager.take_batch

    def _compute(self, requests: list[Request], num_computed: int) -> None:
        """Set the number of computed tokens of each request, and append a token."""
        for request in requests:
            request.num_computed_tokens = num_computed
            request.all_token_ids += [3] * (num_computed + 1 - request.num_tokens)


STORIES = (V1,)
