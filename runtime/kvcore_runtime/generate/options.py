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
    "num_blocks": 40,
    "host_blocks": 12,
    "token_budget": 96,
    "max_tokens": 24,
    "temperature": 1.0,
    "threads": 1,
}
"""What --tiny stands for: each unless it is given too."""
DEFAULTS: dict[str, Any] = {
    "prompts": None,
    "model": "smollm2",
    "num_blocks": 64,
    "host_blocks": 40,
    "token_budget": 256,
    "max_tokens": 40,
    "temperature": 0.0,
    "threads": max(1, (os.cpu_count() or 1) // 2),
}
"""Otherwise. The pool is one that examples/prompts.jsonl brings under pressure. Threads that wait
for each other lose far more on a busy machine than they win on an idle one: half of it is left."""

NEUTRAL = frozenset(
    (
        *("backend", "device", "guard", "json", "model", "picture", "require_all", "threads"),
        *("tiny", "verify"),
    )
)
"""What changes nothing about which blocks are taken, copied and given back, and when."""


def make_parser() -> argparse.ArgumentParser:
    """The parser; what --tiny changes is None where it is not given."""
    parser = argparse.ArgumentParser(
        prog="kvcore generate",
        description="Answer prompts with a model whose cache lies in blocks that kvcore manages.",
        epilog=prompts_file.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one JSON object a line")
    parser.add_argument("--tiny", action="store_true", help="random model, own prompts, seconds")
    parser.add_argument(
        "--model", choices=("smollm2", "tiny"), help="default: smollm2; with --tiny: tiny"
    )
    parser.add_argument("--device", default="cpu", metavar="cpu|cuda", help="default: cpu")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of torch; default: half the cores; with --tiny: 1"
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="W",
        help="tiny model: four layers, of which every other one sees W tokens",
    )
    pool = parser.add_argument_group("pool")
    pool.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help=_default("num_blocks", "device blocks, with block 0"),
    )
    pool.add_argument(
        "--block-size", type=int, metavar="N", default=16, help="tokens a block; default: 16"
    )
    pool.add_argument(
        "--host-blocks", type=int, metavar="N", help=_default("host_blocks", "blocks to swap to")
    )
    pool.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="keep blocks in files there, and load those of earlier runs",
    )
    pool.add_argument("--backend", choices=("rust", "python"), help="default: rust where built")
    pool.add_argument("--guard", action="store_true", help="check every read of a block")
    _add_engine(parser)
    _add_sampling(parser)
    _add_results(parser)
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help=_default("token_budget", "tokens a step at most"),
    )
    engine.add_argument(
        "--drafts",
        type=int,
        default=0,
        metavar="N",
        help="tokens guessed by prompt look-up for each step; default: 0",
    )
    engine.add_argument(
        "--in-flight",
        type=int,
        default=0,
        metavar="N",
        help="batches computed on a thread of their own while the next is planned; default: 0",
    )
    engine.add_argument(
        "--publish",
        choices=("scheduled", "completed"),
        default="scheduled",
        help="when a block can be hit: once it is planned (default), or once it is computed",
    )
    engine.add_argument(
        "--preempt",
        choices=("swap", "recompute"),
        default="swap",
        help="how the youngest gives way; swap (default) recomputes where the host tier is full",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling, where a prompt does not say")
    sampling.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=_default("max_tokens", "tokens an answer at most"),
    )
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help=_default("temperature", "0: greedy")
    )
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all; default: 0")
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="1: all; default: 1.0"
    )
    sampling.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")


def _add_results(parser: argparse.ArgumentParser) -> None:
    results = parser.add_argument_group("results")
    results.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="invariant mode, and every answer again from a contiguous cache; default: on",
    )
    results.add_argument(
        "--require-all",
        action=argparse.BooleanOptionalAction,
        help="fail unless eviction, copy-on-write, swap and both preemptions happened; "
        "default: on with --tiny, unless an option changes its prompts, its pool or its steps",
    )
    results.add_argument("--picture", type=Path, metavar="FILE", help="PNG of the pool over time")
    results.add_argument("--json", action="store_true", help="answers and figures as JSON")


def _default(name: str, meaning: str) -> str:
    """The help of an option whose default depends on --tiny."""
    return f"{meaning}; default: {DEFAULTS[name]}; with --tiny: {TINY[name]}"
