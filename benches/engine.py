# SPDX-License-Identifier: Apache-2.0
"""Compare the engine's speed with a forward pass over one contiguous cache per request.

Both sides answer the same prompts in the same batches, take turns in one process, and the
figure is the median over rounds of (contiguous time / engine's time): 1.0 means that blocks and
their manager cost nothing. Random weights of SmolLM2's shape, plain mode, greedy, no prefix in
common. Goal (CPU): at least 0.85.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.contiguous import generate_reference
from kvcore_runtime.model.model import Llama, LlamaConfig, tiny_model
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config

GOAL = 0.85
BLOCK_SIZE = 16
BATCHES = (1, 8)


@attrs.frozen(kw_only=True)
class Figure:
    """One batch size: medians over rounds; ratios are contiguous over engine time."""

    num_requests: int
    num_prompt_tokens: int
    num_generated_tokens: int
    engine_tokens_per_second: float
    contiguous_tokens_per_second: float
    wall_ratio: float
    cpu_ratio: float
    manager_share: float
    manager_us_per_step: float


def smollm2_shape() -> LlamaConfig:
    """Return the shape of SmolLM2-135M."""
    return LlamaConfig(
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
    )


def make_requests(number: int, num_prompt_tokens: int, max_tokens: int) -> list[GenerationRequest]:
    """Make requests with prompts of random tokens."""
    draw = random.Random(number)
    return [
        GenerationRequest(
            request_id=f"r{index}",
            prompt=tuple(draw.randrange(40_000) for _ in range(num_prompt_tokens)),
            sampling=Sampling(max_tokens=max_tokens),
        )
        for index in range(number)
    ]


def measure(
    model: Llama, requests: list[GenerationRequest], rounds: int, options: EngineOptions
) -> Figure:
    """Let both sides answer the requests in turn, this many times."""
    num_prompt, max_tokens = len(requests[0].prompt), requests[0].sampling.max_tokens
    blocks = len(requests) * -(-(num_prompt + max_tokens) // BLOCK_SIZE)
    engines: list[Engine] = []

    def with_blocks() -> list[tuple[int, ...]]:
        engine = engines[-1]
        for request in requests:
            engine.add_request(request)
        return sorted(done.tokens for done in engine.run())

    def contiguous() -> list[tuple[int, ...]]:
        prompts = [each.prompt for each in requests]
        done = generate_reference(model, prompts, [each.sampling for each in requests])
        return sorted(each.tokens for each in done)

    wall: dict[Callable[[], Any], list[float]] = {with_blocks: [], contiguous: []}
    cpu: dict[Callable[[], Any], list[float]] = {with_blocks: [], contiguous: []}
    for turn in range(rounds + 1):
        engines.append(Engine(model, Config(blocks + 1, BLOCK_SIZE), options))
        answers = []
        for side in (with_blocks, contiguous) if turn % 2 else (contiguous, with_blocks):
            started, started_cpu = time.perf_counter(), time.process_time()
            answers.append(side())
            if turn:  # the first turn only warms up
                cpu[side].append(time.process_time() - started_cpu)
                wall[side].append(time.perf_counter() - started)
        assert answers[0] == answers[1], "both sides answer alike"
    metrics = engines[-1].metrics
    generated = len(requests) * max_tokens
    return Figure(
        num_requests=len(requests),
        num_prompt_tokens=num_prompt,
        num_generated_tokens=max_tokens,
        engine_tokens_per_second=generated / statistics.median(wall[with_blocks]),
        contiguous_tokens_per_second=generated / statistics.median(wall[contiguous]),
        wall_ratio=_ratio(wall[contiguous], wall[with_blocks]),
        cpu_ratio=_ratio(cpu[contiguous], cpu[with_blocks]),
        manager_share=metrics.manager_share,
        manager_us_per_step=metrics.manager_us_per_step,
    )


def main() -> None:
    """Print one line per batch size, with the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements per line")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--max-tokens", type=int, default=24, help="tokens per answer")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--backend", choices=("rust", "python"), help="the manager's backend")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = tiny_model(config=smollm2_shape())
    for number in BATCHES:
        requests = make_requests(number, given.prompt_tokens, given.max_tokens)
        options = EngineOptions(
            backend=given.backend, token_budget=number * given.prompt_tokens, max_sequences=number
        )
        figure = measure(model, requests, given.rounds, options)
        print(json.dumps(attrs.asdict(figure)) if given.json else _line(figure), flush=True)


def _ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _line(figure: Figure) -> str:
    return (
        f"engine over contiguous caches, {figure.num_requests} requests: "
        f"wall {figure.wall_ratio:.2f}  cpu {figure.cpu_ratio:.2f}  goal {GOAL:.2f}  "
        f"({figure.engine_tokens_per_second:.1f} against "
        f"{figure.contiguous_tokens_per_second:.1f} tokens/s; manager "
        f"{figure.manager_share:.2%}, {figure.manager_us_per_step:.0f} us per step)"
    )


if __name__ == "__main__":
    main()
