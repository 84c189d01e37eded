# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers, and prompts served to them by continuous batching.

Models compute in float64, so that one order of additions or another gives the same tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import kvcore_transformers
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

torch.set_num_threads(1)  # matrices are tiny
PAGE = 8
WINDOW = 20
SECONDS_MAX = 120
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LAYERS = {
    "full": ("full_attention",) * 2,
    "hybrid": ("sliding_attention", "full_attention", "sliding_attention"),
    "sliding": ("sliding_attention",) * 2,
}


def tiny(kind: str = "full", seed: int = 0, window: int = WINDOW) -> Any:
    """Return a random model with layers of a kind in `LAYERS`."""
    torch.manual_seed(seed)
    layers = LAYERS[kind]
    if kind == "full":
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=len(layers), **SIZES))
    else:
        config = Qwen2Config(
            num_hidden_layers=len(layers),
            layer_types=list(layers),
            use_sliding_window=True,
            sliding_window=window,
            **SIZES,
        )
        model = Qwen2ForCausalLM(config)
    return model.eval().double()


def draw_prompts(seed: int, num_prompts: int = 8, num_systems: int = 3) -> list[list[int]]:
    """Draw prompts in the order of arrival; each begins with one of the systems' texts."""
    chance = random.Random(seed)

    def text(least: int, most: int) -> list[int]:
        return [chance.randrange(128) for _ in range(chance.randint(least, most))]

    systems = [text(20, 50) for _ in range(num_systems)]
    return [chance.choice(systems) + text(1, 20) for _ in range(num_prompts)]


@attrs.frozen
class Served:
    """The results of a run.

    tokens and errors: by request. hits and computed: prompt tokens found in the cache, and tokens
    in forward passes. cache: the one that served it.
    """

    tokens: dict[str, list[int]]
    errors: dict[str, str]
    hits: int
    computed: int
    cache: Any

    def num_leaked(self) -> int:
        """Count the blocks that kvcore's manager counts as used, and requests that it knows."""
        manager = self.cache.manager
        manager.check()
        num_used = manager.config.num_usable_blocks - manager.num_free_blocks
        return int(num_used + len(self.cache.requests))


def settings(**changed: Any) -> tuple[GenerationConfig, ContinuousBatchingConfig]:
    """Return the settings of generation and batching: small, greedy also with several samples."""
    n, new = changed.pop("n", 1), changed.pop("new", 6)
    generation = GenerationConfig(
        max_new_tokens=new,
        num_return_sequences=n,
        do_sample=n > 1,
        top_k=1 if n > 1 else None,
        eos_token_id=-1,
        pad_token_id=0,
    )
    sizes = {
        "page_size": PAGE,
        "num_blocks": 60,
        "max_batch_tokens": 48,
        "max_requests_per_batch": 4,
        "seed": 1,
    }
    return generation, ContinuousBatchingConfig(**(sizes | changed))


def serve(
    model: Any,
    prompts: list[list[int]],
    before_step: Callable[[Any], None] | None = None,
    num_expected: Callable[[], int] | None = None,
    **changed: Any,
) -> Served:
    """Serve prompts in their order, as requests r0, r1 and so on.

    before_step: called with the `ContinuousBatchingManager` in its thread, before each step.
    num_expected: how many requests finish, if not all do.
    """
    generation, batching = settings(**changed)
    num_all = len(prompts) * (generation.num_return_sequences or 1)
    results: dict[str, Any] = {}
    deadline = time.monotonic() + SECONDS_MAX
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=60
    ) as manager:
        processor = manager.batch_processor
        counts = _counted(processor.cache)
        prepare, all_added = processor.prepare_next_batch, threading.Event()

        def prepare_when_told() -> bool:
            all_added.wait()  # so that no run depends on when requests arrive
            check_counts(processor)
            if before_step is not None:
                before_step(manager)
            return bool(prepare())

        processor.prepare_next_batch = prepare_when_told
        for number, prompt in enumerate(prompts):
            manager.add_request(prompt, request_id=f"r{number}", eos_token_id=-1)
        all_added.set()
        while len(results) < (num_all if num_expected is None else num_expected()):
            result = manager.get_result(timeout=1)
            assert result is not None or manager.is_running(), "the generation loop ended"
            assert result is not None or time.monotonic() < deadline, f"only {sorted(results)}"
            if result is not None and result.is_finished():
                results[result.request_id] = result
    return Served(
        {name: each.generated_tokens for name, each in sorted(results.items())},
        {name: each.error for name, each in results.items() if each.error},
        counts["hits"],
        counts["computed"],
        processor.cache,
    )


def both(kind: str, seed: int, **changed: Any) -> tuple[Served, Served]:
    """Return the results of the same prompts over transformers' cache and over kvcore's."""
    model, prompts = tiny(kind), draw_prompts(seed)
    native = serve(model, prompts, **changed)
    with kvcore_transformers.installed():
        ours = serve(model, prompts, **changed)
    assert native.errors == ours.errors == {}
    return native, ours


def check_counts(processor: Any) -> None:
    """Raise unless kvcore, if it has the cache, counts the same numbers of tokens as the engine."""
    manager: Any = getattr(processor.cache, "manager", None)
    for name, state in processor.scheduler.active_requests.items() if manager else ():
        assert manager.num_computed_tokens(name) == state.position_offset, name


def _counted(cache: Any) -> dict[str, int]:
    """Count what a cache finds and what it gives indices for."""
    counts = {"hits": 0, "computed": 0}
    search, indices = cache.search_prefix_match, cache.extend_read_and_write_indices

    def counted_search(*args: Any) -> int:
        found = search(*args)
        counts["hits"] += found
        return int(found)

    def counted_indices(request_id: str, past: int, query: int, *rest: Any) -> None:
        counts["computed"] += query
        indices(request_id, past, query, *rest)

    cache.search_prefix_match, cache.extend_read_and_write_indices = counted_search, counted_indices
    return counts


def generated(model: Any, prompts: list[list[int]], new: int = 6) -> dict[str, list[int]]:
    """Return the answers of `generate()`, one prompt at a time, by names as `serve` gives them."""
    answers = {}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers[f"r{number}"] = output[0, len(prompt) :].tolist()
    return answers


@cache
def reference(kind: str, seed: int) -> dict[str, list[int]]:
    """Return the answers of `generate()` to drawn prompts."""
    return generated(tiny(kind), draw_prompts(seed))
