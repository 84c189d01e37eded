# SPDX-License-Identifier: Apache-2.0
"""Shrinking of a failing run: moves are left out and simplified while the same property fails.

First whole requests are removed, then stretches of moves, each half as long as the ones before,
then each move is tried in simpler forms, then the configuration; this repeats until nothing more
can be removed. Any subset of moves is a run, since a move that makes no sense does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvcore.check.delta import (
    shorter,
    simpler_config,
    with_simpler_items,
    without_requests,
    without_stretches,
)
from kvcore.check.simulate.play import Move
from kvcore.check.simulate.runs import Failure, MakeDevices, Managers, again
from kvcore.types.config import Config

Moves = tuple[Move, ...]
Fails = Callable[[Config, Sequence[Move]], bool]


def shrink(
    failure: Failure, *, devices: MakeDevices = (), backend: Managers, num_seconds: float = 60.0
) -> Failure | None:
    """Return the smallest run found in this many seconds that breaks the same property; None if the
    moves alone do not break it.
    """
    deadline = time.monotonic() + num_seconds

    def fails(config: Config, moves: Sequence[Move]) -> bool:
        if time.monotonic() > deadline:
            return False
        _, found = again(config, moves, backend=backend, devices=devices)
        return found is not None and found.name == failure.name

    config, moves = failure.config, failure.moves
    _, found = again(config, moves, backend=backend, devices=devices)
    if found is None or found.name != failure.name:
        return None
    size = None
    while size != (len(moves), str(moves), config):
        size = (len(moves), str(moves), config)
        still = partial(fails, config)
        added = [move.args[0] for move in moves if move.verb in ("add", "fork")]
        moves = without_requests(moves, list(dict.fromkeys(added)), _names, still)
        moves = without_stretches(moves, still)
        moves = with_simpler_items(moves, _simpler, still)
        config = simpler_config(config, partial(_fails_with, moves, fails))
    _, found = again(config, moves, backend=backend, devices=devices)
    return found


def _simpler(move: Move) -> Iterator[Move]:
    """Yield simpler forms of a move."""
    verb, args = move.verb, move.args
    match verb, args:
        case "add", (name, tokens, kind, goal):
            for fewer in shorter(list(tokens)):
                yield Move(verb, (name, fewer, kind, goal))
            if kind != "plain":
                yield Move(verb, (name, tokens, "plain", goal))
        case "allocate", (name, most, hits, options, advised):
            if options:
                yield Move(verb, (name, most, hits, {}, advised))
            if advised:
                yield Move(verb, (name, most, hits, options, False))
            for count in (1, most // 2):
                if 0 < count < most:
                    yield Move(verb, (name, count, hits, options, advised))
        case "append", (names, tokens):
            for at in range(len(names) if len(names) > 1 else 0):
                fewer = [*names[:at], *names[at + 1 :]]
                yield Move(verb, (fewer, [*tokens[:at], *tokens[at + 1 :]]))
        case "swap_out" | "swap_in", (names,):
            for at in range(len(names) if len(names) > 1 else 0):
                yield Move(verb, ([*names[:at], *names[at + 1 :]],))
        case "guess" | "extend", (name, tokens):
            for fewer in shorter(list(tokens)):
                yield Move(verb, (name, fewer))


def _fails_with(moves: Moves, fails: Fails, config: Config) -> bool:
    return fails(config, moves)


def _names(move: Move) -> set[str]:
    """Return the requests that a move names."""
    found: set[str] = set()
    for each in move.args[:2]:
        if isinstance(each, str):
            found.add(each)
        elif isinstance(each, list):
            found.update(one for one in each if isinstance(one, str))
    return found - {"plain"}
