# SPDX-License-Identifier: Apache-2.0
"""Replay the list's operations on the KVCacheManager and Request of vLLM 0.8.5 (V1).

`vllm085-facade` uses kvcore's facade instead of the manager, with vLLM's own requests.
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
from benches.peers.vllm_scheduler import V1Facade, V1Of085
from benches.peers.work import Work
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v1_0_8.kv_cache_manager import KVCacheManager as Facade


class Vllm(V1Of085):
    """vLLM's own requests, over its manager or a replacement."""

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
        length = work.num_tokens_max
        super().__init__(make(config, max_model_len=length, caching_hash_algo=hashing))
        self.sampling = SamplingParams(max_tokens=length)
        self.ids = [f"request-{number}" for number in range(len(work.prompts))]

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


class WithFacade(Vllm, V1Facade):
    """vLLM's own requests over kvcore's facade."""


def facade(backend: BackendName, hashing: str = "builtin") -> Maker:
    """Return the maker of the facade's peer."""
    return Maker(lambda work: WithFacade(work, hashing, partial(Facade, backend=backend)))


MAKERS = {
    "vllm085": Maker(lambda work: Vllm(work, "builtin")),
    "vllm085-sha": Maker(lambda work: Vllm(work, "sha256")),
    "vllm085-facade": facade("rust"),
    "vllm085-facade-sha": facade("rust", "sha256"),
    "vllm085-facade-python": facade("python"),
}
