# SPDX-License-Identifier: Apache-2.0
"""The command line of `kvcore generate`, read and checked into a job before anything is done."""

import argparse
import os
from pathlib import Path
from typing import Any

import attrs
import torch

from kvcore import Config
from kvcore_runtime import prompts as prompts_file
from kvcore_runtime.engine import EngineOptions
from kvcore_runtime.errors import KvcoreRuntimeError
from kvcore_runtime.prompts import Prompt, read_prompts
from kvcore_runtime.sampling import Sampling

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
    "require_all": True,
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
    "require_all": False,
}
"""Otherwise. The pool is one that examples/prompts.jsonl brings under pressure. Threads that wait
for each other lose far more on a busy machine than they win on an idle one: half of it is left."""


@attrs.frozen(kw_only=True)
class Job:
    """A checked call: everything but the model."""

    prompts: list[Prompt]
    config: Config
    options: EngineOptions
    model: str
    device: torch.device
    threads: int
    verify: bool
    require_all: bool
    picture: Path | None
    as_json: bool


class WrongCall(KvcoreRuntimeError):
    """A command line that cannot be carried out."""


def read_job(argv: list[str]) -> Job:
    """Parse and check a command line and its prompts; argparse exits with 2 by itself.

    Raises KvcoreError or KvcoreRuntimeError.
    """
    given = _make_parser().parse_args(argv)
    if given.tiny and given.model not in (None, "tiny"):
        raise WrongCall(f"--tiny with --model {given.model}: --tiny stands for the tiny model")
    preset = TINY if given.tiny else DEFAULTS
    for name, value in preset.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.prompts is None:
        raise WrongCall("--prompts FILE is needed (or --tiny, which brings its own)")
    defaults = Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed,
        max_tokens=given.max_tokens,
    )
    if given.picture is not None:
        _check_picture(given.picture)
    if given.threads < 1:
        raise WrongCall(f"--threads {given.threads}: expected 1 or more")
    device = _read_device(given.device)
    return Job(
        prompts=read_prompts(given.prompts, defaults),
        config=Config(given.num_blocks, given.block_size, num_host_blocks=given.host_blocks),
        options=EngineOptions(
            backend=given.backend,
            token_budget=given.token_budget,
            preemption=given.preempt,
            guard=given.guard,
            keep_logits=given.verify and given.model == "tiny",
        ),
        model=given.model,
        device=device,
        threads=given.threads,
        verify=given.verify,
        require_all=given.require_all,
        picture=given.picture,
        as_json=given.json,
    )


def _check_picture(path: Path) -> None:
    if path.is_dir():
        raise WrongCall(f"--picture {path}: that is a directory")
    if path.suffix.lower() != ".png":
        raise WrongCall(f"--picture {path}: expected a name that ends in .png")
    if not path.absolute().parent.is_dir():
        raise WrongCall(f"--picture {path}: there is no such directory")


def _read_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WrongCall(f"--device {name}: torch knows no such device") from None
    if device.type not in ("cpu", "cuda"):
        raise WrongCall(f"--device {name}: expected cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WrongCall(f"--device {name}: torch finds no CUDA device here")
    return device


def _make_parser() -> argparse.ArgumentParser:
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
    pool.add_argument("--backend", choices=("rust", "python"), help="default: rust where built")
    pool.add_argument("--guard", action="store_true", help="check every read of a block")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help=_default("token_budget", "tokens a step at most"),
    )
    engine.add_argument(
        "--preempt",
        choices=("swap", "recompute"),
        default="swap",
        help="how the youngest gives way; swap (default) recomputes where the host tier is full",
    )
    _add_sampling(parser)
    _add_results(parser)
    return parser


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
        "default: on with --tiny only",
    )
    results.add_argument("--picture", type=Path, metavar="FILE", help="PNG of the pool over time")
    results.add_argument("--json", action="store_true", help="answers and figures as JSON")


def _default(name: str, meaning: str) -> str:
    """The help of an option whose default depends on --tiny."""
    return f"{meaning}; default: {DEFAULTS[name]}; with --tiny: {TINY[name]}"
