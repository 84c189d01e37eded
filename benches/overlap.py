# SPDX-License-Identifier: Apache-2.0
"""Measure the gain in tokens per second of planning a step while the previous one is computed.

The same requests, the same model and pool; engines with no, one and two batches in flight take
turns in one process, and the figure is the median over rounds of (time without / time with): above
1.0 overlapping wins. Engines are made once, and each round uses new prompts, so that there are no
hits. Each step has the same requests in all engines. "At best" is the gain of one batch in flight
if only batches and forward passes took time. Random weights, greedy. Goals for one batch in flight:
0.95 at hidden 512, 1.2 with the tiny model from 8 requests on. With overlap the passes have a core
of their own, so torch has `--threads` there, and `--threads-without` if nothing overlaps. The
two processes keep to a core each, the last two that are allowed, and the engine without overlap
runs on either; `--floating` leaves all to the system, as `--threads 2` needs. On a CUDA device
(`--device cuda`) the last model has 8 layers of the shape of Llama 3 8B's; bfloat16.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from kvcore_runtime.engine.batch_executor import runs_in_fork
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.sequence import GenerationRequest
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model

from benches.engine import make_requests
from kvcore import Config

IN_FLIGHT = (0, 1, 2)
SHAPES: dict[str, dict[str, Any]] = {
    "hidden 64": {"hidden_size": 64, "intermediate_size": 128},
    "hidden 512": {"hidden_size": 512, "intermediate_size": 1024},
}
LLAMA_8B: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}


@attrs.define
class Side:
    """The runs of one number of batches in flight: seconds, steps, and how long it waited.

    computed: of the seconds, those of batches and forward passes; of engines without overlap.
    """

    seconds: list[float] = attrs.field(factory=list)
    waited: list[float] = attrs.field(factory=list)
    computed: list[float] = attrs.field(factory=list)
    num_steps: int = 0
    num_overlapped: int = 0


def make_model(shape: dict[str, Any], device: str) -> Llama:
    """Make the tiny model with another shape."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = attrs.evolve(tiny_config(), **shape)
    return tiny_model(config=config, device=device, dtype=dtype)


def time_passes(engine: Engine, computed: list[float]) -> None:
    """Add the time of an engine's batches and forward passes to a number."""

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                computed[0] += time.perf_counter() - started

        return timed_call

    forward = engine.forward
    engine.runtime.apply = timed(engine.runtime.apply)  # type: ignore[method-assign] # measured
    forward.begin = timed(forward.begin)  # type: ignore[method-assign] # measured
    forward.compute = timed(forward.compute)  # type: ignore[method-assign] # measured


def measure(
    model: Llama,
    requests: list[GenerationRequest],
    rounds: int,
    options: EngineOptions,
    threads: tuple[int, int],
    pair: list[int],
) -> dict[int, Side]:
    """Let the engines answer in turn, this many times. threads: torch's, without and with overlap.

    pair: the cores of the caller and of the process, if they keep to them.
    """
    sides = {number: Side() for number in IN_FLIGHT}
    engines, computed = {}, [0.0]
    for number in IN_FLIGHT:
        config = Config(40 * len(requests), max_in_flight=number)
        engines[number] = Engine(model, config, options)
    time_passes(engines[0], computed)
    for turn in range(rounds + 1):
        requested = [vary(each, turn) for each in requests]
        answers = set()
        for number in IN_FLIGHT if turn % 2 else IN_FLIGHT[::-1]:
            engine, side = engines[number], sides[number]
            torch.set_num_threads(threads[number > 0])
            if pair:
                os.sched_setaffinity(0, pair[:1] if number else pair)
            computed[0] = 0.0
            engine.metrics.__init__()  # type: ignore[misc] # reset the counts
            started = time.perf_counter()
            for request in requested:
                engine.add_request(request)
            done = engine.run()
            seconds = time.perf_counter() - started
            answers.add(tuple(sorted((each.request_id, each.tokens) for each in done)))
            side.num_steps = engine.metrics.num_steps
            side.num_overlapped = engine.metrics.num_overlapped
            if turn:  # the first turn only warms up
                side.seconds.append(seconds)
                side.waited.append(engine.metrics.wait_seconds)
                side.computed.append(computed[0])
        assert len(answers) == 1, f"{len(answers)} different answers"
    return sides


def vary(request: GenerationRequest, turn: int) -> GenerationRequest:
    """Return a request for one turn, whose blocks no other turn shares."""
    prompt = (turn % 256, turn // 256, *request.prompt[2:])
    return attrs.evolve(request, request_id=f"{request.request_id} {turn}", prompt=prompt)


def main() -> None:
    """Print a line for each model, number of requests and number of batches in flight."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements per line")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens per answer")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch with overlap")
    parser.add_argument(
        "--threads-without", type=int, default=1, help="threads of torch without overlap"
    )
    parser.add_argument("--backend", choices=("rust", "python"), help="the manager's backend")
    parser.add_argument("--floating", action="store_true", help="let the system choose the cores")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--only", help="measure only this model, as named at the start of its line")
    parser.add_argument(
        "--requests", type=int, nargs="*", default=[2, 8, 32], help="numbers of requests at a time"
    )
    given = parser.parse_args()
    threads = (given.threads_without, given.threads)
    is_kept = runs_in_fork(torch.device(given.device)) and not given.floating
    pair = sorted(os.sched_getaffinity(0))[-2:] if is_kept else []
    shapes = SHAPES if given.device == "cpu" else {**SHAPES, "8 layers of Llama 3 8B": LLAMA_8B}
    for name, shape in shapes.items():
        if given.only not in (None, name):
            continue
        model = make_model(shape, given.device)
        for num_requests in given.requests:
            requests = [
                attrs.evolve(each, prompt=tuple(token % 256 for token in each.prompt))
                for each in make_requests(num_requests, 32, given.max_tokens)
            ]
            options = EngineOptions(
                backend=given.backend, token_budget=1024, executor_core=pair[-1] if pair else None
            )
            sides = measure(model, requests, given.rounds, options, threads, pair)
            for number, side in sides.items():
                print(_line(name, num_requests, given.max_tokens, number, side, sides[0]))


def _line(
    name: str, num_requests: int, max_tokens: int, number: int, side: Side, without: Side
) -> str:
    ratio = statistics.median(a / b for a, b in zip(without.seconds, side.seconds, strict=True))
    seconds = statistics.median(side.seconds)
    parts = zip(without.seconds, without.computed, strict=True)
    best = statistics.median(whole / part for whole, part in parts)
    return (
        f"{name}, {num_requests} requests, {number} in flight: "
        f"{num_requests * max_tokens / seconds:.0f} tokens/s, {ratio:.2f} of without "
        f"({best:.2f} at best); {1e3 * seconds / side.num_steps:.2f} ms per step, "
        f"{side.num_overlapped} of {side.num_steps} overlapped, "
        f"{statistics.median(side.waited) / seconds:.0%} waiting"
    )


if __name__ == "__main__":
    main()
