# SPDX-License-Identifier: Apache-2.0
"""Pages in a real server of Redis: full, stopped, killed, and behind a proxy that corrupts them."""

import signal
import sys
import time
from collections.abc import Iterator
from io import BufferedReader, BytesIO

import pytest
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.errors import PackageMissing
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.redis_store import RedisStore, read_answer
from kvcore_runtime.far.threaded import ThreadedTier

from kvcore import Config
from kvcore.far.breaker import NUM_FAILURES_MAX
from kvcore.far.errors import InvalidTier
from kvcore.far.options import FarOptions
from kvcore.far.tier import FarStatus
from tests.runtime.far.servers import Proxy, Redis, find_redis, redis
from tests.runtime.far.test_far_directory import SIZE, empty, name, page, wait
from tests.runtime.model import questions
from tests.runtime.model.questions import DEEP_MODELS, model_of, references

library = pytest.importorskip("redis", reason="the package redis is not installed")
pytestmark = pytest.mark.skipif(find_redis() is None, reason="there is no redis-server")
TIMEOUT_S = 0.5
NUM_PAGES = (len(questions.requests()[0].prompt) - 1) // 16
made: list[RedisStore] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close the stores of a test at its end."""
    yield
    while made:
        made.pop().close()


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    with redis() as started:
        yield started


def make_store(port: int, *, timeout_s: float = TIMEOUT_S, required: bool = True) -> RedisStore:
    store = RedisStore(f"redis://127.0.0.1:{port}/0", timeout_s=timeout_s, required=required)
    made.append(store)
    return store


def test_a_page_is_kept_found_had_and_removed(server: Redis) -> None:
    store, got = make_store(server.port), [empty(), empty()]
    assert store.put([name(1), name(2)], [page(1), page(2)]) == [FarStatus.OK] * 2
    assert store.put([name(1)], [page(2)]) == [FarStatus.OK]
    assert store.find([name(1), name(3)], 1.0) == [True, False]
    assert list(store.get([name(1), name(3)], got)) == [SIZE, FarStatus.MISSING]
    assert got[0] == page(1), "nothing is overwritten"
    store.remove([name(1), name(2)])
    assert store.find([name(1), name(2)], 1.0) == [False, False]


@pytest.mark.parametrize(("page_bytes", "answers"), [(1 << 20, [8, 1]), (9 << 20, [1, 1, 1])])
def test_few_bytes_of_pages_are_asked_for_at_once(
    server: Redis, monkeypatch: pytest.MonkeyPatch, page_bytes: int, answers: list[int]
) -> None:
    store, count = make_store(server.port), sum(answers)
    names = [name(page_bytes + each) for each in range(count)]
    pages = [memoryview(bytes([each]) * page_bytes) for each in range(count)]
    del pages[-1]  # the last one is missing
    store.put(names[:-1], pages)
    requested: list[int] = []
    pool = store._client.connection_pool
    connection = pool.get_connection()
    pool.release(connection)  # it lends it again
    send = connection.send_packed_command

    def spy(commands: list[bytes], **options: bool) -> None:
        if commands[0].startswith(b"*") and b"MGET" in commands[0]:
            requested.append(commands[0].count(b"kvcore2/"))
        send(commands, **options)

    monkeypatch.setattr(connection, "send_packed_command", spy)
    slots = [memoryview(bytearray(page_bytes)) for _ in names]
    assert list(store.get(names, slots)) == [page_bytes] * (count - 1) + [FarStatus.MISSING]
    assert requested == answers
    assert slots[:-1] == pages
    store.remove(names)


@pytest.mark.parametrize(
    ("page_bytes", "count"), [(1, 9), (3000, 600), (128 << 10, 9), (5 << 20, 9)]
)
def test_pages_of_all_sizes_come_back(server: Redis, page_bytes: int, count: int) -> None:
    store = make_store(server.port)
    names = [name(each) for each in range(100, 100 + count)]
    pages = [memoryview(bytes([each % 256]) * page_bytes) for each in range(count)]
    slots = [memoryview(bytearray(page_bytes)) for _ in names]
    assert store.put(names, pages) == [FarStatus.OK] * count
    assert list(store.get(names, slots)) == [page_bytes] * count
    assert slots == pages
    store.remove(names)


def test_a_value_that_is_too_long_is_not_read_and_the_others_are(server: Redis) -> None:
    store, slots = make_store(server.port), [empty() for _ in range(4)]
    large = 64 << 20
    with library.Redis(port=server.port) as client:
        for each in (1, 3):
            client.set(name(each), bytes(large))
        store.put([name(2)], [page(2)])
        before = client.info("stats")["total_net_output_bytes"]
        names = [name(each) for each in (1, 2, 3, 4)]
        assert list(store.get(names, slots)) == [large, SIZE, large, FarStatus.MISSING]
        assert client.info("stats")["total_net_output_bytes"] - before < large // 2
    assert slots == [empty(), page(2), empty(), empty()]
    store.remove(names)


@pytest.mark.parametrize(
    "answer", [b"", b"$3\r\npa", b"$4\r\npage", b":4\r\n", b"$-2\r\n", b"-ERR no\r\n"]
)
def test_what_is_no_whole_answer_of_bytes_is_an_error(answer: bytes) -> None:
    with pytest.raises(ConnectionError, match="another kind, or the connection was closed"):
        read_answer(BufferedReader(BytesIO(answer)), bytearray(4))


def test_what_is_no_value_is_missing_and_no_other(server: Redis) -> None:
    store, got = make_store(server.port), [empty(), empty()]
    with library.Redis(port=server.port) as client:
        client.rpush(name(1), "a list")
    store.put([name(2)], [page(2)])
    assert list(store.get([name(1), name(2)], got)) == [FarStatus.MISSING, SIZE]
    assert got[1] == page(2)
    store.remove([name(1), name(2)])


def test_what_is_not_this_page_is_damaged_and_goes(server: Redis) -> None:
    store = make_store(server.port)
    tier = ThreadedTier(store)
    other = memoryview(bytearray(page(1)) + b"\0")
    for spoilt in (page(2), page(1)[:-1], other, memoryview(b"")):
        store.put([name(1)], [spoilt])
        assert wait(tier, tier.submit_load([name(1)], [empty()])) == (FarStatus.DAMAGED,)
        assert store.find([name(1)], 1.0) == [False]
    tier.close(10)


def test_a_full_server_says_so() -> None:
    with redis("--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server:
        store = make_store(server.port)
        large = memoryview(bytearray(1 << 19))
        statuses = store.put([name(each) for each in range(12)], [large] * 12)
        assert set(statuses) == {FarStatus.OK, FarStatus.FULL}


def test_a_server_that_cannot_be_had_is_said_or_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    with redis() as server:
        port = server.port
    with pytest.raises(TierUnusable, match=f"127.0.0.1:{port}: Redis does not answer: Conn"):
        RedisStore(f"redis://:secret@127.0.0.1:{port}/0", timeout_s=TIMEOUT_S)
    make_store(port, required=False)
    with pytest.raises(InvalidTier, match=r"url is '\(not shown\)', expected redis://") as refused:
        RedisStore("redis://:half/secret@127.0.0.1:7/0")
    assert "half" not in str(refused.value)
    assert refused.value.__suppress_context__
    with pytest.raises(InvalidTier, match="timeout_s is 0, expected more than 0 seconds"):
        RedisStore(timeout_s=0)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(PackageMissing, match=r"package 'redis': pip install 'kvcore-runtime\[re"):
        make_store(port)


def test_an_error_of_the_server_has_its_name() -> None:
    with redis() as server:
        with library.Redis(port=server.port) as client:
            client.config_set("requirepass", "secret")
        # Version 2 of the protocol has no hand-shake that would be refused first.
        store = RedisStore(f"{server.url}?protocol=2", required=False)
        made.append(store)
        for call in (
            lambda: store.find([name(1)], 1.0),
            lambda: list(store.get([name(1)], [empty()])),
            lambda: store.remove([name(1)]),
        ):
            with pytest.raises(library.AuthenticationError):
                call()


def test_a_connection_that_timed_out_gives_no_answer_of_the_question_before() -> None:
    with redis() as server:
        store = make_store(server.port)
        store.put([name(1), name(2)], [page(1), page(2)])
        server.send(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            list(store.get([name(1)], [empty()]))
        server.send(signal.SIGCONT)
        got = empty()
        assert list(store.get([name(2)], [got])) == [SIZE]
        assert got == page(2)


def make_engine(port: int, timeout_s: float = TIMEOUT_S) -> Engine:
    """Make an engine over a server. timeout_s: of the client; above TIMEOUT_S it never ends a find,
    so each find of a stopped server is late.
    """
    config = Config(300, hash_seed=b"seed")
    options = FarOptions(
        min_fetch_tokens=16, weights="tiny", fetch_timeout_s=TIMEOUT_S, store_timeout_s=1.0
    )
    tier = ThreadedTier(make_store(port, timeout_s=timeout_s, required=False))
    return Engine(
        model_of(DEEP_MODELS["full"]),
        config,
        exchange=lambda engine: FarExchange(engine, tier, options),
    )


def ask(engine: Engine) -> None:
    """Ask the first prompt again, with an empty device; assert that its answer is right."""
    engine.manager.reset_prefix_cache()
    request = questions.requests()[0]
    engine.add_request(request)
    (done,) = engine.run()
    assert done.tokens == references(engine.model)["r0#0"].tokens
    assert isinstance(engine.exchange, FarExchange)
    engine.exchange.check()


def far(engine: Engine) -> FarExchange:
    assert isinstance(engine.exchange, FarExchange)
    return engine.exchange


def test_pages_come_back_and_a_stopped_or_killed_server_changes_no_answer() -> None:
    with redis() as server:
        engine = make_engine(server.port, timeout_s=30.0)
        ask(engine)
        assert far(engine).flush(30)
        ask(engine)
        assert far(engine).counts.num_hits > 0
        assert far(engine).flush(30)
        server.send(signal.SIGSTOP)
        for number in range(1, NUM_FAILURES_MAX + 1):
            assert far(engine).is_up
            ask(engine)
            assert far(engine).counts.pages["find", "timeout"] == number * NUM_PAGES
        assert not far(engine).is_up
        started = time.monotonic()
        server.send(signal.SIGCONT)
        while not far(engine).is_up and time.monotonic() < started + 30:
            far(engine).flush(0.1)
            time.sleep(0.05)
        hits = far(engine).counts.num_hits
        ask(engine)
        assert far(engine).counts.num_hits > hits
        server.kill()
        ask(engine)
        server.start()
        while not far(engine).is_up and time.monotonic() < started + 60:
            far(engine).flush(0.1)
            time.sleep(0.05)
        ask(engine)
        far(engine).close()


def test_the_log_says_what_took_a_tier_down(caplog: pytest.LogCaptureFixture) -> None:
    with redis() as server:
        engine = make_engine(server.port)
        ask(engine)
        assert far(engine).flush(30)
        server.kill()
        for _ in range(NUM_FAILURES_MAX):
            ask(engine)
    assert not far(engine).is_up
    said = "the far tier is down: each find failed or was too late, the last one with Connect"
    assert said in caplog.text
    far(engine).close()


def test_a_proxy_that_harms_pages_changes_no_answer(server: Redis) -> None:
    proxy = Proxy(server.port, seed=1, share=0.2)
    engine = make_engine(proxy.port)
    for _ in range(12):
        ask(engine)
    assert proxy.num_faults > 0
    far(engine).close()
    proxy.close()
