# SPDX-License-Identifier: Apache-2.0
"""Random traffic for a scheduler, and tokens of a model, which depend on the seed alone.

Prompts begin with one of a few prefixes or continue the answer of a finished request, so that
look-ups hit. There are five kinds of tokens, so that speculative tokens and contents repeat. The
requests may be sessions: the next input of one may arrive before its answer, or after.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from benches.vllm.interruptions import Interruptions

VOCABULARY = 5


@attrs.frozen
class Arrival:
    """A new request or, if its name has arrived before, the next input of a session."""

    name: str
    prompt: list[int]
    max_tokens: int
    priority: int


@attrs.define
class Traffic:
    """Arrivals and aborts, step by step; longest: most tokens of a prompt and its answer."""

    seed: int
    longest: int
    dice: random.Random = attrs.field(init=False)
    interruptions: Interruptions = attrs.field(init=False)
    prefixes: list[list[int]] = attrs.field(init=False)
    planned: dict[str, int] = attrs.field(
        init=False, factory=dict
    )  # largest number of tokens per request

    def __attrs_post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.interruptions = Interruptions(random.Random(f"interruptions {self.seed}"))
        lengths = [self.dice.randrange(16, self.longest // 3) for _ in range(4)]
        self.prefixes = [self._tokens(length) for length in lengths]

    def arrivals(self, answered: Sequence[list[int]]) -> list[Arrival]:
        """Return the arrivals in a step; answered: all tokens of finished requests."""
        return [self._arrival(answered) for _ in range(self.dice.choice((0, 0, 1, 2)))]

    def next_inputs(self, living: Sequence[str]) -> list[Arrival]:
        """Return the next input of one of the living sessions, or nothing."""
        able = [name for name in living if self.longest - self.planned[name] > 60]
        if not able or self.dice.random() < 0.6:
            return []
        tokens = self._tokens(self.dice.randrange(1, 40))
        return [self._planned(self.dice.choice(able), tokens, self.dice.randrange(1, 20))]

    def aborted(self, names: Sequence[str]) -> list[str]:
        """Return which of these requests are aborted before a step."""
        return [self.dice.choice(names)] if names and self.dice.random() < 0.05 else []

    def _arrival(self, answered: Sequence[list[int]]) -> Arrival:
        goes_on = bool(answered) and self.dice.random() < 0.3
        before = self.dice.choice(answered if goes_on else self.prefixes)
        own = self._tokens(self.dice.randrange(1, self.longest // 4))
        prompt = [*before, *own][: self.longest - 20]
        max_tokens = self.dice.randrange(1, min(120, self.longest - len(prompt)))
        return self._planned(str(len(self.planned) + 1), prompt, max_tokens)

    def _planned(self, name: str, prompt: list[int], max_tokens: int) -> Arrival:
        self.planned[name] = self.planned.get(name, 0) + len(prompt) + max_tokens
        return Arrival(name, prompt, max_tokens, self.dice.randrange(3))

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(VOCABULARY) for _ in range(count)]


def sampled(seed: int, step: int, name: str, drafts: Sequence[int]) -> list[int]:
    """Return what the model samples in a step: some of a request's speculative tokens and one more.

    A speculative token whose id only the worker knows may be any token.
    """
    dice = random.Random(f"{seed}/{step}/{name}")
    accepted = drafts[: dice.randrange(len(drafts) + 1)]
    return [
        *(draft if draft >= 0 else dice.randrange(VOCABULARY) for draft in accepted),
        dice.randrange(VOCABULARY),
    ]
