# SPDX-License-Identifier: Apache-2.0
"""Shrinks a world to the shortest one with the same finding.

First moves are taken away (delta debugging, Zeller and Hildebrandt 2002), then prompts, answers,
samples, options and sizes are made smaller, as long as time is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from kvcore.sanitizer.hunter.world import Arrive, Axes, HuntWorld, Move

SECONDS = 10.0

Same = Callable[[HuntWorld], bool]
"""Whether a world still has the finding."""


def shrink(world: HuntWorld, same: Same, axes: Axes, seconds: float = SECONDS) -> HuntWorld:
    """Return the smallest world found in time with the same finding, which `world` must have."""
    ends = time.monotonic() + seconds

    def still(candidate: HuntWorld) -> bool:
        return time.monotonic() < ends and same(candidate)

    before = None
    while world != before:
        before = world
        world = _fewer_moves(world, still)
        for smaller in (_smaller_worlds, _smaller_requests):
            world = _descended(world, still, partial(smaller, axes=axes))
    return world


def signature(world: HuntWorld, axes: Axes) -> tuple[str, ...]:
    """Return the features that a shrunk run keeps: kinds of moves, and options that differ from the
    default.

    Two runs with the same finding and different signatures may be two bugs.
    """
    kinds = {move if isinstance(move, str) else type(move).__name__.lower() for move in world.moves}
    requests = [move for move in world.moves if isinstance(move, Arrive)]
    kinds |= {"samples"} if any(move.samples > 1 for move in requests) else set()
    kinds |= {"priority"} if len({move.priority for move in requests}) > 1 else set()
    kinds |= {"tenants"} if len({move.tenant for move in requests}) > 1 else set()
    options = {
        f"{name}={value}"
        for name, value in world.axes.items()
        if value != axes[name][0] and name != "block_size"
    }
    return (*sorted(kinds - {"arrive", "step"}), *sorted(options))


def _fewer_moves(world: HuntWorld, still: Same) -> HuntWorld:
    """Remove all parts of the moves that are not needed; parts are halved down to single moves."""
    moves = list(world.moves)
    size = max(1, len(moves) // 2)
    while True:
        start = 0
        while start < len(moves):
            rest = moves[:start] + moves[start + size :]
            if rest and still(attrs.evolve(world, moves=tuple(rest))):
                moves = rest
            else:
                start += size
        if size == 1:
            return attrs.evolve(world, moves=tuple(moves))
        size //= 2


def _descended(
    world: HuntWorld, still: Same, smaller: Callable[[HuntWorld], Iterator[HuntWorld]]
) -> HuntWorld:
    """Go from each world to the first smaller one with the finding, until there is none."""
    going = True
    while going:
        going = False
        for candidate in smaller(world):
            if candidate != world and still(candidate):
                world, going = candidate, True
                break
    return world


def _smaller_worlds(world: HuntWorld, axes: Axes) -> Iterator[HuntWorld]:
    for name, values in axes.items():
        if world.axes[name] != values[0] and name != "block_size":
            yield attrs.evolve(world, axes={**world.axes, name: values[0]})
    for fewer in (world.num_blocks // 2, world.num_blocks - 1):
        if fewer >= 2:
            yield attrs.evolve(world, num_blocks=fewer)
    if world.max_rows > 2:
        yield attrs.evolve(world, max_rows=2)


def _smaller_requests(world: HuntWorld, axes: Axes) -> Iterator[HuntWorld]:
    del axes
    for place, move in enumerate(world.moves):
        if not isinstance(move, Arrive):
            continue
        for change in _smaller_request(move):
            yield attrs.evolve(world, moves=_with(world.moves, place, change))


def _smaller_request(move: Arrive) -> Iterator[Arrive]:
    changes: list[dict[str, Any]] = [
        {"prompt": move.prompt[: len(move.prompt) // 2]},
        {"prompt": move.prompt[:-1]},
        {"new": 1},
        {"new": move.new - 1},
        {"samples": 1},
        {"priority": 0},
        {"tenant": 0},
    ]
    for change in changes:
        if change.get("prompt", (0,)) and change.get("new", 1) >= 1:
            yield attrs.evolve(move, **change)


def _with(moves: Sequence[Move], place: int, move: Move) -> tuple[Move, ...]:
    return (*moves[:place], move, *moves[place + 1 :])
