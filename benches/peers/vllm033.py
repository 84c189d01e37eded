# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0 under the operations of the list: its KVCacheManager, Request and block hasher."""

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
from benches.peers.work import Decode, Work


class Vllm:
    """What vLLM's scheduler calls, in its order, without the scheduler."""

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
        self.manager = KVCacheManager(
            config,
            max_model_len=work.num_tokens_max,
            scheduler_block_size=work.block_size,
            hash_block_size=work.block_size,
        )
        self.hasher = get_request_block_hasher(work.block_size, hash_fn)
        self.sampling = SamplingParams(max_tokens=work.num_tokens_max)
        self.ids = [f"request-{number}" for number in range(len(work.prompts))]
        self.requests: dict[int, Any] = {}
        self.hits: list[int] = []

    def add(self, request: int, prompt: Any) -> None:
        self.requests[request] = Request(
            request_id=self.ids[request],
            prompt_token_ids=prompt,
            sampling_params=self.sampling,
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self.hasher,
        )

    def prefill(self, request: int, end: int) -> None:
        known = self.requests[request]
        computed = known.num_computed_tokens
        if computed:
            if end > computed:
                self.grown(self.manager.allocate_slots(known, end - computed))
                known.num_computed_tokens = end
            return
        blocks, num_hit, _ = self.manager.get_computed_blocks(known)
        self.hits.append(num_hit)
        end = max(end, num_hit + 1)
        self.grown(self.manager.allocate_slots(known, end - num_hit, num_hit, blocks))
        known.status = RequestStatus.RUNNING
        known.num_computed_tokens = end

    def grown(self, blocks: object) -> None:
        if blocks is None:
            raise RuntimeError("the pool has no room")

    def decode(self, decode: Decode) -> None:
        requests, allocate = self.requests, self.manager.allocate_slots
        for request, token in zip(decode.requests, decode.tokens, strict=True):
            known = requests[request]
            known.append_output_token_ids(token)
            if allocate(known, 1) is None:
                raise RuntimeError("the pool has no room")
            known.num_computed_tokens += 1

    def preempt(self, request: int) -> None:
        known = self.requests[request]
        self.manager.free(known)
        known.status = RequestStatus.PREEMPTED
        known.num_computed_tokens = 0

    def finish(self, request: int) -> None:
        self.manager.free(self.requests.pop(request))

    def end_step(self) -> None:
        pass


MAKERS = {
    "vllm033": Maker(lambda work: Vllm(work, "sha256")),
    "vllm033-cbor": Maker(lambda work: Vllm(work, "sha256_cbor")),
}
