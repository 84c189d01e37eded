# SPDX-License-Identifier: Apache-2.0
"""Events over real sockets: late subscribers, restarts, foreign questions, full queues."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvcore_runtime.events.endpoints import END, LOOPBACK, is_to_bind, with_rank
from kvcore_runtime.events.errors import EndpointUnusable, PublisherClosed
from kvcore_runtime.events.event_source import EventSource
from kvcore_runtime.events.publisher import EventPublisher

from kvcore import Config, KVCacheManager
from kvcore.codec.event_msgpack import EventMap, encode_maps, event_maps
from tests.event_index.fleet import SIZE, Engine

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
FREE = "tcp://127.0.0.1:0"
WAIT_S = 60.0


@pytest.fixture
def pair(tmp_path: object) -> Iterator[tuple[EventPublisher, EventSource]]:
    with EventPublisher(f"ipc://{tmp_path}/events", FREE) as sender, EventSource() as source:
        yield sender, source


def follow(source: EventSource, enough: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + WAIT_S
    while not enough():
        source.poll(0.02)
        assert time.monotonic() < end, "nothing more arrived"


def same(source: EventSource, engine: Engine) -> bool:
    """Tell whether the index agrees with the manager, for some prompts."""
    for salt in (None, "tenant"):
        for _ in range(3):
            hashes, expected = engine.ask(engine.prompt(), salt)
            if source.index.find(hashes).get(("a", 0), 0) != expected:
                return False
    return True


def whole(source: EventSource, sender: EventPublisher) -> bool:
    """Tell whether everything that the publisher numbered has been applied."""
    return source.index.expected("a", 0) == sender._log.next_number and not sender._queue


def test_a_late_subscriber_gets_what_was_sent_before(
    pair: tuple[EventPublisher, EventSource],
) -> None:
    sender, source = pair
    engine = Engine(1, "rust")
    for _ in range(20):
        engine.step()
        sender.publish(engine.manager)
    source.connect("a", sender.endpoint, sender.replay_endpoint)
    follow(source, lambda: whole(source, sender))
    assert same(source, engine)
    for _ in range(20):
        engine.step()
        sender.publish(engine.manager)
    follow(source, lambda: whole(source, sender))
    assert same(source, engine)


def test_a_restarted_publisher_takes_the_place_of_the_dead_one(tmp_path: object) -> None:
    endpoints = (f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    with EventSource() as source:
        source.connect("a", *endpoints)
        for seed in (2, 3):
            with EventPublisher(*endpoints) as sender:
                engine = Engine(seed, "rust")
                for _ in range(20):
                    engine.step()
                    sender.publish(engine.manager)
                count = itertools.count()

                def caught_up(
                    engine: Engine = engine,
                    sender: EventPublisher = sender,
                    count: Iterator[int] = count,
                ) -> bool:
                    if next(count) % 5 == 0:  # the socket may not be connected again yet
                        engine.step()
                        sender.publish(engine.manager)
                    return whole(source, sender)

                follow(source, caught_up)
                assert same(source, engine)


def test_a_queue_that_runs_over_names_no_block_that_is_not_there(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()

    def late(*args: Any, **options: Any) -> Any:
        assert may_go_on.wait(WAIT_S)
        return event_maps(*args, **options)

    monkeypatch.setattr("kvcore_runtime.events.publisher.event_maps", late)
    endpoint = f"ipc://{tmp_path}/events"
    with EventPublisher(endpoint, FREE, queue_max=2) as sender, EventSource() as source:
        source.connect("a", sender.endpoint, sender.replay_endpoint)
        engine = Engine(4, "rust")
        for _ in range(200):
            engine.step()
            sender.publish(engine.manager)
        may_go_on.set()
        follow(source, lambda: bool(sender.num_skipped and sender.num_lost))
        for _ in range(10):
            engine.step()
            sender.publish(engine.manager)
            time.sleep(0.03)
        follow(source, lambda: whole(source, sender))
        for _ in range(10):
            hashes, expected = engine.ask(engine.prompt(), None)
            assert source.index.find(hashes).get(("a", 0), 0) <= expected


def test_foreign_questions_are_ignored_with_a_warning(
    pair: tuple[EventPublisher, EventSource], caplog: pytest.LogCaptureFixture
) -> None:
    sender, _ = pair
    context = zmq.Context()
    try:
        with caplog.at_level(logging.WARNING, "kvcore_runtime"):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(sender.replay_endpoint)
            dealer.send_multipart((b"", b"nine bytes", b"more"))
            dealer.send_multipart((b"", bytes(8)))
            assert dealer.poll(5_000)
            assert len(dealer.recv_multipart()) == 4
            assert dealer.poll(5_000)
            assert dealer.recv_multipart() == [b"", b"", END, b""]
        assert "was ignored" in caplog.text
    finally:
        context.destroy(linger=0)


def test_a_damaged_message_is_counted_and_asked_for_again(tmp_path: object) -> None:
    context = zmq.Context()
    try:
        pub = context.socket(zmq.PUB)
        pub.bind(f"ipc://{tmp_path}/events")
        with EventSource() as source:
            source.connect("a", f"ipc://{tmp_path}/events")

            def is_read() -> bool:
                pub.send_multipart((b"", bytes(8), b"\xc1"))
                return source.num_damaged > 0

            follow(source, is_read)
            assert source.index.expected("a", 0) == 0
    finally:
        context.destroy(linger=0)


class Plain:
    """A publisher that counts from 0, as vLLM's does. blocks: of each batch, by number.

    first_kept: earlier batches are not repeated.
    """

    first_kept = 0

    def __init__(self, context: Any, path: str, *blocks: int) -> None:
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.pub.bind(f"ipc://{path}/events")
        self.router.bind(f"ipc://{path}/replay")
        self.payloads = [encode_maps([stored(each)], 0.0, 0, "map") for each in blocks]

    def answer(self) -> None:
        """Answer the requests that have come."""
        while self.router.poll(0):
            name, _, start = self.router.recv_multipart()
            first = max(self.first_kept, int.from_bytes(start, "big"))
            for number in range(first, len(self.payloads)):
                self.send(self.router, name, b"", number=number)
            self.router.send_multipart((name, b"", b"", END, b""))

    def send(self, socket: Any, *first: bytes, number: int) -> None:
        frames = (b"", number.to_bytes(8, "big"), self.payloads[number])
        socket.send_multipart((*first, *frames))

    def close(self) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)


def stored(block: int) -> EventMap:
    fields = {"parent_block_hash": None, "token_ids": [1], "block_size": 1}
    return {"type": "BlockStored", "block_hashes": [block], **fields}


def test_a_publisher_that_counts_from_0_again_takes_the_place_of_the_dead_one(
    tmp_path: object,
) -> None:
    context = zmq.Context()
    try:
        with EventSource() as source:
            source.connect("a", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
            for old, new in (((1, 2, 3), ()), ((4, 5), (1, 2, 3))):
                sender = Plain(context, str(tmp_path), *old)

                def is_whole(sender: Plain = sender, names: tuple[int, ...] = old) -> bool:
                    sender.answer()
                    sender.send(sender.pub, number=len(names) - 1)
                    return source.index.keys("a", 0) == {(0, each) for each in names}

                follow(source, is_whole)
                assert all(source.index.find([each]) == {} for each in new)
                sender.close()
    finally:
        context.destroy(linger=0)


def test_batches_that_are_lost_for_good_are_skipped_with_what_was_known_before(
    tmp_path: object,
) -> None:
    """It may have removed the blocks that were known; what comes from then on can be followed."""
    context = zmq.Context()
    try:
        sender = Plain(context, str(tmp_path), 1, 2, 3, 4, 5, 6)
        sender.payloads, later = sender.payloads[:4], sender.payloads[4:]
        sender.first_kept = 2
        with EventSource() as source:
            source.connect("a", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")

            def has(*blocks: int) -> bool:
                sender.answer()
                return source.index.keys("a", 0) == {(0, each) for each in blocks}

            follow(source, lambda: has(3, 4))
            sender.payloads += later
            sender.first_kept = 5
            source._request_missing(source._lines[0])
            follow(source, lambda: has(6))
            assert not source.index.is_partial("a", 0)
    finally:
        context.destroy(linger=0)


def test_an_answer_behind_its_end_is_no_error(tmp_path: object) -> None:
    """The source asks anew while it reads from the socket of the old request."""
    context = zmq.Context()
    try:
        sender = Plain(context, str(tmp_path), 1, 2)
        with EventSource() as source:
            source.connect("a", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
            (line,) = source._lines
            assert sender.router.poll(1000 * WAIT_S)
            name, _, _ = sender.router.recv_multipart()
            sender.router.send_multipart((name, b"", b"", END, b""))
            follow(source, lambda: not line.is_asking)
            line.request_at = 0.0
            sender.send(sender.router, name, b"", number=1)
            follow(source, lambda: line.is_asking)
            assert source.index.is_partial("a", 0)
    finally:
        context.destroy(linger=0)


def test_a_closed_publisher_takes_no_events(tmp_path: object) -> None:
    sender = EventPublisher(f"ipc://{tmp_path}/events", FREE)
    sender.close()
    sender.close()
    engine = Engine(5, "rust")
    engine.step()
    with pytest.raises(PublisherClosed):
        sender.publish(engine.manager)


def test_an_endpoint_in_use_is_said_so(pair: tuple[EventPublisher, EventSource]) -> None:
    sender, _ = pair
    with pytest.raises(EndpointUnusable, match="in use"):
        EventPublisher(FREE, sender.replay_endpoint)


@pytest.mark.parametrize("endpoint", ["5557", "tcp://host", "udp://host:1", "inproc://x"])
def test_other_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(EndpointUnusable):
        EventPublisher(endpoint, FREE)
    with EventSource() as source:
        for pair in ((endpoint, None), (LOOPBACK, endpoint)):
            with pytest.raises(EndpointUnusable):
                source.connect("a", *pair)
        assert source.poll() == 0
        assert source.index.find([1]) == {}


def test_a_source_takes_back_a_connection_whose_replays_cannot_be_asked_for() -> None:
    with EventSource() as source:
        with pytest.raises(EndpointUnusable):
            source.connect("a", LOOPBACK, "tcp://no host:1")
        assert (source._lines, source._by_socket) == ([], {})


def test_a_long_question_is_never_read(
    pair: tuple[EventPublisher, EventSource], caplog: pytest.LogCaptureFixture
) -> None:
    sender, _ = pair
    context = zmq.Context()
    try:
        for question, is_answered in ((bytes(1 << 20), False), (bytes(8), True)):
            dealer = context.socket(zmq.DEALER)
            dealer.connect(sender.replay_endpoint)
            dealer.send_multipart((b"", question))
            assert bool(dealer.poll(5_000 if is_answered else 300)) == is_answered
            dealer.close(linger=0)
        assert "was ignored" not in caplog.text  # as one would be that was read
    finally:
        context.destroy(linger=0)


def test_endpoints_follow_the_rule_of_vllm() -> None:
    assert with_rank("tcp://*:5557", 2) == "tcp://*:5559"
    assert with_rank("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert with_rank("tcp://host:0", 3) == "tcp://host:0"
    assert is_to_bind("tcp://*:5557")
    assert is_to_bind("tcp://[::1]:5557")
    assert not is_to_bind("tcp://10.0.0.1:5557")


def test_without_endpoints_only_the_loopback_interface_listens() -> None:
    with EventPublisher(rank=900) as sender:
        assert sender.endpoint == "tcp://127.0.0.1:6457"
        assert sender.replay_endpoint == "tcp://127.0.0.1:6458"


def test_a_manager_without_events_publishes_none(
    pair: tuple[EventPublisher, EventSource],
) -> None:
    sender, _ = pair
    assert sender.publish(KVCacheManager(Config(num_blocks=4, block_size=SIZE))) == 0
