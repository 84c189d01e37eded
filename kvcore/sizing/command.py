# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore size`: computes what a given memory holds of a model's cache.

The result goes to standard output, errors to standard error. Exit code 0: a request of full length
fits; 1: it does not; 2: bad arguments or a bad file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

import attrs

from kvcore.cli.arguments import CommandParser, count, parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.sizing.errors import MissingField, WeightsDoNotFit
from kvcore.sizing.models import Model, read_model
from kvcore.sizing.report import SizeReport, size_model, to_json, to_text
from kvcore.sizing.specs import Limits
from kvcore.sizing.units import parse_memory, read_dtype
from kvcore.sizing.weights import COUNTED, Budget, make_budget
from kvcore.types.errors import KvcoreError

FITS, TOO_SMALL, USAGE_ERROR = 0, 1, 2
DEFAULT_BATCHED_TOKENS = 8192
DEFAULT_UTILIZATION = Decimal("0.9")


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code.

    arguments: those after `kvcore size`; by default, those of the process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _make_parser()
    options = parse(parser, _join_negative(given))
    if options.gpu is None and (options.weights or options.utilization):
        parser.error("--weights and --utilization belong to --gpu")
    try:
        report = _size(options)
    except KvcoreError as error:
        print(f"kvcore size: {error}", file=sys.stderr)
        return TOO_SMALL if isinstance(error, WeightsDoNotFit) else USAGE_ERROR
    print(json.dumps(to_json(report), indent=2) if options.json else to_text(report))
    return FITS if report.fits else TOO_SMALL


def _size(options: argparse.Namespace) -> SizeReport:
    dtype = None if options.dtype == "auto" else read_dtype(options.dtype)
    model = read_model(options.config)
    budget = None if options.gpu is None else _make_budget(options, model)
    limits = Limits(
        max_model_len=options.max_model_len or _own_length(model),
        max_num_batched_tokens=options.max_num_batched_tokens,
        null_block=True,
    )
    report = size_model(
        model,
        parse_memory(options.memory) if budget is None else budget.cache_bytes,
        limits,
        block_size=options.block_size,
        dtype=dtype,
        tensor_parallel=options.tensor_parallel,
        context_parallel=options.context_parallel,
        windows=options.windows,
        checkpoint_interval=options.checkpoint_interval,
        hash_block_size=options.hash_block_size,
    )
    if budget is None:
        return report
    return attrs.evolve(report, budget=budget, notes=(*report.notes, _NOT_COUNTED))


def _join_negative(arguments: list[str]) -> list[str]:
    """Return the arguments with `--gpu -5GiB` as `--gpu=-5GiB`, since argparse takes -5GiB for an
    option.

    So a negative amount gets the message of `parse_memory`.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] in _AMOUNTS and re.match(r"-[\d.]", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _make_budget(options: argparse.Namespace, model: Model) -> Budget:
    return make_budget(
        model,
        parse_memory(options.gpu),
        options.utilization or DEFAULT_UTILIZATION,
        weights_bytes=None if options.weights is None else parse_memory(options.weights),
        tensor_parallel=options.tensor_parallel,
    )


def _fraction(text: str) -> Decimal:
    """Read a number above 0 and at most 1, for argparse."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal(0)
    if not value.is_finite() or not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text!r}")
    return value


def _own_length(model: Model) -> int:
    if model.max_position_embeddings is None:
        reason = "it is the longest length unless --max-model-len gives one"
        raise MissingField(file=model.file, field="max_position_embeddings", reason=reason)
    return model.max_position_embeddings


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvcore size",
        description="Compute how much of a model's key-value cache fits into a given memory.",
        epilog="Exit code: 0 a request of full length fits, 1 it does not, 2 bad arguments.",
    )
    parser.source = "config"
    add = parser.add_argument
    add("config", metavar="CONFIG", help="the model's Hugging Face config.json")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--memory", help=_MEMORY)
    memory.add_argument("--gpu", metavar="MEMORY", help=_GPU)
    add("--weights", metavar="MEMORY", help=_WEIGHTS)
    add("--utilization", type=_fraction, metavar="FRACTION", help=_UTILIZATION)
    add(
        "--max-model-len",
        type=count,
        metavar="TOKENS",
        help="longest request in tokens (the model's own)",
    )
    add("--block-size", type=count, default=16, metavar="TOKENS", help="tokens per block (16)")
    add(
        "--dtype",
        default="auto",
        help="number format of the cache: bfloat16, fp8, ... (that of the weights)",
    )
    add("--tp", dest="tensor_parallel", type=count, default=1, metavar="DEVICES", help=_TP)
    add("--context-parallel", type=count, default=1, metavar="RANKS", help=_CONTEXT)
    add(
        "--max-num-batched-tokens",
        type=count,
        default=DEFAULT_BATCHED_TOKENS,
        metavar="TOKENS",
        help=f"most tokens of a request in one step ({DEFAULT_BATCHED_TOKENS}); counts for windows",
    )
    add("--checkpoint-interval", type=count, metavar="TOKENS", help=_INTERVAL)
    add("--hash-block-size", type=count, metavar="TOKENS", help=_HASHES)
    add("--no-windows", dest="windows", action="store_false", help=_NO_WINDOWS)
    add("--json", action="store_true", help="write plain data instead of text")
    return parser


_AMOUNTS = ("--memory", "--gpu", "--weights")
_MEMORY = "memory of each device for the cache alone: 80GiB, 512MiB, 24GB"
_GPU = "total memory of each device; --utilization of it is used for weights and cache"
_WEIGHTS = (
    "size of the whole model's weights, spread over the devices (by default counted from CONFIG, "
    f"if its model_type is one of {COUNTED}, without experts, quantization and other parts)"
)
_UTILIZATION = f"share of --gpu for weights and cache together ({DEFAULT_UTILIZATION})"
_NOT_COUNTED = "activations and CUDA graphs, which use the same memory, are not counted"
_TP = "devices that share the attention heads (1)"
_CONTEXT = "ranks that share the tokens of full attention, --block-size of a block each (1)"
_INTERVAL = "tokens between states that are kept for other requests (a block of attention)"
_HASHES = (
    "tokens of a block hash, fewer than a block has for hits that end inside blocks (--block-size"
    " beside states, else a whole block)"
)
_NO_WINDOWS = "keep windows and chunks as full attention, in one group with the layers that have it"
