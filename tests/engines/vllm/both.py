# SPDX-License-Identifier: Apache-2.0
"""vLLM's manager and the adapter's side by side: the same calls, and their one answer.

Blocks of four tokens. Requests are vLLM's own, one object for each side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kvcore_vllm.short_ways import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.request import RequestStatus

from tests.engines.vllm.engine import (
    BLOCK_SIZE,
    SHAPE,
    make_cache,
    make_config,
    make_request,
)

WINDOW = SlidingWindowSpec(sliding_window=6, **SHAPE)
STATE = MambaSpec(
    block_size=BLOCK_SIZE, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
)

Answer = Callable[[Any, dict[str, Any]], object]
"""What a side says, from its manager and its requests by name."""


def make(kind: Any, *groups: Any, num_blocks: int = 33, **options: Any) -> Any:
    """Return a manager of either kind."""
    model_length = options.pop("max_model_len", 64)
    return kind(
        make_cache(*groups, num_blocks=num_blocks, **options.pop("cache", {})),
        max_model_len=model_length,
        scheduler_block_size=options.pop("scheduler_block_size", BLOCK_SIZE),
        hash_block_size=options.pop("hash_block_size", BLOCK_SIZE),
        **options,
    )


class Both:
    """A manager of each kind, with requests of its own for each."""

    def __init__(self, *groups: Any, **options: Any) -> None:
        register_all_kvcache_specs(make_config())
        self.sides: list[tuple[Any, dict[str, Any]]] = [
            (make(kind, *groups, **options), {}) for kind in (VllmManager, KVCacheManager)
        ]

    def add(self, name: str, tokens: list[int], **options: Any) -> None:
        """Add a request."""
        for _, requests in self.sides:
            requests[name] = make_request(name, tokens, **options)

    def ask(self, answer: Answer) -> Any:
        """Return the answer of both sides, which then have equal tables and free queues."""
        theirs, ours = (answer(*side) for side in self.sides)
        assert ours == theirs
        (vllm, requests), (kvcore, _) = self.sides
        for name in requests:
            assert kvcore.get_block_ids(name) == vllm.get_block_ids(name)
        assert list(kvcore.compat.core.state().device.queue) == [
            block.block_id for block in vllm.block_pool.free_block_queue.get_all_free_blocks()
        ]
        kvcore.compat.core.check()
        return ours

    def admit(self, name: str, count: int | None = None, **options: Any) -> int | None:
        """Look up and allocate, as a scheduler does; returns the hit's tokens, None if refused."""

        def answer(manager: Any, requests: dict[str, Any]) -> tuple[int | None, list[int]]:
            request = requests[name]
            manager.new_step_starts()
            hit, num_hit, _ = manager.get_computed_blocks(request)
            new = request.num_tokens - num_hit if count is None else count
            got = manager.allocate_slots(request, new, num_hit, hit, **options)
            zeroed = sorted(manager.take_new_block_ids())
            if got is None:
                return None, zeroed
            request.num_computed_tokens = num_hit + new
            request.status = RequestStatus.RUNNING
            return num_hit, zeroed

        num_hit: int | None = self.ask(answer)[0]
        return num_hit

    def decode(self, name: str, token: int, num_in_flight: int = 0) -> None:
        """Append a token, and schedule the next position."""

        def answer(manager: Any, requests: dict[str, Any]) -> object:
            request = requests[name]
            request.append_output_token_ids(token)
            request.num_in_flight_tokens = num_in_flight
            manager.new_step_starts()
            got = manager.allocate_slots(request, 1)
            manager.take_new_block_ids()
            request.num_computed_tokens += 1
            return got and got.get_block_ids()

        self.ask(answer)

    def free(self, name: str) -> None:
        """Free a request."""

        def answer(manager: Any, requests: dict[str, Any]) -> None:
            requests[name].status = RequestStatus.FINISHED_STOPPED
            manager.free(requests.pop(name))

        self.ask(answer)
