# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5 (V1) under the operations of the list: its KVCacheManager and Request.

`vllm085-facade` is kvcore's facade in the place of the manager, with vLLM's own requests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from benches.peers.replay import Maker
from benches.peers.work import Decode, Work
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager as Facade


class Vllm:
    """What vLLM's scheduler calls, in its order, without the scheduler."""

    def __init__(self, work: Work, hashing: str, make: Any = KVCacheManager) -> None:
        spec = FullAttentionSpec(
            block_size=work.block_size,
            num_kv_heads=1,
            head_size=1,
            dtype=torch.float32,
            use_mla=False,
        )
        config = KVCacheConfig(
            num_blocks=work.num_blocks,
            tensors={},
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = make(config, max_model_len=work.num_tokens_max, caching_hash_algo=hashing)
        self.sampling = SamplingParams(max_tokens=work.num_tokens_max)
        self.ids = [f"request-{number}" for number in range(len(work.prompts))]
        self.requests: dict[int, Any] = {}
        self.hits: list[int] = []

    def add(self, request: int, prompt: Any) -> None:
        self.requests[request] = Request(
            request_id=self.ids[request],
            prompt_token_ids=prompt,
            multi_modal_inputs=None,
            multi_modal_hashes=None,
            multi_modal_placeholders=None,
            sampling_params=self.sampling,
            eos_token_id=None,
            arrival_time=0.0,
        )

    def prefill(self, request: int, end: int) -> None:
        known = self.requests[request]
        computed = known.num_computed_tokens
        if computed:
            if end > computed:
                self.grown(self.manager.allocate_slots(known, end - computed))
                known.num_computed_tokens = end
            return
        blocks, num_hit = self.manager.get_computed_blocks(known)
        self.hits.append(num_hit)
        end = max(end, num_hit + 1)
        self.grown(self.manager.allocate_slots(known, end - num_hit, blocks))
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
        known.num_computed_tokens = 0

    def finish(self, request: int) -> None:
        known = self.requests.pop(request)
        self.manager.free(known)
        self.manager.free_block_hashes(known)

    def end_step(self) -> None:
        pass


class WithFacade(Vllm):
    """The same with kvcore's facade as the manager, whose commands are handed out each step."""

    def end_step(self) -> None:
        self.manager.take_batch()


def facade(backend: BackendName, hashing: str = "builtin") -> Maker:
    """How that is made."""
    return Maker(lambda work: WithFacade(work, hashing, partial(Facade, backend=backend)))


MAKERS = {
    "vllm085": Maker(lambda work: Vllm(work, "builtin")),
    "vllm085-sha": Maker(lambda work: Vllm(work, "sha256")),
    "vllm085-facade": facade("rust"),
    "vllm085-facade-sha": facade("rust", "sha256"),
    "vllm085-facade-python": facade("python"),
}
