# SPDX-License-Identifier: Apache-2.0
"""The options of `kvcore generate`: their names, defaults and help."""

import argparse
import os
from pathlib import Path
from typing import Any

from kvcore_runtime.generate import prompts as prompts_file

TINY_PROMPTS = Path(__file__).with_name("tiny_prompts.jsonl")
TINY: dict[str, Any] = {
    "prompts": TINY_PROMPTS,
    "model": "tiny",
    "blocks": 40,
    "host_blocks": 12,
    "token_budget": 96,
    "max_tokens": 24,
    "temperature": 1.0,
    "threads": 1,
}
"""The defaults with --tiny."""
DEFAULTS: dict[str, Any] = {
    "prompts": None,
    "model": "smollm2",
    "blocks": 64,
    "host_blocks": 40,
    "token_budget": 256,
    "max_tokens": 40,
    "temperature": 0.0,
    "threads": max(1, (os.cpu_count() or 1) // 2),
}
"""The defaults without --tiny. The pool is small enough that examples/prompts.jsonl fills it. On a
busy machine, threads that wait for each other cost far more than they gain on an idle one, so half
the cores are used."""

NEUTRAL = frozenset(
    (
        *("backend", "device", "guard", "json", "model", "picture", "require_all", "threads"),
        *("tiny", "verify"),
    )
)
"""Options that do not affect which blocks are taken, copied and given back, and when."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser; options that --tiny changes are None if not given."""
    parser = argparse.ArgumentParser(
        prog="kvcore generate",
        description="Answer prompts with a model whose cache lies in blocks that kvcore manages.",
        epilog=prompts_file.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="random model, own prompts, seconds")
    models = ("smollm2", "tiny")
    parser.add_argument("--model", choices=models, help="default: smollm2; with --tiny: tiny")
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda", help="default: cpu")
    threads = "threads used by torch; default: half the cores; with --tiny: 1"
    parser.add_argument("--threads", type=int, metavar="N", help=threads)
    window = "tiny model: two layers see W tokens, beside two of full attention"
    parser.add_argument("--window", type=int, metavar="W", help=window)
    states = "tiny model: two layers keep a recurrent state, beside two of full attention"
    parser.add_argument("--states", action="store_true", help=states)
    _add_pool(parser.add_argument_group("pool"))
    _add_engine(parser.add_argument_group("engine"))
    _add_sampling(parser.add_argument_group("sampling, if a prompt does not say"))
    _add_results(parser.add_argument_group("results"))
    return parser


def _add_pool(group: argparse._ArgumentGroup) -> None:
    _number(group, "--blocks", "device blocks, with block 0")
    _number(group, "--block-size", "tokens per block", 16)
    inside = "let hits end at multiples of N tokens, inside blocks too; default: at ends of blocks"
    group.add_argument("--hash-block-size", type=int, metavar="N", help=inside)
    _number(group, "--host-blocks", "blocks to swap to")
    directory = "keep blocks in files there, and load those of earlier runs"
    group.add_argument("--directory", type=Path, metavar="DIR", help=directory)
    group.add_argument("--backend", choices=("rust", "python"), help="default: rust if built")
    group.add_argument("--guard", action="store_true", help="check every read of a block")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    _number(group, "--token-budget", "tokens per step at most")
    _number(group, "--drafts", "tokens guessed by prompt look-up for each step", 0)
    in_flight = "batches computed in a process of their own while the next is planned"
    _number(group, "--max-in-flight", in_flight, 0)
    publish = "when a block can be hit: once it is planned (default), or once it is computed"
    _choice(group, "--publish", ("scheduled", "completed"), publish)
    preempt = "how the youngest gives way; swap (default) recomputes if the host tier is full"
    _choice(group, "--preempt", ("swap", "recompute"), preempt)


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    _number(group, "--max-tokens", "tokens per answer at most")
    _number(group, "--temperature", "0: greedy", unit="T")
    _number(group, "--top-k", "0: all", 0, unit="K")
    _number(group, "--top-p", "1: all", 1.0, unit="P")
    _number(group, "--seed", "random seed", 0, unit="S")


def _add_results(group: argparse._ArgumentGroup) -> None:
    verify = "invariant mode, and every answer again from a contiguous cache; default: on"
    switch = argparse.BooleanOptionalAction
    group.add_argument("--verify", action=switch, default=True, help=verify)
    require_all = (
        "fail unless eviction, copy-on-write, swap and both preemptions happened; default: on with "
        "--tiny, unless an option changes its prompts, its pool or its steps"
    )
    group.add_argument("--require-all", action=switch, help=require_all)
    group.add_argument("--picture", type=Path, metavar="FILE", help="PNG of the pool over time")
    group.add_argument("--json", action="store_true", help="answers and figures as JSON")


def _number(
    group: argparse._ArgumentGroup,
    name: str,
    meaning: str,
    default: float | None = None,
    *,
    unit: str = "N",
) -> None:
    """Add an option for a number; options without a default are those that --tiny changes."""
    key = name.removeprefix("--").replace("-", "_")
    said = f"{DEFAULTS[key]}; with --tiny: {TINY[key]}" if default is None else f"{default}"
    kind = type(DEFAULTS[key] if default is None else default)
    group.add_argument(
        name, type=kind, metavar=unit, default=default, help=f"{meaning}; default: {said}"
    )


def _choice(
    group: argparse._ArgumentGroup, name: str, choices: tuple[str, ...], meaning: str
) -> None:
    """Add an option for one of some words, the first by default."""
    group.add_argument(name, choices=choices, default=choices[0], help=meaning)
