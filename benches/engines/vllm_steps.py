# SPDX-License-Identifier: Apache-2.0
"""Measure CPU time of vLLM 0.33.0's steps over its own manager and over kvcore's.

Runs in vLLM's environment: `python -m benches.engines` calls this. No model runs; a step is
schedule() and update_from_output(). In `decode` each request gets one token per step. In `mix`
requests end after 32 to 95 tokens and others replace them, each with a cached prefix of 1,024
tokens and 64 to 127 tokens of its own. Whole steps are measured first, both sides in turn, then the
manager's calls in the same steps on both sides.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch

from benches.engines.manager_calls import CALLS, Spent, clocked
from benches.engines.options import Options, read_options
from benches.vllm.compare import MODEL  # sets the environment that vLLM reads

# isort: split
import kvcore_vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
PROMPT, PREFIX = 512, 1024
VOCABULARY = 50_000
WARM_UP = 20
CALL_STEPS = 128
"""Steps whose calls are measured."""

SIDES = ("vllm", "kvcore")
KINDS = {
    False: (Scheduler, kvcore_vllm.Scheduler),
    True: (AsyncScheduler, kvcore_vllm.AsyncScheduler),
}


@attrs.frozen
class Case:
    """One case to measure."""

    load: str
    is_async: bool
    num_running: int

    def __str__(self) -> str:
        return f"{self.load}, {'async' if self.is_async else 'sync'}, {self.num_running:,} running"


def make_config(case: Case, model: str) -> VllmConfig:
    """Make vLLM's configuration for a case."""
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_blocks(case)
    return VllmConfig(
        model_config=ModelConfig(
            model=model, skip_tokenizer_init=True, dtype="float16", max_model_len=MAX_MODEL_LEN
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=case.num_running,
            max_num_batched_tokens=8192,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=case.is_async,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )


def num_blocks(case: Case) -> int:
    """Return enough blocks for all requests at full length."""
    return case.num_running * (MAX_MODEL_LEN // BLOCK_SIZE + 2) + 1


class Drive:
    """A scheduler under a load, warmed up."""

    def __init__(self, kind: type[Any], case: Case, model: str) -> None:
        config = make_config(case, model)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks(case),
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.case = case
        self.num_come = 0
        self.num_tokens: list[int] = []  # scheduled per step
        self._dice = random.Random(1)
        self._prefix = self._draw(PREFIX)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._in_flight: deque[Any] = deque()
        for _ in range(case.num_running):
            self._arrive()
        while self.scheduler.waiting or any(r.is_prefill_chunk for r in self.scheduler.running):
            self.step()
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> float:
        """Schedule, take the output of the oldest step, and return the CPU seconds."""
        clock = time.thread_time
        start = clock()
        planned = self.scheduler.schedule()
        spent = clock() - start
        self.num_tokens.append(planned.total_num_scheduled_tokens)
        self._in_flight.append((planned, answer(planned)))
        if len(self._in_flight) > self.case.is_async:
            oldest = self._in_flight.popleft()
            start = clock()
            self.scheduler.update_from_output(*oldest)
            spent += clock() - start
        if self.case.load == "mix":
            there = len(self.scheduler.running) + len(self.scheduler.waiting)
            for _ in range(self.case.num_running - there):
                self._arrive()
        return spent

    def _arrive(self) -> None:
        if self.case.load == "decode":
            tokens, most = self._draw(PROMPT), MAX_MODEL_LEN - PROMPT
        else:
            tokens = self._prefix + self._draw(self._dice.randrange(64, 128))
            most = self._dice.randrange(32, 96)
        sampling = SamplingParams(max_tokens=most, ignore_eos=True)
        self.scheduler.add_request(
            Request(
                request_id=str(self.num_come),
                prompt_token_ids=tokens,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )
        self.num_come += 1

    def _draw(self, count: int) -> list[int]:
        return [self._dice.randrange(VOCABULARY) for _ in range(count)]


def answer(planned: Any) -> ModelRunnerOutput:
    """Return a token for each request of a step, and none for a chunk of a prompt."""
    names = list(planned.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: place for place, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


@attrs.define
class Measured:
    """The measurements of a case: CPU seconds per round and side, and calls of num_steps steps."""

    rounds: dict[str, list[float]] = attrs.field(factory=lambda: {side: [] for side in SIDES})
    calls: dict[str, Spent] = attrs.field(factory=lambda: {side: Spent() for side in SIDES})
    num_steps: int = 0

    @property
    def ratios(self) -> list[float]:
        """Return the ratio of kvcore's time to vLLM's, per round."""
        return [
            mine / own for own, mine in zip(self.rounds["vllm"], self.rounds["kvcore"], strict=True)
        ]


def measure(case: Case, options: Options, model: str) -> Measured:
    """Measure both sides of a case. Raises RuntimeError if they schedule differently."""
    kinds = dict(zip(SIDES, KINDS[case.is_async], strict=True))
    drives = {side: Drive(kinds[side], case, model) for side in SIDES}
    measured = Measured()
    gc.collect()
    gc.freeze()
    for number in range(options.rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            seconds = sum(drives[side].step() for _ in range(options.steps))
            measured.rounds[side].append(seconds)
    measured.calls = {side: clocked(drives[side].scheduler.kv_cache_manager) for side in SIDES}
    for measured.num_steps in range(1, CALL_STEPS + 1):
        for side in SIDES:
            drives[side].step()
    gc.unfreeze()
    if drives["vllm"].num_tokens != drives["kvcore"].num_tokens:
        raise RuntimeError(f"{case}: the sides schedule other numbers of tokens")
    return measured


def show(case: Case, measured: Measured, options: Options) -> None:
    """Print the row of a case, and the rows of its calls if requested."""
    step = statistics.median(measured.rounds["vllm"]) / options.steps
    own, mine = (measured.calls[side] for side in SIDES)
    ratios = measured.ratios
    print(
        f"{case.load:8}{'async' if case.is_async else 'sync':7}{case.num_running:7,}"
        f"{step * 1e6:12,.0f}{statistics.median(ratios):8.2f}"
        f"{f'{min(ratios):.2f}-{max(ratios):.2f}':>12}"
        f"{own.total / measured.num_steps * 1e6:14,.0f}{mine.total / own.total:9.2f}",
        flush=True,
    )
    for name in CALLS if options.by_call else ():
        if own.counts[name]:
            print(
                f"    {name:30}{own.counts[name] / measured.num_steps:8.1f} a step"
                f"{own.seconds[name] / own.counts[name] * 1e6:9.2f} us"
                f"{mine.seconds[name] / max(1, mine.counts[name]) * 1e6:9.2f} us",
                flush=True,
            )


def each_case(options: Options) -> Iterator[tuple[Case, str]]:
    """Yield the requested cases, each with the folder of a model."""
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        shape = MODEL | {"max_position_embeddings": MAX_MODEL_LEN, "vocab_size": VOCABULARY}
        (Path(model) / "config.json").write_text(json.dumps(shape))
        for load, mode, size in itertools.product(options.loads, options.modes, options.sizes):
            yield Case(load, mode == "async", size), model


def main() -> int:
    """Measure the requested cases."""
    options = read_options()
    print("vLLM 0.33.0, kvcore over its own manager; us are vLLM's own, of CPU a step")
    print("load    mode   running     us/step     step      rounds    manager us  manager")
    for case, model in each_case(options):
        show(case, measure(case, options, model), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
