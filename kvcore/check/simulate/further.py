# SPDX-License-Identifier: Apache-2.0
"""What an engine does beyond requests, batches and transfers: it runs ahead of its tokens, shortens
the open batch, changes weights, and says what is to stay cached.

Each kind in FURTHER is drawn for some of the runs, from a generator of its own, so that it does not
change the other choices of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvcore.check.simulate.ahead import can_foresee_draft, can_run_ahead, num_plain
from kvcore.check.simulate.play import Play

FURTHER: dict[str, dict[str, float]] = {
    "inside": {},
    "epochs": {"advance": 0.04},
    "retention": {"wish": 0.2, "tick": 0.3, "kept": 0.3},
    "pins": {"pin_prefix": 0.15, "unpin_prefix": 0.1},
    "shorten": {"shorten": 0.3},
    "ahead": {"ahead": 0.5, "foresee": 0.1, "receive": 0.7, "repeat": 0.5},
}
"""Kinds of draws, and the chance of each of their events in one step. Hits inside blocks have none:
they follow from the configuration.
"""
LETTERS = 3
"""Number of different answers that can follow one prefix."""
DURATIONS = (None, 100, 2_000, 60_000)

Make = Callable[..., Any]


class Further:
    """The further moves of one run's engine. make: makes a move."""

    def __init__(self, random: Random, rates: dict[str, float], play: Play, make: Make) -> None:
        self._random = random
        self._rates = rates
        self._play = play
        self._make = make
        self._num_pins = 0

    def happens(self, name: str) -> bool:
        """Return whether an event happens now."""
        rate = self._rates.get(name, 0.0)
        return rate > 0 and self._random.random() < rate

    def early(self) -> None:
        """Make the moves before anything is scheduled: weights, time, wishes, pins, output."""
        random, names = self._random, list(self._play.known)
        if self.happens("advance"):
            self._make("advance", random.choice([1, 1, 5]))
        if self.happens("tick"):
            self._make("tick", random.choice([0, 1, 100, 3_000]))
        if self.happens("unpin_prefix"):
            self._make("unpin_prefix", random.randrange(1000))
        if names and self.happens("wish"):
            end = random.choice([None, random.randint(1, 40)])
            level = random.choice([0, 20, 50, 100])
            self._make("wish", random.choice(names), end, level, random.choice(DURATIONS))
        if names and self.happens("pin_prefix"):
            self._num_pins += 1
            name, pin = random.choice(names), f"p{self._num_pins}"
            self._make("pin_prefix", pin, name, random.randint(1, self._length(name)))
        for name in [name for name in names if self._waits(name)]:
            if self.happens("receive"):
                self._make("receive", name, random.randrange(LETTERS), random.random() < 0.7)
            if self._play.known[name].dropped is not None and self.happens("repeat"):
                self._make("repeat", name)

    def ahead(self, running: Sequence[str]) -> None:
        """Schedule positions to come of some running requests."""
        random = self._random
        able = [name for name in running if can_run_ahead(self._play, name)]
        behind = [name for name in running if can_foresee_draft(self._play, name)]
        if behind and self.happens("foresee"):
            right = random.random() < 0.5
            self._make("foresee_draft", random.choice(behind), random.randrange(LETTERS), right)
        if able and not self._play.config.has_states and self.happens("foresee"):
            name = random.choice(able)
            able.remove(name)
            tokens = self._tokens(random.randint(1, 3))
            rejected = random.randint(int(len(tokens) < 2), 2)
            self._make("foresee", name, tokens, rejected)
        for follow in (True, False):
            if able and self.happens("ahead"):
                chosen = random.sample(able, random.randint(1, len(able)))
                chosen = [name for name in chosen if not follow or self._can_follow(name)]
                able = [name for name in able if name not in chosen]
                if chosen:
                    self._make("ahead", chosen, self._tokens(len(chosen)), follow)

    def late(self) -> None:
        """Take back a part of what the open batch computes; try to change weights under it."""
        random = self._random
        names = list(dict.fromkeys(each.request_id for each in self._play.passes))
        if names and self.happens("shorten"):
            name = random.choice(names)
            count = self._play.manager.num_computed_tokens(name)
            self._make("shorten", name, max(0, count - random.choice([1, 1, 2, 5, 1000])))
        if names and self.happens("advance"):
            self._make("advance", 1)

    def let_go(self) -> None:
        """End everything that may hold blocks."""
        while self._play.pinned:
            self._make("unpin_prefix", 0)

    def _length(self, name: str) -> int:
        return max(1, len(self._play.known[name].tokens))

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(LETTERS) for _ in range(count)]

    def _waits(self, name: str) -> bool:
        known = self._play.known[name]
        return bool(known.future or known.guesses or known.dropped)

    def _can_follow(self, name: str) -> bool:
        """Return whether the next token to come of a request was sampled by now."""
        if not num_plain(self._play, name):
            return False
        sampler = self._play.known[name].future[0][1]
        return sampler is None or self._play.has_run(sampler)
