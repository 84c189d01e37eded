# SPDX-License-Identifier: Apache-2.0
"""Serves random requests on one of the small engines, under the sanitizer.

The fake model's next token depends on the position alone, so that no mistake of an engine about
contents changes what it answers. A run is good if no call raises, everybody gets as many tokens as
they asked for, and no block is missing when all have left.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvcore.sanitizer import Finding, Sanitizer

STEPS_MAX = 400
"""Steps of a drain: far above what any run of this length needs."""


@attrs.define(eq=False)
class Request:
    """A request as the engines have it. computed: tokens whose keys and values are written."""

    name: str
    tokens: list[int]
    num_new: int
    adapter: str = ""
    urgency: int = 0
    computed: int = 0
    table: list[int] = attrs.field(factory=list)
    is_old: bool = False
    """Whether its chain was begun with other weights."""

    @property
    def left(self) -> int:
        """Count the tokens that are to be computed."""
        return len(self.tokens) - self.computed


class Engine(ABC):
    """The driven engine: its waiting and running requests, and the sanitizer that watches.

    OPTIONAL: moves besides arrivals, steps and aborts.
    """

    OPTIONAL: tuple[str, ...]
    num_blocks: int

    def __init__(self, watch: Sanitizer) -> None:
        self.watch = watch
        self.found: list[Finding] = []
        self.finished: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.number = 0

    def live(self) -> list[str]:
        """Return the names of running and waiting requests."""
        return [each.name for each in (*self.running, *self.waiting)]

    def arrive(self, request: Request) -> None:
        """Let a request wait."""
        self.watch.begin(request.name, request.tokens, (request.adapter,))
        self.waiting.append(request)

    def abort(self, name: str) -> None:
        """Let a request leave before its end."""
        self.leave(next(each for each in (*self.running, *self.waiting) if each.name == name))

    @abstractmethod
    def leave(self, request: Request) -> None:
        """Give back what a request holds."""

    @abstractmethod
    def step(self) -> None:
        """Make one turn of the engine's loop."""

    @abstractmethod
    def num_unused(self) -> int:
        """Count the blocks without an owner."""


def next_token(position: int) -> int:
    """Return the token that the model samples at a position."""
    return position % 2


def play(
    make: Callable[[random.Random], Any], seed: int, *, length: int = 40, on: bool = False
) -> list[Finding]:
    """Serve random requests up to the first finding; what the sanitizer found.

    on: go on to the end whatever is found, and assert that the run is good but for lost blocks. A
    run without findings must be good in any case.
    """
    dice = random.Random(seed)
    engine, requested = make(dice), dict[str, int]()
    for number in range(length):
        move(engine, dice, requested, f"r{number}")
        if engine.found and not on:
            return list(engine.found)
    for _ in range(STEPS_MAX):
        if not engine.live() or (engine.found and not on):
            break
        engine.step()
    if on or not engine.found:
        assert not engine.live(), f"{engine.live()} are stuck"
        assert {name: len(each.tokens) for name, each in engine.finished.items()} == requested
    if not engine.found:
        assert engine.num_unused() == engine.num_blocks
    return list(engine.found)


def move(engine: Engine, dice: random.Random, requested: dict[str, int], name: str) -> None:
    """Make one move. requested: final tokens of each request. name: that of an arriving one."""
    draw, live = dice.random(), engine.live()
    if draw < 0.3 and len(live) < 4:
        request = drawn(dice, name)
        requested[name] = len(request.tokens) + request.num_new
        engine.arrive(request)
    elif draw < 0.36 and live:
        gone = dice.choice(live)
        requested.pop(gone)
        engine.abort(gone)
    elif draw < 0.46 and engine.OPTIONAL:
        child = getattr(engine, dice.choice(engine.OPTIONAL))()
        if child is not None:
            requested[child.name] = len(child.tokens) + child.num_new
    else:
        engine.step()


def drawn(dice: random.Random, name: str) -> Request:
    """Draw a request whose prompt often begins like another's."""
    stem = dice.choice(((0, 1, 0, 1, 0, 1), (0, 0, 1, 0, 0, 1), (1, 1, 0, 1, 1, 0)))
    length = dice.choice((1, 2, 3, 4, 4, 5, 6))
    tokens = [*stem[:length], *(dice.randrange(2) for _ in range(dice.choice((0, 0, 1, 2))))]
    adapter, urgency = dice.choice(("", "", "", "poet")), dice.randrange(3)
    return Request(name, tokens, dice.choice((1, 2, 3, 4)), adapter, urgency)


def hunt(
    make: Callable[[random.Random], Any], seeds: Iterable[int]
) -> tuple[int, list[Finding]] | None:
    """Return the first seed whose run has a finding, and what was found; None if none has."""
    for seed in seeds:
        found = play(make, seed)
        if found:
            return seed, found
    return None
