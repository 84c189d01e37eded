# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore size`: what a model's cache comes to in a given memory.

The answer goes to standard output, what was wrong with the question to standard error. Exit
code 0: a request of full length fits; 1: it does not; 2: the call or the file was wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from kvcore.cli.arguments import count, parse
from kvcore.sizing.errors import MissingField
from kvcore.sizing.models import Model, read_model
from kvcore.sizing.report import SizeReport, size_model, to_json, to_text
from kvcore.sizing.specs import Limits
from kvcore.sizing.units import parse_memory, read_dtype
from kvcore.types.errors import KvcoreError

FITS, TOO_SMALL, USAGE_ERROR = 0, 1, 2
DEFAULT_BATCHED_TOKENS = 8192


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question; returns the exit code.

    arguments: those behind `kvcore size`, the process's by default.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(_make_parser(), _join_negative(given))
    try:
        report = _size(options)
    except KvcoreError as error:
        print(f"kvcore size: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(json.dumps(to_json(report), indent=2) if options.json else to_text(report))
    return FITS if report.fits else TOO_SMALL


def _size(options: argparse.Namespace) -> SizeReport:
    memory_bytes = parse_memory(options.memory)
    dtype = None if options.dtype == "auto" else read_dtype(options.dtype)
    model = read_model(options.config)
    limits = Limits(
        max_model_len=options.max_model_len or _own_length(model),
        max_num_batched_tokens=options.max_num_batched_tokens,
        null_block=True,
    )
    return size_model(
        model,
        memory_bytes,
        limits,
        block_size=options.block_size,
        dtype=dtype,
        tensor_parallel=options.tensor_parallel,
        windows=options.windows,
    )


def _join_negative(arguments: list[str]) -> list[str]:
    """The arguments with `--memory -5GiB` as `--memory=-5GiB`: argparse takes -5GiB for an option.

    So a negative amount gets the message of `parse_memory`.
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--memory" and re.match(r"-[\d.]", argument):
            joined[-1] = f"--memory={argument}"
        else:
            joined.append(argument)
    return joined


def _own_length(model: Model) -> int:
    if model.max_position_embeddings is None:
        reason = "it is the longest length unless --max-model-len says one"
        raise MissingField(file=model.file, field="max_position_embeddings", reason=reason)
    return model.max_position_embeddings


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcore size",
        description="How much of a model's key-value cache fits into a given memory.",
        epilog="Exit code: 0 a request of full length fits, 1 it does not, 2 the call was wrong.",
    )
    add = parser.add_argument
    add("config", metavar="CONFIG", help="the model's Hugging Face config.json")
    add("--memory", required=True, help="for the cache alone, on each device: 80GiB, 512MiB, 24GB")
    add("--max-model-len", type=count, metavar="TOKENS", help="longest request (the model's own)")
    add("--block-size", type=count, default=16, metavar="TOKENS", help="tokens per block (16)")
    add("--dtype", default="auto", help="of the cache: bfloat16, fp8, ... (the weights')")
    add("--tp", dest="tensor_parallel", type=count, default=1, metavar="DEVICES", help=_TP)
    add(
        "--max-num-batched-tokens",
        type=count,
        default=DEFAULT_BATCHED_TOKENS,
        metavar="TOKENS",
        help=f"most tokens of a request in one step ({DEFAULT_BATCHED_TOKENS}); counts for windows",
    )
    add("--no-windows", dest="windows", action="store_false", help=_NO_WINDOWS)
    add("--json", action="store_true", help="plain data instead of text")
    return parser


_TP = "devices that share the attention heads (1)"
_NO_WINDOWS = "keep windows and chunks as full attention, in one group with the layers that have it"
