# SPDX-License-Identifier: Apache-2.0
"""`make demo-cluster`: two engines, their events, an index of both, a store of pages, and metrics.

Everything runs on this machine, on the loopback interface: Redis (or a directory), two processes
with an engine each, and Dynamo's indexer if it is installed (`make engines-dynamo`), else kvcore's
own index. The first engine computes a prompt and answers another one about the same text; then the
prompt moves to the second engine. When this ends, even by Ctrl-C, everything that it started has
ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import attrs
import torch

from kvcore import Config, KVCacheManager, Request
from kvcore.far.options import FarOptions
from kvcore.sanitizer.hunter.adapter import peer_python
from kvcore.types.commands import Batch
from kvcore_runtime.demos.models import load_model, load_tokenizer
from kvcore_runtime.demos.processes import (
    WAIT_S,
    end_as_by_ctrl_c,
    ended,
    free_port,
    make_store,
    page_store,
    python_process,
    quiet,
)
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.events.event_source import EventSource
from kvcore_runtime.events.publisher import EventPublisher
from kvcore_runtime.far.exchange import FarExchange
from kvcore_runtime.far.threaded import ThreadedTier
from kvcore_runtime.model.sampling import Sampling
from kvcore_runtime.prometheus import Exporter
from kvcore_runtime.prometheus.errors import load_client

BLOCK_SIZE = 16
CONFIG = Config(200, BLOCK_SIZE, enable_events=True, hash_seed=b"cluster")
OPTIONS = FarOptions(fetch_timeout_s=5.0)
FREE_ENDPOINT = "tcp://127.0.0.1:0"
MODEL_NAME = "demo"
STORY = (
    "The harbour reading group was founded in the winter of 1968 by three retired teachers and a"
    " lighthouse keeper, who wanted company on dark evenings and had read everything on their own"
    " shelves. At first they met in the keeper's kitchen and read only books about the sea. After"
    " two years the kitchen had become too small, and the town offered them the old customs house."
)
SHOWN = (
    *("kvcore:prefix_queries_total", "kvcore:prefix_hits_total"),
    *("kvcore:far_hits_total", "kvcore:far_pages_total", "kvcore:far_up", "kvcore:blocks"),
)


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration. Returns 0 if every answer was as it should be."""
    parser = argparse.ArgumentParser(prog="kvcore_runtime.demos.cluster", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the random model")
    parser.add_argument("--stay", action="store_true", help="go on until Ctrl-C, to look around")
    parser.add_argument("--own-index", action="store_true", help="not Dynamo's, if it is installed")
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    end_as_by_ctrl_c()
    torch.set_num_threads(1)
    try:
        if options.place is not None:
            _serve(options.place, options.folder, tiny=options.tiny)
            return 0
        return _show(tiny=options.tiny, stay=options.stay, own_index=options.own_index)
    except KvcoreRuntimeError as error:
        print(f"kvcore_runtime.demos.cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: all has ended", file=sys.stderr)
        return 130


@attrs.frozen(eq=False)
class Node:
    """An engine's process, and the addresses of its events and metrics."""

    name: str
    process: subprocess.Popen[str]
    events: str
    replay: str
    metrics: int

    def ask(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Let the node answer a prompt. Returns tokens, computed positions and seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"request_id": name, "prompt": prompt}) + "\n")
        self.process.stdin.flush()
        return _read(self.process)

    def scrape(self) -> list[str]:
        """Fetch the lines of the node's metrics that the demonstration shows."""
        with urllib.request.urlopen(self.url, timeout=WAIT_S) as answer:
            lines = answer.read().decode().splitlines()
        return [line for line in lines if line.startswith(SHOWN)]

    @property
    def url(self) -> str:
        """The address that Prometheus would scrape."""
        return f"http://127.0.0.1:{self.metrics}/metrics"


class Index(Protocol):
    """Number of leading blocks of a prompt that each node has, by name."""

    def find(self, prompt: list[int]) -> dict[str, int]:
        """Count the leading blocks of a prompt that each node has, 0 for none."""


def _show(*, tiny: bool, stay: bool, own_index: bool) -> int:
    tokenizer = load_tokenizer(tiny=tiny)
    story = tokenizer.encode(STORY * 2)
    prompt_tokens = [*story, *tokenizer.encode(" Question: when did it begin? Answer:")]
    again = [*story, *tokenizer.encode(" Question: where did it meet? Answer:")]
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(page_store())
        print(f"two engines load {'the tiny model' if tiny else 'SmolLM2'}", flush=True)
        nodes = [stack.enter_context(_node(name, place, tiny=tiny)) for name in ("A", "B")]
        first, second = nodes
        index = _index(stack, nodes, own_index=own_index)
        print(f"\nthe index knows of the prompt: {_shown(index.find(prompt_tokens))}")
        reply = first.ask("1", prompt_tokens)
        print(f"A computes it: {_cost(reply, prompt_tokens)}")
        num_blocks = _wait_until(lambda: index.find(prompt_tokens)["A"])
        print(f"A's events arrive: the index knows of {_shown(index.find(prompt_tokens))}")
        other = first.ask("2", again)
        print(f"another question about the same text goes to A: {_cost(other, again)}")
        moved = second.ask("3", prompt_tokens)
        print(f"A is busy, so the first one goes to B: {_cost(moved, prompt_tokens)}")
        _wait_until(lambda: index.find(prompt_tokens)["B"])
        print(f"B has it, too: the index knows of {_shown(index.find(prompt_tokens))}\n")
        for node in nodes:
            print(f"{node.name}'s metrics at {node.url}")
            print("".join(f"    {line}\n" for line in node.scrape()))
        cheap = BLOCK_SIZE + len(again) - len(story)
        checks = {
            "the index counted A's blocks": num_blocks >= len(story) // BLOCK_SIZE,
            "A computed the second question, not the text before it": other["computed"] <= cheap,
            "B computed less than a block": moved["computed"] <= BLOCK_SIZE,
            "B's tokens are A's": moved["tokens"] == reply["tokens"],
        }
        for what, holds in checks.items():
            print(f"{'yes' if holds else 'NO'}: {what}")
        if stay:
            print("\nlook around; Ctrl-C ends all", flush=True)
            while True:
                time.sleep(1)
    print("\nall that was started has ended")
    return 0 if all(checks.values()) else 1


def _cost(reply: dict[str, Any], prompt: list[int]) -> str:
    return f"{reply['computed']} of {len(prompt)} tokens computed, {reply['seconds']:.2f} s"


def _shown(found: dict[str, int]) -> str:
    return ", ".join(f"{count} blocks at {name}" for name, count in found.items())


def _wait_until(number: Callable[[], int]) -> int:
    end = time.monotonic() + WAIT_S
    while not (found := number()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def _node(name: str, place: str, *, tiny: bool) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory() as folder,
        python_process(
            "kvcore_runtime.demos.cluster",
            ["--place", place, "--folder", folder, *(["--tiny"] if tiny else [])],
        ) as process,
    ):
        node = Node(name, process, **_read(process))
        print(f"engine {name}: process {process.pid}, events at {node.events}")
        yield node


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise NodeEnded(process_id=process.pid)
    found: dict[str, Any] = json.loads(line)
    return found


class NodeEnded(KvcoreRuntimeError):
    """A process of the demonstration ended too early."""

    message = "the engine of process {process_id} has ended; its reason stands above"


def _serve(place: str, folder: str, *, tiny: bool) -> None:
    """Run a node: read one prompt per line and print its answer as one line."""
    client = load_client()
    model = load_model(tiny=tiny, invariant=True)
    tier = ThreadedTier(make_store(place))

    def observe(engine: Engine, batch: Batch) -> None:
        scheduler = engine.scheduler
        waiting = len(scheduler.waiting) + len(scheduler.swapped)
        running = len(scheduler.running)
        exporter.update(batch, num_running=running, num_waiting=waiting, far=_far(engine))
        publisher.publish(engine.manager)

    engine = Engine(
        model,
        CONFIG,
        EngineOptions(token_budget=256),
        exchange=lambda made: FarExchange(made, tier, OPTIONS),
        observe=observe,
    )
    registry = client.CollectorRegistry()
    exporter = Exporter(engine.manager, {"model_name": MODEL_NAME}, registry)
    server, _ = client.start_http_server(0, addr="127.0.0.1", registry=registry)
    with EventPublisher(f"ipc://{folder}/events", FREE_ENDPOINT) as publisher:
        places = {"events": publisher.endpoint, "replay": publisher.replay_endpoint}
        print(json.dumps(places | {"metrics": server.server_port}), flush=True)
        for line in sys.stdin:
            answer = _answer(engine, **json.loads(line))
            exporter.rest(_far(engine))
            print(json.dumps(answer), flush=True)


def _far(engine: Engine) -> FarExchange | None:
    return engine.exchange if isinstance(engine.exchange, FarExchange) else None


def _answer(engine: Engine, request_id: str, prompt: list[int]) -> dict[str, Any]:
    before, started = engine.metrics.num_computed_tokens, time.perf_counter()
    sampling = Sampling(temperature=0.0, max_tokens=8)
    request = GenerationRequest(request_id=request_id, prompt=tuple(prompt), sampling=sampling)
    engine.add_request(request)
    (completion,) = engine.run()
    seconds = time.perf_counter() - started
    engine.exchange.flush(WAIT_S)
    computed = engine.metrics.num_computed_tokens - before - len(completion.tokens) + 1
    return {"tokens": list(completion.tokens), "computed": computed, "seconds": seconds}


def _index(stack: contextlib.ExitStack, nodes: list[Node], *, own_index: bool) -> Index:
    def make_own() -> Index:
        is_there = peer_python("dynamo").exists()
        hint = "" if is_there else " (Dynamo's: make engines-dynamo installs it)"
        print(f"the index: kvcore's own{hint}")
        return OwnIndex(stack.enter_context(EventSource()), nodes)

    if not own_index and (port := _start_dynamo(stack)) is not None:
        try:
            index = DynamoIndex(port, nodes, make_own)
        except (OSError, ValueError) as error:  # an error of HTTP; no JSON
            print(f"Dynamo's indexer does not register the engines: {error}")
        else:
            print(f"the index: Dynamo's indexer at port {port}")
            return index
    return make_own()


def _start_dynamo(stack: contextlib.ExitStack) -> int | None:
    """Start Dynamo's indexer. Returns its port, or None if it is not installed or does not run."""
    python = peer_python("dynamo")
    if not python.exists():
        return None
    port = free_port()
    command = [str(python), "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    service = quiet(command)
    stack.enter_context(ended(service))
    end = time.monotonic() + WAIT_S
    while service.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError):
            _call_dynamo(port, "/workers", None)
            return port
        time.sleep(0.05)
    print(f"Dynamo's indexer in {python.parents[1]} does not start")
    return None


def _call_dynamo(port: int, path: str, body: object) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        found: dict[str, Any] = json.loads(answer.read() or b"{}")
    return found


class OwnIndex:
    """kvcore's index over its subscriptions."""

    def __init__(self, source: EventSource, nodes: list[Node]) -> None:
        self._source = source
        self._names = [node.name for node in nodes]
        self._hasher = KVCacheManager(CONFIG)
        for node in nodes:
            source.connect(node.name, node.events, node.replay)

    def find(self, prompt: list[int]) -> dict[str, int]:
        """See `Index`."""
        self._source.poll(0.1)
        self._hasher.add_request(Request("?", prompt))
        hashes = [key[:32] for key in self._hasher.get_block_keys("?")[0]]
        self._hasher.remove_request("?")
        found = self._source.index.find(hashes)
        return {name: found.get((name, 0), 0) for name in self._names}


class DynamoIndex:
    """Dynamo's indexer, which hashes tokens itself, over HTTP; once it fails, another index."""

    def __init__(self, port: int, nodes: list[Node], make_other: Callable[[], Index]) -> None:
        self._port = port
        self._make_other = make_other
        self._other: Index | None = None
        self._numbers = {node.name: number for number, node in enumerate(nodes, start=1)}
        for node in nodes:
            _call_dynamo(
                port,
                "/register",
                {
                    "instance_id": self._numbers[node.name],
                    "endpoint": node.events,
                    "replay_endpoint": node.replay,
                    "model_name": MODEL_NAME,
                    "block_size": BLOCK_SIZE,
                },
            )

    def find(self, prompt: list[int]) -> dict[str, int]:
        """See `Index`."""
        if self._other is not None:
            return self._other.find(prompt)
        body = {"token_ids": prompt, "model_name": MODEL_NAME}
        try:
            scores = _call_dynamo(self._port, "/query", body).get("scores", {})
        except (OSError, ValueError) as error:
            print(f"Dynamo's indexer does not answer: {error}")
            self._other = self._make_other()
            return self._other.find(prompt)
        return {
            name: scores.get(str(number), {}).get("0", 0) // BLOCK_SIZE
            for name, number in self._numbers.items()
        }


if __name__ == "__main__":
    sys.exit(main())
