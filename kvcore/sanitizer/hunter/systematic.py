# SPDX-License-Identifier: Apache-2.0
"""Enumerates every short run of a small world: few blocks, two rows, and each order of few moves.

The shortest runs come first, so a finding needs no shrinking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from typing import Any

from kvcore.sanitizer.hunter.world import STEP, Abort, Arrive, Axes, HuntWorld, Move

NUM_MOVES_MAX = 7


def small_worlds(
    axes: Axes, known_moves: Collection[str], fixed: Mapping[str, Any]
) -> Iterator[HuntWorld]:
    """Yield each world of at most seven moves: arrivals of a, of a again and of b, steps,
    aborts.
    """
    size = int(fixed.get("block_size", min(axes["block_size"])))
    prompts = _prompts(size)
    kinds = ["a", "a again", "b", STEP, *(["abort"] if "abort" in known_moves else [])]
    for length in range(2, NUM_MOVES_MAX + 1):
        for options in _options(axes, fixed, size):
            for kinds_of in product(kinds, repeat=length):
                if _is_worth_running(kinds_of):
                    moves = tuple(_moves(kinds_of, prompts))
                    yield HuntWorld(options, _num_blocks(moves, size), 2 * size, 2, moves)


def _num_blocks(moves: tuple[Move, ...], size: int) -> int:
    """Return the fewest blocks with which each arrival fits alone: see `HuntWorld.max_tokens`."""
    longest = max(len(each.prompt) + each.new for each in moves if isinstance(each, Arrive))
    return -(-longest // size) + 1


def _prompts(size: int) -> dict[str, tuple[int, ...]]:
    """Return two prompts of at most two blocks and a tail, which share their first block."""
    a = (*range(1, size + 1), *[1] * (size - 1))
    return {"a": a, "a again": a, "b": (*a[:size], 2)}


def _options(axes: Axes, fixed: Mapping[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Yield the default options, then each other value of a single option."""
    default = {**{name: values[0] for name, values in axes.items()}, **fixed, "block_size": size}
    yield default
    for name, values in axes.items():
        if name != "block_size" and name not in fixed:
            yield from ({**default, name: value} for value in values[1:])


def _is_worth_running(kinds: tuple[str, ...]) -> bool:
    """Return whether moves are useful: they begin with an arrival, abort only after one, and have a
    step.
    """
    arrived = False
    for kind in kinds:
        if kind in (STEP, "abort") and not arrived:
            return False
        arrived = arrived or kind not in (STEP, "abort")
    return STEP in kinds and kinds[-1] != "a again"


def _moves(kinds: tuple[str, ...], prompts: Mapping[str, tuple[int, ...]]) -> Iterator[Move]:
    names = 0
    for kind in kinds:
        if kind in prompts:
            yield Arrive(f"r{names}", prompts[kind], 2)
            names += 1
        else:
            yield STEP if kind == STEP else Abort(f"r{names - 1}")
