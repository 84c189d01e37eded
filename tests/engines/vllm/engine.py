# SPDX-License-Identifier: Apache-2.0
"""A small engine around vLLM's schedulers: a configuration, requests, and a model that says 7."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}  # before vLLM is imported

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.engines.vllm.vllm_models import write_models

BLOCK_SIZE = 4
SHAPE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)


@cache
def model() -> str:
    """Return a folder with the configuration of a model."""
    folder = Path(tempfile.mkdtemp())
    write_models(folder)
    init_none_hash(sha256)
    return str(folder / "facebook--opt-125m")


def make_config(**changed: Any) -> VllmConfig:
    """Make vLLM's configuration. changed: options of the scheduler's."""
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = 33
    return VllmConfig(
        model_config=ModelConfig(
            model=model(), skip_tokenizer_init=True, dtype="float16", max_model_len=64
        ),
        scheduler_config=SchedulerConfig(
            **{
                "max_num_seqs": 4,
                "max_num_batched_tokens": 64,
                "max_model_len": 64,
                "is_encoder_decoder": False,
                "watermark": 0.0,
            }
            | changed
        ),
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )


def make_cache(*groups: Any, num_blocks: int = 33, **changed: Any) -> KVCacheConfig:
    """Return a cache of these specifications, of full attention without any."""
    named = [
        KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(groups or (FULL,))
    ]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=named, **changed
    )


def make_engine(
    kind: Any, *, is_async: bool = False, cache_config: Any = None, **changed: Any
) -> Any:
    """Return a scheduler of this class."""
    config = make_config(async_scheduling=is_async, **changed)
    return kind(
        vllm_config=config,
        kv_cache_config=cache_config or make_cache(),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def make_request(name: str, tokens: list[int], **options: Any) -> Request:
    """Return a request that wants three tokens. lookahead: tokens after a block in its hash."""
    lookahead = options.pop("lookahead", 0)
    sampling = SamplingParams(max_tokens=options.pop("max_tokens", 3), ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256, lookahead),
        **options,
    )


def steps(scheduler: Any, most: int, in_flight: int = 1) -> dict[str, int]:
    """Schedule and answer until nothing is left, mostly. Returns where requests started.

    in_flight: steps that are scheduled when the first is answered.
    """
    starts: dict[str, int] = {}
    waiting: deque[Any] = deque()
    for _ in range(most):
        planned = scheduler.schedule()
        starts |= {each.req_id: each.num_computed_tokens for each in planned.scheduled_new_reqs}
        waiting.append(planned)
        if len(waiting) < in_flight and planned.total_num_scheduled_tokens:
            continue
        planned = waiting.popleft()
        names = list(planned.num_scheduled_tokens)
        scheduler.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=[[7]] * len(names),
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        if not scheduler.requests:
            break
    return starts


def run(scheduler: Any, prompts: dict[str, list[int]]) -> dict[str, int]:
    """Answer these prompts completely. Returns the number of tokens of each answer."""
    requests = [make_request(name, tokens) for name, tokens in prompts.items()]
    for request in requests:
        scheduler.add_request(request)
    steps(scheduler, 20)
    return {each.request_id: len(each.output_token_ids) for each in requests if each.is_finished()}
