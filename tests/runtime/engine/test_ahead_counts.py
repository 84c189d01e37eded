# SPDX-License-Identifier: Apache-2.0
"""What overlap costs an engine: counted, since times depend on the machine (`make bench`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import tiny_config, tiny_model
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config
from kvcore.transitions import QUERIES, TRANSITIONS
from tests.conftest import Backend

NUM_REQUESTS, NUM_STEPS = 8, 12


def counting(calls: Counter[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, which also counts its calls."""

    def counted(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return method(*args, **options)

    return counted


def run(backend: Backend, max_in_flight: int) -> tuple[Engine, Counter[str]]:
    """Answer requests that all decode together, and count the calls of the manager."""
    model = tiny_model(config=tiny_config(), dtype=torch.float64)
    options = EngineOptions(backend=backend, token_budget=1024)
    config = Config(20 * NUM_REQUESTS, max_in_flight=max_in_flight)
    engine, calls = Engine(model, config, options), Counter[str]()
    for name in (*TRANSITIONS, *QUERIES):
        engine.manager.__dict__[name] = counting(calls, name, getattr(engine.manager, name))
    for number in range(NUM_REQUESTS):
        engine.add_request(
            GenerationRequest(
                request_id=str(number),
                prompt=(number, 1, 2),
                sampling=Sampling(max_tokens=NUM_STEPS),
            )
        )
    engine.run()
    return engine, calls


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_overlap_adds_a_completion_per_step_and_the_last_tokens_of_each_request(
    backend: Backend, max_in_flight: int
) -> None:
    in_order, expected = run(backend, 0)
    ahead, calls = run(backend, max_in_flight)
    assert in_order.metrics.num_steps == ahead.metrics.num_steps == NUM_STEPS
    assert ahead.metrics.num_overlapped == NUM_STEPS - 1, "all steps but the first"
    expected["complete"] += NUM_STEPS
    expected["add_tokens"] += max_in_flight * NUM_REQUESTS
    assert calls == expected
