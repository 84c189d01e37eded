# SPDX-License-Identifier: Apache-2.0
"""Measure CPU time per step under transformers with its own block manager and with kvcore.

Run: python -m benches.transformers_steps [SEQUENCES ...]. Needs transformers outside the project
(benches/peers/install.py). Drives transformers' scheduler and batch processor without a model: it
plans a step, makes no tensors, and returns tokens. So the figure is transformers' time for planning
and for reading the output, its scheduler's own loop included. Both sides take turns, a round each;
the figures are medians over rounds, the ratio that of the ratios. It then measures kvcore in the
shadow of transformers' cache: the time of kvcore's own calls, and of the rest of the shadow, as
shares of transformers' step. Last, the rest as a share of a whole step: the median of transformers'
own loop with its tensors, its sampling and the forward pass of a model of 2 layers and 32 channels.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import attrs

from benches.engines.manager_calls import clocked
from benches.peers import install
from tests.engines.transformers.environment import FAMILY, run_there

SEQUENCES = (4, 16, 64)
PAGE, PROMPT, NEW, ROUNDS = 16, 200, 64, 12
NUM_LAYERS, HEADS, WIDTH = 2, 2, 8
CALLS = ("search_prefix_match", "expect", "can_store_request_tokens", "free_blocks", "close_batch")
"""The methods of kvcore's cache that transformers calls in these loads."""


class Loop:
    """transformers' batch processor over one cache, without inputs, outputs and model."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        import torch
        from transformers import ContinuousBatchingConfig, LlamaConfig
        from transformers.generation.continuous_batching import continuous_api as api

        per_request = -(-(PROMPT + NEW + 1) // PAGE)
        config = LlamaConfig(
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=HEADS,
            hidden_size=HEADS * WIDTH,
        )
        settings = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=2 * num_sequences * per_request,
            max_batch_tokens=max(512, num_sequences),
            max_requests_per_batch=num_sequences,
            max_memory_percent=0.5,
        )
        self.cache = api.PagedAttentionCache(
            config, settings, torch.device("cpu"), SimpleNamespace(tp_size=1), torch.float32
        )
        self.scheduler = api.SCHEDULER_MAPPING["fifo"](self.cache, None, num_sequences)
        alone = SimpleNamespace(tp_all_reduce_min=lambda tensor, **_: tensor)
        self.offloading = api.OffloadingManager(self.cache, self.scheduler, 0, 0.5, None, alone)
        self.processor = api.ContinuousBatchProcessor.__new__(api.ContinuousBatchProcessor)
        self.processor.__dict__.update(
            cache=self.cache,
            scheduler=self.scheduler,
            use_async_batching=False,
            inputs_and_outputs=self,
            output_router=SimpleNamespace(deliver_batch=lambda _: None),
        )
        self.compute_stream = None
        self.close = getattr(self.cache, "close_batch", lambda: None)
        self.batch: list[Any] = []
        self.num_steps = 0
        self.chance, self.token = random.Random(seed), 7

    def prepare_batch_update(self) -> tuple[list[Any], list[int], None]:
        """Return the requests of the step and their new tokens, as transformers expects."""
        return self.batch, [self.token] * len(self.batch), None

    def add(self, name: str, system: list[int]) -> None:
        """Put a request in the queue."""
        from transformers.generation.continuous_batching.requests import RequestState

        prompt = system + [self.chance.randrange(1000) for _ in range(PROMPT - len(system))]
        self.scheduler.add_waiting_request(RequestState(name, prompt, max_new_tokens=NEW))

    def step(self) -> None:
        """Plan a step, count its tokens as computed, and read the output."""
        batch = None
        while batch is None:
            batch, *_ = self.scheduler.schedule_batch(self.cache.max_batch_tokens, 10**9)
            if batch is None or self.scheduler.starved_requests:
                self.offloading.offload_requests()
        self.close()
        self.batch = batch
        for each in self.batch:
            each.state.position_offset += each.query_length
            if each.has_new_token:
                each.state.tokens_to_process = [-1]
        self.processor.update_batch()

    def serve(self, number: int, num_sequences: int) -> float:
        """Serve a round of requests with a common prefix; returns CPU microseconds per step."""
        system = [self.chance.randrange(1000) for _ in range(PROMPT // 2)]
        for request in range(num_sequences):
            self.add(f"{number}-{request}", system)
        before, started = self.num_steps, time.thread_time()
        while self.scheduler.has_pending_requests():
            self.step()
            self.num_steps += 1
        return 1e6 * (time.thread_time() - started) / (self.num_steps - before)


def compare(num_sequences: int) -> tuple[float, float, float]:
    """Return microseconds per step of transformers and of kvcore, and their ratio."""
    import kvcore_transformers

    native = Loop(num_sequences, seed=1)
    with kvcore_transformers.installed():
        ours = Loop(num_sequences, seed=1)
    gc.collect()
    gc.freeze()
    pairs = [
        (native.serve(number, num_sequences), ours.serve(number, num_sequences))
        for number in range(ROUNDS)
    ]
    theirs, mine = (statistics.median(side) for side in zip(*pairs, strict=True))
    return theirs, mine, statistics.median(own / other for other, own in pairs)


@attrs.frozen
class ShadowCost:
    """What a shadow adds to a step, medians over rounds.

    manager and besides: shares of transformers' step of kvcore's own calls and of the rest.
    microseconds: of the rest.
    """

    manager: float
    besides: float
    microseconds: float


def measure_shadow(num_sequences: int) -> ShadowCost:
    """Serve the same requests without a shadow, in one, and by kvcore alone. Raises RuntimeError if
    kvcore differs.
    """
    import kvcore_transformers

    native = Loop(num_sequences, seed=1)
    with kvcore_transformers.installed():
        ours = Loop(num_sequences, seed=1)
    os.environ["KVCORE_SHADOW"] = "1"
    with kvcore_transformers.installed():
        shadow = Loop(num_sequences, seed=1)
    del os.environ["KVCORE_SHADOW"]
    spent = clocked(ours.cache, CALLS)
    ours.close = ours.cache.close_batch
    gc.collect()
    gc.freeze()
    rounds = []
    for number in range(ROUNDS):
        own, both = (loop.serve(number, num_sequences) for loop in (native, shadow))
        before, steps = spent.total, ours.num_steps
        ours.serve(number, num_sequences)
        calls = 1e6 * (spent.total - before) / (ours.num_steps - steps)
        rounds.append((calls / own, (both - calls) / own - 1, both - calls - own))
    difference = shadow.cache.shadow.difference
    if difference is not None:
        raise RuntimeError(difference)
    return ShadowCost(*map(statistics.median, zip(*rounds, strict=True)))


def measure_whole_step(num_sequences: int) -> float:
    """Return the CPU microseconds of a step of transformers' own loop with the smallest model."""
    from tests.engines.transformers.models import serve, tiny

    chance, starts = random.Random(1), list[float]()
    prompts = [[chance.randrange(128) for _ in range(PROMPT)] for _ in range(num_sequences)]
    sizes: dict[str, Any] = {
        "page_size": PAGE,
        "num_blocks": 2 * num_sequences * -(-(PROMPT + NEW + 1) // PAGE),
        "max_batch_tokens": max(512, num_sequences),
        "max_requests_per_batch": num_sequences,
    }
    serve(tiny(), prompts, lambda _: starts.append(time.thread_time()), new=NEW, **sizes)
    return 1e6 * statistics.median(end - start for start, end in itertools.pairwise(starts))


def main(arguments: list[str]) -> int:
    """Print a line per number of sequences."""
    print("us of CPU per step; the rest of the shadow also as a share of a whole step")
    print(
        f"{'sequences':>9}{'transformers':>14}{'kvcore':>8}{'ratio':>7}"
        f"{'shadow: manager':>17}{'rest':>8}{'us':>6}{'whole step':>12}{'rest':>7}"
    )
    for number in [int(each) for each in arguments] or SEQUENCES:
        native, ours, ratio = compare(number)
        cost, whole = measure_shadow(number), measure_whole_step(number)
        print(
            f"{number:9}{native:14.1f}{ours:8.1f}{ratio:7.2f}"
            f"{cost.manager:17.1%}{cost.besides:8.1%}{cost.microseconds:6.1f}"
            f"{whole:12,.0f}{cost.microseconds / whole:7.1%}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    try:
        import transformers  # noqa: F401  # checks whether this is its environment
    except ImportError:
        install.install([FAMILY])
        sys.exit(run_there("-m", "benches.transformers_steps", *sys.argv[1:]))
    sys.exit(main(sys.argv[1:]))
