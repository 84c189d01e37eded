# SPDX-License-Identifier: Apache-2.0
"""Short words for stories about vLLM 0.8.5's V1 manager: make it, serve a request, look at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.legacy.v1_0_8.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager
from kvcore.legacy.v1_0_8.kv_cache_utils import KVCacheBlock
from tests.conformance.legacy_utils.requests import SIZE, EngineRequest, RequestStatus
from tests.conftest import Backend


def make(
    backend: Backend,
    num_blocks: int = 11,
    *,
    window: int | None = None,
    max_model_len: int = 1000,
    **options: Any,
) -> KVCacheManager:
    """Return an empty manager of blocks of `SIZE` tokens, one of them the null block."""
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": "float32"}
    spec: Any = FullAttentionSpec(SIZE, **shape)
    if window is not None:
        spec = SlidingWindowSpec(SIZE, **shape, sliding_window=window)
    config = KVCacheConfig(num_blocks, {}, [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len, backend=backend, **options)


def ids(blocks: Sequence[KVCacheBlock] | None) -> list[int] | None:
    """Return the ids of blocks; None for None."""
    return None if blocks is None else [block.block_id for block in blocks]


def table(manager: KVCacheManager, request: EngineRequest) -> list[int]:
    """Return the ids of a request's blocks."""
    return [block.block_id for block in manager.req_to_blocks[request.request_id]]


def free(manager: KVCacheManager) -> list[int]:
    """Return the free queue from head to tail."""
    return [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]


def admit(
    manager: KVCacheManager, name: str, tokens: Sequence[int], **fields: Any
) -> EngineRequest:
    """Admit a request that was looked up, with blocks for all of its tokens; it runs."""
    request = EngineRequest(name, list(tokens), **fields)
    assert resume(manager, request) is not None
    return request


def resume(manager: KVCacheManager, request: EngineRequest) -> list[int] | None:
    """Look up and schedule all tokens of a request that holds nothing; ids of new blocks."""
    blocks, num_hit = manager.get_computed_blocks(request)
    got = manager.allocate_slots(request, request.num_tokens - num_hit, blocks)
    if got is not None:
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
    manager.check()
    return ids(got)


def decode(manager: KVCacheManager, request: EngineRequest, *tokens: int) -> list[int] | None:
    """Append tokens and give them slots; ids of new blocks."""
    request.all_token_ids.extend(tokens)
    got = manager.allocate_slots(request, len(tokens))
    if got is not None:
        request.num_computed_tokens += len(tokens)
    manager.check()
    return ids(got)


def preempt(manager: KVCacheManager, request: EngineRequest) -> None:
    """Take the blocks of a request that is resumed later."""
    manager.free(request)
    request.num_computed_tokens = 0
    request.status = RequestStatus.PREEMPTED
    manager.check()


def finish(manager: KVCacheManager, request: EngineRequest) -> None:
    """Take the blocks of a request that is over, and forget its hashes."""
    manager.free(request)
    manager.free_block_hashes(request)
    manager.check()


def all_of(manager: KVCacheManager) -> tuple[Any, ...]:
    """Show everything that a call could have changed."""
    return (
        manager.block_pool.backing.state(),
        {name: [block.block_id for block in held] for name, held in manager.req_to_blocks.items()},
        {name: list(hashes) for name, hashes in manager.req_to_block_hashes.items()},
        dict(manager.num_cached_block),
        manager.prefix_cache_stats,
    )
