# SPDX-License-Identifier: Apache-2.0
"""Replay the list's operations on vLLM 0.33.0's KVCacheManager, Request and block hasher."""

from __future__ import annotations

from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from benches.peers.replay import Maker
from benches.peers.vllm_scheduler import VllmScheduler
from benches.peers.work import Work


class Vllm(VllmScheduler):
    """vLLM's own manager and requests."""

    def __init__(self, work: Work, hashing: str) -> None:
        hash_fn = get_hash_fn_by_name(hashing)
        init_none_hash(hash_fn)
        spec = FullAttentionSpec(
            block_size=work.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        config = KVCacheConfig(
            num_blocks=work.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        manager = KVCacheManager(
            config,
            max_model_len=work.num_tokens_max,
            scheduler_block_size=work.block_size,
            hash_block_size=work.block_size,
        )
        super().__init__(manager)
        self.hasher = get_request_block_hasher(work.block_size, hash_fn)
        self.sampling = SamplingParams(max_tokens=work.num_tokens_max)
        self.ids = [f"request-{number}" for number in range(len(work.prompts))]

    def add(self, request: int, prompt: Any) -> None:
        self.requests[request] = Request(
            request_id=self.ids[request],
            prompt_token_ids=prompt,
            sampling_params=self.sampling,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self.hasher,
        )

    def allocate_first(self, known: Any, num_new: int, num_hit: int, blocks: Any) -> Any:
        """Allocate after a hit; the request then runs."""
        found = self.manager.allocate_slots(known, num_new, num_hit, blocks)
        known.status = RequestStatus.RUNNING
        return found

    def preempt(self, request: int) -> None:
        super().preempt(request)
        self.requests[request].status = RequestStatus.PREEMPTED


MAKERS = {
    "vllm033": Maker(lambda work: Vllm(work, "sha256")),
    "vllm033-cbor": Maker(lambda work: Vllm(work, "sha256_cbor")),
}
