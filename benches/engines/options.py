# SPDX-License-Identifier: Apache-2.0
"""The command-line options of `python -m benches.engines`; needs no engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import attrs

ENGINES = ("compat", "vllm", "vllm-shadow", "vllm-sanitizer", "nano-vllm", "transformers")
SIZES = (64, 256, 1024)
LOADS = ("decode", "mix")
MODES = ("sync", "async")


def read_number(text: str) -> int:
    """Read an option's number, at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def read_numbers(text: str) -> list[int]:
    """Read an option's numbers, separated by commas. Raises ArgumentTypeError."""
    return [read_number(each) for each in text.split(",")]


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
    """Read the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benches.engines",
        description="Measure CPU time of an engine's steps over kvcore and over its own manager.",
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="%(default)s")
    sizes = ",".join(map(str, SIZES))
    parser.add_argument("--running", default=sizes, type=read_numbers, help="%(default)s")
    parser.add_argument("--loads", default=",".join(LOADS), help="%(default)s")
    parser.add_argument("--modes", default=",".join(MODES), help="%(default)s")
    parser.add_argument(
        "--rounds", type=read_number, default=12, help="rounds per side; the sides take turns"
    )
    parser.add_argument("--steps", type=read_number, default=16, help="steps per round")
    parser.add_argument("--by-call", action="store_true", help="also measure the time of each call")
    given = parser.parse_args(arguments)
    for name, known in (("engines", ENGINES), ("loads", LOADS), ("modes", MODES)):
        unknown = set(vars(given)[name].split(",")) - set(known)
        if unknown:
            parser.error(f"no {name} are called {', '.join(sorted(unknown))}")
    return Options(
        engines=given.engines.split(","),
        sizes=given.running,
        loads=given.loads.split(","),
        modes=given.modes.split(","),
        rounds=given.rounds,
        steps=given.steps,
        by_call=given.by_call,
    )
