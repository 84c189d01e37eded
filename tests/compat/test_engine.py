# SPDX-License-Identifier: Apache-2.0
"""An engine of vLLM's kind over `kvcore.compat`: random loads, and every answer is right.

The worker keeps its own tables, so a block that moved, or a key that stayed on what was never
written, gives a wrong answer.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore import Config, Group
from kvcore.compat import KVCacheManager
from tests.compat.ahead import AheadEngine
from tests.compat.engine import Engine
from tests.compat.worker import EngineRequest, answer
from tests.conftest import Backend

NUM_STEPS_MAX = 400
NUM_REQUESTS = 12
GOALS = {
    *("hit", "preemption", "preemption in mid-step", "acceptance", "rejection"),
    *("failed load", "whole load", "abort"),
}
AHEAD = GOALS - {"acceptance", "rejection"} | {"ahead"}

WORLDS: dict[str, dict[str, Any]] = {
    "full": {"groups": (Group(2),)},
    "uncached": {"groups": (Group(2),), "enable_caching": False},
    "two block sizes": {"groups": (Group(2), Group(4))},
    "window": {"groups": (Group(2), Group(2, kind="sliding_window", window=3))},
    "chunks": {"groups": (Group(2), Group(2, kind="chunked_local", window=4))},
}


def play(backend: Backend, world: str, seed: int, kind: type[Engine] = Engine) -> Engine:
    """Serve random prompts to their ends, checking tables and invariants after each step."""
    dice = random.Random(seed)
    config = Config(14 * len(WORLDS[world]["groups"]), hash_seed=b"compat", **WORLDS[world])
    engine = kind(KVCacheManager(config, backend=backend), budget=7, dice=dice)
    for number in range(NUM_REQUESTS):
        prompt = [0, 1, 2, 3, 4, 0, 1, 2][: dice.randrange(9)]
        prompt += [dice.randrange(2) for _ in range(dice.randint(1, 4))]
        engine.waiting.append(EngineRequest(f"r{number}", prompt, max_tokens=dice.randint(1, 8)))
    for _ in range(NUM_STEPS_MAX):
        held = engine.waiting + engine.loading + engine.running
        if not held:
            return engine
        if dice.randrange(20) == 0:
            engine.abort(dice.choice(held))
        engine.step()
        engine.manager.core.check()
        for request in engine.running:
            reported = engine.worker.tables[request.request_id]
            for mine, theirs in zip(
                engine.manager.get_block_ids(request.request_id), reported, strict=True
            ):
                assert len(mine) == len(theirs)
                assert all(block in (0, other) for block, other in zip(mine, theirs, strict=True))
    raise AssertionError(f"seed {seed} is not served after {NUM_STEPS_MAX} steps")


NUM_SEEDS = {"python": 8, "rust": 25}


@pytest.mark.parametrize("kind", [Engine, AheadEngine])
@pytest.mark.parametrize("world", WORLDS)
def test_every_answer_of_an_engine_is_right(
    backend: Backend, world: str, kind: type[Engine]
) -> None:
    happened: set[str] = set()
    for seed in range(NUM_SEEDS[backend]):
        engine = play(backend, world, seed, kind)
        happened |= engine.happened
        for request in engine.done:
            assert request.output == answer(request.prompt, request.max_tokens), seed
        assert engine.manager.usage == 0.0
        assert len(engine.manager.core.state().requests) == 0
    goals = GOALS if kind is Engine else AHEAD
    assert goals - ({"hit"} if world == "uncached" else set()) <= happened
