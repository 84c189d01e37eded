# SPDX-License-Identifier: Apache-2.0
"""Many transfers through a proxy that corrupts data, to a server that stops or dies meanwhile."""

import random
import signal
import time
from collections.abc import Callable
from threading import Timer

import pytest
from kvcore_runtime.demos.models import load_model, load_tokenizer
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.errors import ModelNotFound
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.redis_store import RedisStore
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.model.sampling import Sampling

from kvcore import Config
from kvcore.far.options import FarOptions
from tests.runtime.far.servers import Proxy, Redis, find_redis, redis
from tests.runtime.far.test_far_redis import ask, far, make_engine

pytest.importorskip("redis", reason="the package redis is not installed")
pytestmark = pytest.mark.skipif(find_redis() is None, reason="there is no redis-server")
TEXTS = (
    "The library opens at nine and closes at six, except on Sundays, when it stays closed all day.",
    "A tide table says when the water is high, and whoever walks on the sands should have read it.",
    "Bread needs flour, water, salt and time; most people who bake it first lack the time.",
)


@pytest.mark.parametrize(
    ("count", "period"), [(100, 10), pytest.param(10_000, 25, marks=pytest.mark.slow)]
)
def test_no_fault_changes_an_answer_of_the_tiny_model(count: int, period: int) -> None:
    transfer(make_engine, ask, count, period, share=0.05)


@pytest.mark.slow
def test_no_fault_changes_an_answer_of_smollm2() -> None:
    try:
        model, tokenizer = load_model(tiny=False), load_tokenizer(tiny=False)
    except ModelNotFound as missing:
        pytest.skip(str(missing))
    config, options = Config(64, 16, hash_seed=b"seed"), EngineOptions(token_budget=256)
    far_options = FarOptions(min_fetch_tokens=16, fetch_timeout_s=2.0, store_timeout_s=2.0)
    prompts = [tuple(tokenizer.encode(text * 4)) for text in TEXTS]
    alone = Engine(model, config, options)
    expected = [answer(alone, prompt) for prompt in prompts]
    asked = 0

    def make(port: int) -> Engine:
        store = RedisStore(f"redis://127.0.0.1:{port}/0", timeout_s=2.0, required=False)
        tier = ThreadedTier(store)
        return Engine(
            model, config, options, exchange=lambda each: FarExchange(each, tier, far_options)
        )

    def ask_next(engine: Engine) -> None:
        nonlocal asked
        number, asked = asked % len(prompts), asked + 1
        assert answer(engine, prompts[number]) == expected[number]
        far(engine).check()

    transfer(make, ask_next, 1000, 10, share=0.002)


def answer(engine: Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that follow a prompt, with nothing on the device before."""
    engine.manager.reset_prefix_cache()
    sampling = Sampling(temperature=0.0, max_tokens=4)
    engine.add_request(GenerationRequest(request_id="r", prompt=prompt, sampling=sampling))
    (done,) = engine.run()
    return done.tokens


def transfer(
    make: Callable[[int], Engine],
    ask_once: Callable[[Engine], None],
    count: int,
    period: int,
    share: float,
) -> None:
    """Ask until a number of pages were loaded or stored, or failed to be.

    period: of this many questions, one meets a stop of the server, and one its death, at a moment
    while it is asked. share: of the pieces of data that the proxy harms.
    """
    draw, seconds, number = random.Random(count), 0.0, 0
    with redis() as server:
        proxy = Proxy(server.port, seed=count, share=share)
        engine = make(proxy.port)
        while num_transfers(engine) < count:
            number += 1
            strike = strikes(server).get(number % period)
            timer = Timer(draw.uniform(0.0, seconds), strike or nothing)
            started = time.monotonic()
            timer.start()
            ask_once(engine)
            timer.join()
            if strike is None:
                seconds = time.monotonic() - started
            elif strike == server.kill:
                server.start()
            else:
                server.send(signal.SIGCONT)
            if not far(engine).is_up:
                far(engine).flush(0.1)
                time.sleep(0.2)
        assert number > period
        assert far(engine).counts.num_loaded > count // 10
        assert proxy.num_faults > 0
        far(engine).close()
        proxy.close()


def nothing() -> None:
    """Do nothing."""


def num_transfers(engine: Engine) -> int:
    """Return the number of pages that were loaded or stored, or failed to be."""
    pages = far(engine).counts.pages
    return sum(num for (operation, _), num in pages.items() if operation != "find")


def strikes(server: Redis) -> dict[int, Callable[[], None]]:
    """Return what happens to the server at some questions of each period."""
    return {3: lambda: server.send(signal.SIGSTOP), 7: server.kill}
