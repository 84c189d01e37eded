# SPDX-License-Identifier: Apache-2.0
"""Two processes, one of which computes prompts: equal tokens, whichever dies and whenever."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable

import pytest
from kvcore_runtime.demos import apart as demo
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.far.handover import as_decode, read_handover

from tests.runtime.far.servers import find_redis, redis

NUM_MOMENTS = 10


@pytest.mark.slow
@pytest.mark.skipif(find_redis() is None, reason="there is no redis-server")
@pytest.mark.parametrize("victim", ["prefill", "keeper"])
def test_who_dies_costs_time_and_no_token(victim: str) -> None:
    pytest.importorskip("redis", reason="the package redis is not installed")
    with redis() as server:
        if victim == "keeper":
            check_deaths(server.url, server.kill, server.start)
        else:
            check_deaths(server.url)


def check_deaths(
    place: str, kill: Callable[[], None] | None = None, start: Callable[[], None] | None = None
) -> None:
    """Assert that tokens are right, and soon there, whenever something dies.

    kill, start: how a part of the store dies and comes back; None: the other process dies.
    """
    draw = random.Random(7)
    engine = demo.make_engine(True, place)
    for moment in range(NUM_MOMENTS):
        prompt = [draw.randrange(260) for _ in range(600)]
        alone = demo.make_request(f"alone {moment}", prompt, cache_salt="alone")
        alone_s, expected, _ = demo.timed(engine, alone)
        line = answer_of(place, prompt, f"r{moment}", kill, draw.uniform(0.0, 0.4))
        request = demo.make_request(f"r{moment}", prompt)
        if line:  # else the prompt is asked of anybody: here, of the answering engine
            request = as_decode(engine, request, read_handover(line))
        seconds, tokens, _ = demo.timed(engine, request)
        assert tokens == expected
        assert seconds < demo.OPTIONS.fetch_timeout_s + 10 * alone_s + 1.0
        if start is not None:
            start()
    assert_whole(engine)


def answer_of(
    place: str, prompt: list[int], name: str, kill: Callable[[], None] | None, after_s: float
) -> str:
    """Return the hand-over of a prompt, or nothing, while the store or its process dies."""
    with demo.other_process(True, place) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        other.stdin.write(json.dumps({"request_id": name, "prompt": prompt}) + "\n")
        other.stdin.flush()
        time.sleep(after_s)
        (kill or other.kill)()
        return other.stdout.readline()


def assert_whole(engine: Engine) -> None:
    """Assert that no block and no slot is lost."""
    manager = engine.manager
    assert manager.num_free_blocks == manager.config.num_usable_blocks
    engine.exchange.flush(20)
    engine.exchange.check()  # type: ignore[attr-defined] # a FarExchange
