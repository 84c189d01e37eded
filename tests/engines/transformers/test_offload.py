# SPDX-License-Identifier: Apache-2.0
"""Requests that give way: they go to the host tier and back, or start over."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest

from tests.engines.transformers.environment import ABSENT

pytest.importorskip("transformers", reason=ABSENT)

import kvcore_transformers
from kvcore_transformers import Statistics

from tests.engines.transformers.models import (
    LAYERS,
    PAGE,
    Served,
    draw_prompts,
    generated,
    serve,
    tiny,
)
from tests.engines.transformers.streams import act_streams

pytestmark = pytest.mark.transformers
PROMPTS = [[number * 7 + place for place in range(10)] for number in range(6)]
NEW = 40
PRESSED: dict[str, Any] = {"num_blocks": 16, "new": NEW, "max_requests_per_batch": 6}
BYTES_PER_BLOCK = 4096
GIB = 1024**3


def serve_pressed(
    kind: str, host_blocks: int, *rest: Any, **changed: Any
) -> tuple[Served, Statistics]:
    """Serve requests that outgrow the pool together, with a host tier of this many blocks."""
    space = host_blocks * BYTES_PER_BLOCK / GIB
    with kvcore_transformers.installed() as statistics:
        served = serve(
            tiny(kind), PROMPTS, *rest, **(PRESSED | {"cpu_offload_space": space} | changed)
        )
    assert served.cache.bytes_per_sector == BYTES_PER_BLOCK
    assert served.cache.manager.config.num_host_blocks == host_blocks
    return served, statistics


@cache
def expected(kind: str = "full") -> dict[str, list[int]]:
    """Return the answers of `generate()`."""
    return generated(tiny(kind), PROMPTS, new=NEW)


def num_held(served: Served) -> int:
    """Count the blocks of both tiers that are still used."""
    manager = served.cache.manager
    return served.num_leaked() + int(manager.config.num_host_blocks - manager.num_free_host_blocks)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_requests_go_to_the_host_and_come_back_with_the_same_tokens(
    kind: str, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_streams(monkeypatch)
    served, statistics = serve_pressed(kind, 60, use_async_batching=is_async)
    assert served.errors == {}
    assert served.tokens == expected(kind)
    assert statistics.offloaded > 0
    assert statistics.restored > 0
    assert num_held(served) == 0


def test_a_refused_request_gives_back_what_its_window_left_behind() -> None:
    model = tiny("hybrid", window=2 * PAGE + 1)  # leaves a block when it asks for the next two
    with kvcore_transformers.installed():
        served = serve(model, PROMPTS, **PRESSED)
    assert served.errors == {}
    assert served.tokens == generated(model, PROMPTS, new=NEW)
    assert num_held(served) == 0


@pytest.mark.parametrize("host_blocks", [0, 2])
def test_requests_for_which_the_host_has_no_room_begin_anew(host_blocks: int) -> None:
    served, statistics = serve_pressed("full", host_blocks)
    kept, _ = serve_pressed("full", 60)
    assert served.tokens == kept.tokens == expected()
    assert statistics.offloaded <= host_blocks * 10
    assert served.computed > kept.computed
    assert num_held(served) == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_cancelled_request_gives_its_host_blocks_back(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_streams(monkeypatch)
    cancelled: set[str] = set()

    def cancel(manager: Any) -> None:
        scheduler = manager.batch_processor.scheduler
        for name, state in scheduler.waiting_requests.items():
            if state.is_cpu_offloaded and not cancelled:
                cancelled.add(name)
                manager.cancel_request(name)

    served, _ = serve_pressed("full", 60, cancel, lambda: 5, use_async_batching=is_async)
    assert len(cancelled) == 1
    assert served.tokens == {
        name: tokens for name, tokens in expected().items() if name not in cancelled
    }
    assert num_held(served) == 0


def test_if_the_loop_ends_the_host_blocks_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    forward, is_due = model.forward, [False]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if is_due[0]:
            raise ArithmeticError("a step broke off")
        return forward(*args, **kwargs)

    def note(manager: Any) -> None:
        waiting = manager.batch_processor.scheduler.waiting_requests.values()
        is_due[0] = any(state.is_cpu_offloaded for state in waiting)

    monkeypatch.setattr(model, "forward", failing)
    with kvcore_transformers.installed():
        space = 60 * BYTES_PER_BLOCK / GIB
        served = serve(model, PROMPTS, note, **PRESSED, cpu_offload_space=space)
    assert set(served.errors.values()) == {"a step broke off"}
    assert num_held(served) == 0


def test_space_for_less_than_a_block_is_said_and_nothing_goes_to_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("ContinuousBatchingLogger")
    with kvcore_transformers.installed() as statistics:
        logger.addHandler(caplog.handler)
        try:
            served = serve(tiny(), PROMPTS, **PRESSED, cpu_offload_space=1e-9)
        finally:
            logger.removeHandler(caplog.handler)
    assert "cpu_offload_space_gib=1e-09 is less than one block of 4096 bytes" in caplog.text
    assert served.tokens == expected()
    assert statistics.offloaded == 0


@pytest.mark.parametrize(
    ("kind", "num_blocks", "is_async"),
    [
        ("full", 14, True),  # found its prefix in the step in which it gives way
        ("hybrid", 20, False),
        ("sliding", 16, True),  # a window gave back the block that its last token needs
    ],
)
def test_a_request_that_cannot_go_on_from_where_it_gave_way_begins_anew(
    kind: str, num_blocks: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    act_streams(monkeypatch)
    model, prompts = tiny(kind), draw_prompts(0)
    with kvcore_transformers.installed() as statistics:
        served = serve(
            model,
            prompts,
            num_blocks=num_blocks,
            new=12,
            max_requests_per_batch=8,
            safety_margin=0.0,
            cpu_offload_space=60 * BYTES_PER_BLOCK / GIB,
            use_async_batching=is_async,
        )
    assert served.errors == {}
    assert served.tokens == generated(model, prompts, new=12)
    assert statistics.hits > 0
    assert num_held(served) == 0
