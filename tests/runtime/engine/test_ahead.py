# SPDX-License-Identifier: Apache-2.0
"""Engines that run ahead of their tokens answer as engines that do one step after another.

Each run draws a small pool, requests that share beginnings, ends that cannot be foreseen (end
tokens and stop strings), aborts and cancels at random moments. What is not aborted has the same
answers, token by token. The engine's own model reads tensors; digests.py reads lists, in a tenth of
the time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import attrs
import pytest
import torch
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config
from tests.conftest import Backend
from tests.runtime.engine.digests import DigestEngine
from tests.runtime.engine.spoiled import Spoiled
from tests.runtime.model.questions import assert_drained

KINDS = {"tensors": Engine, "digests": DigestEngine}
NUM_IDS = 6
SLIDING = Visibility(kind="sliding_window", window=5)
LAYERS = ((FULL,), (FULL, SLIDING))
BLOCK_SIZE = 4
LONGEST = 20
ANSWERED = tuple[str, int]


@cache
def model(layers: tuple[Visibility, ...]) -> Llama:
    config = tiny_config(vocab_size=NUM_IDS, max_model_len=64, visibilities=layers)
    return tiny_model(config=config, dtype=torch.float64)


def decode(ids: Sequence[int]) -> str:
    return "".join("abcdef"[each] for each in ids)


def draw_requests(draw: random.Random) -> list[GenerationRequest]:
    """Draw some requests, half of which begin as the one before."""
    requested: list[GenerationRequest] = []
    for number in range(draw.randint(2, 6)):
        own = tuple(draw.randrange(NUM_IDS) for _ in range(draw.randint(1, 5)))
        begin = (
            requested[-1].prompt[: draw.randint(0, 9)] if requested and draw.random() < 0.5 else ()
        )
        sampling = Sampling(
            temperature=draw.choice([0.0, 1.0]),
            seed=number,
            max_tokens=draw.choice([1, 3, 9, 14]),
            end_ids=frozenset(draw.choice([(), (), (), (2,)])),
            stop=draw.choice([(), (), (), ("ab", "cc")]),
        )
        requested.append(
            GenerationRequest(
                request_id=f"r{number}",
                prompt=(begin + own)[: LONGEST - sampling.max_tokens],
                sampling=sampling,
                num_samples=draw.choice([1, 1, 1, 3]),
            )
        )
    return requested


def draw_config(draw: random.Random, layers: tuple[Visibility, ...]) -> Config:
    groups = make_groups(layers, BLOCK_SIZE)
    least = sum(-(-LONGEST // BLOCK_SIZE) + 1 for _ in groups)
    return Config(
        1 + least + draw.choice([0, 0, 1, 20]),
        groups=groups,
        num_host_blocks=draw.choice([0, 3, 30]),
        max_num_batched_tokens=64,
        hash_seed=b"ahead",
        duplicates=draw.choice(["keep", "merge"]),
        publish=draw.choice(["scheduled", "completed"]),
        max_in_flight=draw.choice([1, 1, 2, 3]),
    )


def run(
    engine: Engine, requested: Sequence[GenerationRequest], draw: random.Random, dropped: set[str]
) -> dict[ANSWERED, tuple[tuple[int, ...], str]]:
    """Return the answers by request and sample. dropped: requests that are aborted at some
    moment.
    """
    late, answers = list(requested), {}
    while late or not engine.is_idle:
        if late and draw.random() < 0.6:
            engine.add_request(late.pop(0))
        if dropped and draw.random() < 0.15:
            engine.abort(draw.choice(sorted(dropped)))
        if dropped and draw.random() < 0.04:
            engine.cancel()
        for each in engine.step():
            answers[each.request_id, each.sample] = (each.tokens, each.reason.value)
    return {key: value for key, value in answers.items() if key[0] not in dropped}


def play(kind: str, seed: int, backend: Backend) -> Counter[str]:
    """Draw a run, and compare. Returns how often each event happened."""
    draw = random.Random(seed)
    layers = draw.choice(LAYERS)
    requested, config = draw_requests(draw), draw_config(draw, layers)
    lookup = PromptLookup(num_matched=1, num_drafts=2)
    spoiled = Spoiled(drafter=lookup, seed=seed, share=0.3, num_tokens=NUM_IDS)
    options = EngineOptions(
        backend=backend,
        token_budget=draw.choice([3, 64, 64]),
        max_sequences=draw.choice([3, 20]),
        preemption=draw.choice(["swap", "swap", "recompute"]),
        drafter=draw.choice([None, None, None, spoiled]),
        guard=kind == "tensors" and seed % 4 == 0,
    )
    dropped = {each.request_id for each in requested if draw.random() < 0.2}
    engines = [
        KINDS[kind](model(layers), each, options, decode=decode)
        for each in (attrs.evolve(config, max_in_flight=0), config)
    ]
    expected = run(engines[0], requested, random.Random(seed), set())
    expected = {key: value for key, value in expected.items() if key[0] not in dropped}
    engine = engines[1]
    assert run(engine, requested, random.Random(seed), dropped) == expected
    assert_drained(engine)
    stats, metrics = engine.manager.take_stats(), engine.metrics
    return Counter(
        {
            "overlapped": metrics.num_overlapped,
            "swaps": engine.scheduler.preemptions.by_swap,
            "recomputes": engine.scheduler.preemptions.by_recompute,
            "waits": engine.scheduler.num_waits,
            "copies": metrics.num_copies,
            "hits": stats.hits,
            "cancelled": metrics.num_cancelled,
            "drafts": metrics.num_accepted_drafts,
            "dropped": len(dropped),
            "stopped early": sum(reason != "length" for _, reason in expected.values()),
        }
    )


def play_all(kind: str, seeds: range, backend: Backend) -> Counter[str]:
    """Play runs. Returns how often each event happened in all of them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened.update(play(kind, seed, backend))
        except BaseException as error:
            error.add_note(f"{kind}, seed {seed}")
            raise
    return happened


def test_answers_are_those_of_one_step_after_another(backend_of_engine: Backend) -> None:
    happened = play_all("tensors", range(10), backend_of_engine)
    happened += play_all("digests", range(40), backend_of_engine)
    assert len(+happened) == 10, happened


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_runs"), [("tensors", 1000), ("digests", 10_000)])
def test_many_answers_are_those_of_one_step_after_another(
    backend_of_engine: Backend, kind: str, num_runs: int
) -> None:
    happened = play_all(kind, range(num_runs), backend_of_engine)
    assert len(+happened) == 10, happened
