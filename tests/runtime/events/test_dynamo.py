# SPDX-License-Identifier: Apache-2.0
"""Dynamo 1.6.1's own indexer, over HTTP, answers as the managers whose events it reads.

Dynamo hashes the tokens itself, so that the question holds no hash of ours; with a salt it asks for
its namespace.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcore.event_index import Message
from kvcore.sanitizer.hunter.adapter import peer_python
from tests.event_index.fleet import SIZE, Engine

pytest.importorskip("zmq", reason="pyzmq is not installed")
publishers = pytest.importorskip("kvcore_runtime.events.publisher", reason="needs the runtime")

PYTHON = peer_python("dynamo")
pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="Dynamo is not installed: `make engines-dynamo`"
    ),
]
WAIT_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@attrs.frozen
class Indexer:
    """The service, at its port."""

    port: int

    def call(self, path: str, body: object = None) -> dict[str, dict[str, dict[str, int]]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read() or b"{}")  # type: ignore[no-any-return] # JSON

    def register(self, sender: Any) -> None:
        body = {"instance_id": 1, "endpoint": sender.endpoint, "model_name": "m"}
        body |= {"replay_endpoint": sender.replay_endpoint, "block_size": SIZE}
        self.call("/register", body)

    def blocks(self, tokens: list[int], salt: str | None) -> int:
        """Count the blocks of a prompt that the engine has."""
        body = {"token_ids": tokens, "model_name": "m"} | ({"cache_salt": salt} if salt else {})
        scores = self.call("/query", body).get("scores", {})
        return scores.get("1", {}).get("0", 0) // SIZE


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    port = free_port()
    command = [str(PYTHON), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with (tmp_path / "log").open("wb") as log:
        service = subprocess.Popen(command, stdout=log, stderr=log)
    indexer = Indexer(port)
    try:
        wait(lambda: is_up(indexer))
        yield indexer
    finally:
        service.kill()
        service.wait()


def is_up(indexer: Indexer) -> bool:
    try:
        indexer.call("/workers")
    except OSError:
        return False
    return True


def wait(enough: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not enough():
        assert time.monotonic() < end
        time.sleep(0.05)


def run(engine: Engine, sender: Any, steps: int) -> None:
    for _ in range(steps):
        engine.step()
        sender.publish(engine.manager)


def is_received(indexer: Indexer, engine: Engine, sender: Any) -> bool:
    """Tell whether Dynamo's socket is connected, so that it has heard of the batch sent last."""
    run(engine, sender, 1)
    time.sleep(0.05)
    tokens = engine.prompt()
    return 0 < engine.ask(tokens, None)[1] == indexer.blocks(tokens, None)


def ask(indexer: Indexer, engine: Engine, questions: int) -> int:
    """Check that every answer is the manager's, at the latest when its last batch has arrived.

    Returns for how many questions that was above 0.
    """
    found = 0
    for number in range(questions):
        salt = (None, "tenant")[number % 2]
        tokens = engine.prompt()
        expected = engine.ask(tokens, salt)[1]
        wait(lambda: indexer.blocks(tokens, salt) == expected)  # noqa: B023 - called at once
        found += expected > 0
    return found


def test_late_and_running_subscribers_know_what_the_manager_has(indexer: Indexer) -> None:
    with publishers.EventPublisher("tcp://*:0", "tcp://127.0.0.1:0") as sender:
        engine = Engine(1, "rust")
        run(engine, sender, 20)
        indexer.register(sender)
        wait(lambda: is_received(indexer, engine, sender))
        found = ask(indexer, engine, 20)
        for _ in range(8):
            run(engine, sender, 5)
            found += ask(indexer, engine, 5)
        assert found > 10


def test_lost_batches_are_asked_for(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(2, "rust")
    with publishers.EventPublisher("tcp://*:0", "tcp://127.0.0.1:0") as sender:
        indexer.register(sender)
        wait(lambda: is_received(indexer, engine, sender))
        send = sender._send

        def lossy(messages: list[Message]) -> None:
            send([each for each in messages if each.number % 10 > 2])

        monkeypatch.setattr(sender, "_send", lossy)
        found = 0
        for _ in range(8):
            run(engine, sender, 8)
            time.sleep(0.1)
            monkeypatch.setattr(sender, "_send", send)
            run(engine, sender, 1)
            found += ask(indexer, engine, 5)
            monkeypatch.setattr(sender, "_send", lossy)
        assert found > 10


def test_a_restarted_publisher_leaves_nothing_of_the_dead_one(indexer: Indexer) -> None:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    bound = endpoints[0].replace("127.0.0.1", "*")
    with publishers.EventPublisher(bound, endpoints[1]) as sender:
        indexer.register(attrs.make_class("S", ["endpoint", "replay_endpoint"])(*endpoints))
        engine = Engine(3, "rust")
        wait(lambda: is_received(indexer, engine, sender))
        run(engine, sender, 20)
        assert ask(indexer, engine, 20) > 5
    with publishers.EventPublisher(bound, endpoints[1]) as sender:
        engine = Engine(4, "rust")
        wait(lambda: is_received(indexer, engine, sender))
        run(engine, sender, 10)
        assert ask(indexer, engine, 20) > 5
