# SPDX-License-Identifier: Apache-2.0
"""What the command line of `python -m benches.engines` asks for; needs no engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import attrs

ENGINES = ("vllm", "vllm-sanitizer", "nano-vllm", "transformers")
SIZES = (64, 256, 1024)
LOADS = ("decode", "mix")


@attrs.frozen
class Options:
    """Which engines run, and for vLLM how many requests, under which loads, how long."""

    engines: list[str]
    sizes: list[int]
    loads: list[str]
    modes: list[str]
    rounds: int
    steps: int
    by_call: bool


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.engines",
        description="CPU time of an engine's steps over kvcore and over its own manager.",
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="%(default)s")
    parser.add_argument("--running", default=",".join(map(str, SIZES)), help="%(default)s")
    parser.add_argument("--loads", default=",".join(LOADS), help="%(default)s")
    parser.add_argument("--modes", default="sync,async", help="%(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turn")
    parser.add_argument("--steps", type=int, default=64, help="of a round")
    parser.add_argument("--by-call", action="store_true", help="also the time of each call")
    given = parser.parse_args(arguments)
    unknown = set(given.engines.split(",")) - set(ENGINES)
    if unknown:
        parser.error(f"no engines are called {', '.join(sorted(unknown))}")
    return Options(
        engines=given.engines.split(","),
        sizes=[int(size) for size in given.running.split(",")],
        loads=given.loads.split(","),
        modes=given.modes.split(","),
        rounds=given.rounds,
        steps=given.steps,
        by_call=given.by_call,
    )
