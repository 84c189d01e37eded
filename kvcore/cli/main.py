# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore`: finds its subcommands among the installed distributions.

A subcommand is an entry point of the group `kvcore.commands`: a function that takes the arguments
after its name and returns an exit code. This file only knows which distribution provides which
subcommand, for the message about a missing one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import kvcore
from kvcore.cli.arguments import COMPLETING, CommandParser, parse
from kvcore.cli.pipes import ends_cleanly, holding_interrupts

GROUP = "kvcore.commands"
ELSEWHERE = {"generate": "kvcore-runtime"}
"""Subcommand -> the distribution that provides it."""
DOES = {
    "check": "explore every state of a small world, or of a manager of your own",
    "explain": "explain why tokens of a workload were computed again",
    "generate": "answer prompts with a small model over kvcore, and check each answer",
    "replay": "replay a recorded workload in virtual time",
    "route": "replay a workload on replicas behind a router",
    "sanitize": "hunt for wrong reads in an engine's scheduler",
    "shrink": "reduce a failing record to a small one",
    "simulate": "run random engines at real sizes from a seed",
    "size": "compute how many requests of which length fit into memory",
    "trace": "generate and show workloads",
    "view": "write a page that shows the pool at any step of a record",
}
"""What each subcommand does, for the help text, which does not load them."""
HINTS = """`kvcore COMMAND --help` describes a command. To complete commands and options in a shell:
pip install "kvcore[completion]", then eval "$(register-python-argcomplete kvcore)"."""

USAGE_ERROR = 2

Command = Callable[[list[str]], int]


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; 2 if the call was wrong.

    arguments: those after the program's name, `sys.argv[1:]` by default.
    """
    commands = {point.name: point for point in metadata.entry_points(group=GROUP)}
    names = sorted(commands)
    parser = _make_parser(names)
    name = _completed_command(names)
    if name is None:
        options = parse(parser, arguments)
        arguments, name = options.arguments, options.command
    if name is None:
        parser.print_help()
        return 0
    if name not in commands:
        print(f"kvcore: {_missing(name, names)}", file=sys.stderr)
        return USAGE_ERROR
    with holding_interrupts():
        command: Command = commands[name].load()
    return command(list(arguments or ()))


def _completed_command(names: list[str]) -> str | None:
    """Return the subcommand whose arguments a shell completes, and count words from there."""
    if COMPLETING not in os.environ:
        return None
    num_before = int(os.environ[COMPLETING])
    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split(" ")
    if len(words) < num_before + 2 or words[num_before] not in names:
        return None
    os.environ[COMPLETING] = str(num_before + 1)
    return words[num_before]


def _make_parser(names: list[str]) -> argparse.ArgumentParser:
    lines = [f"  {name:<10}{DOES.get(name, '')}".rstrip() for name in names]
    parser = CommandParser(
        prog="kvcore",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Block manager for the key-value cache of LLM engines.",
        epilog="\n".join(["commands:", *lines, "", HINTS]),
    )
    parser.add_argument("--version", action="version", version=f"kvcore {kvcore.__version__}")
    known = "one of those below" if names else "none is installed"
    command: Any = parser.add_argument("command", nargs="?", metavar="COMMAND", help=known)
    command.completer = lambda **_: names
    rest: Any = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments"
    )
    rest.completer = lambda **_: []  # a command is never a file
    return parser


def _missing(name: str, names: list[str]) -> str:
    if name in ELSEWHERE:
        return f"the command {name!r} is part of {ELSEWHERE[name]}, which is not installed"
    return f"there is no command {name!r}; installed are: {', '.join(names) or 'none'}"
