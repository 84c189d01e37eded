# SPDX-License-Identifier: Apache-2.0
"""The requests of the engine's tests, the expected answers, and the final state of the engine."""

from collections.abc import Sequence
from functools import cache

import attrs
import torch
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.sequence import Completion, GenerationRequest
from kvcore_runtime.model.contiguous import Generation, generate_reference
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model
from kvcore_runtime.model.sampling import Sampling, derive_seed

SYSTEM = b"You are the parrot of this ship and say everything twice. Be brief. "
QUESTIONS = (
    b"Where are we?",
    b"Sing!",
    b"What is for lunch today, and who has caught it, and when?",
    b"Who is the captain of the ship, and since which year?",
    b"Do you like rain?",
    b"Where is the gold?",
    b"When do we sail home, and by which way, and with how many men?",
)
SLIDING = Visibility(kind="sliding_window", window=21)
MODELS = {"full": (FULL, FULL), "windowed": (FULL, SLIDING)}
"""What the layers of the models of most tests see: two layers in one group, or two groups."""
DEEP_MODELS = MODELS | {"windowed": (FULL, SLIDING, FULL, SLIDING)}
"""The same with two groups of two layers, for tests of what leaves the cache page by page."""


@cache
def model_of(visibilities: tuple[Visibility, ...]) -> Llama:
    """Return the tiny model with such layers; all tests share it, so `references` are made once."""
    return tiny_model(config=tiny_config(visibilities=visibilities), invariant=True)


def requests(temperature: float = 0.9) -> list[GenerationRequest]:
    """Return seven prompts with one beginning; the second one asks for three samples."""
    return [
        GenerationRequest(
            request_id=f"r{number}",
            prompt=tuple(SYSTEM + question),
            sampling=Sampling(temperature=temperature, seed=number, max_tokens=7 + 2 * number),
            num_samples=3 if number == 1 else 1,
        )
        for number, question in enumerate(QUESTIONS)
    ]


def answer(engine: Engine, requested: Sequence[GenerationRequest]) -> dict[str, Completion]:
    """Return the engine's answers by request and sample."""
    for request in requested:
        engine.add_request(request)
    return {f"{each.request_id}#{each.sample}": each for each in engine.run()}


@cache
def references(model: Llama, temperature: float = 0.9) -> dict[str, Generation]:
    """Return the answers to `requests`, each from a contiguous cache with its full history."""
    samples = [
        (each, sample) for each in requests(temperature) for sample in range(each.num_samples)
    ]
    generations = generate_reference(
        model,
        [each.prompt for each, _ in samples],
        [
            attrs.evolve(each.sampling, seed=derive_seed(each.sampling.seed, sample))
            for each, sample in samples
        ],
        keep_logits=True,
    )
    names = [f"{each.request_id}#{sample}" for each, sample in samples]
    return dict(zip(names, generations, strict=True))


def assert_same_answers(
    completions: dict[str, Completion],
    expected: dict[str, Generation],
    requested: Sequence[GenerationRequest] | None = None,
) -> None:
    """Assert equal tokens, reasons and logits, bit by bit. requested: the requests; all if None."""
    if requested is not None:
        names = {each.request_id for each in requested}
        expected = {key: each for key, each in expected.items() if key.split("#")[0] in names}
    assert completions.keys() == expected.keys()
    for name, reference in expected.items():
        assert completions[name].tokens == reference.tokens, name
        assert completions[name].reason is reference.reason, name
        logits = completions[name].logits
        assert logits is not None
        assert reference.logits is not None
        assert torch.equal(logits, reference.logits), name


def assert_drained(engine: Engine) -> None:
    """Assert that nothing is in flight and no block is held."""
    config = engine.manager.config
    engine.manager.check()
    assert engine.is_idle
    assert engine.scheduler.unfinished() == []
    assert engine.manager.num_free_blocks == config.num_usable_blocks
    assert engine.manager.num_free_host_blocks == config.num_host_blocks
