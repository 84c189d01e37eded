# SPDX-License-Identifier: Apache-2.0
"""Drafters that know the answers, and whose guesses are partly wrong on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import attrs
from kvcore_runtime.engine.drafts import Drafter
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import uniform

from tests.runtime.model.questions import references, requests


@attrs.frozen(kw_only=True)
class Spoiled:
    """Another drafter's guesses, some of them made wrong on purpose; guesses if it has none.

    share: of the tokens, 0.0 to 1.0, drawn by seed and place. num_tokens: ids of the model.
    """

    drafter: Drafter
    seed: int
    share: float
    num_tokens: int

    def propose(self, tokens: Sequence[int], num_drafts_max: int) -> Sequence[int]:
        """See `Drafter`."""
        drafts = self.drafter.propose(tokens, num_drafts_max) or tokens[-1:][:num_drafts_max]
        return [self._spoil(draft, len(tokens) + index) for index, draft in enumerate(drafts)]

    def _spoil(self, draft: int, place: int) -> int:
        """Replace a token by another one, or keep it."""
        number = uniform(self.seed, place)
        if number >= self.share:
            return draft
        return (draft + 1 + int(number / self.share * (self.num_tokens - 1))) % self.num_tokens


@attrs.frozen
class Foreseen:
    """Knows the answers, and guesses the first one that begins with the tokens so far."""

    answers: tuple[tuple[int, ...], ...]
    num_drafts: int = 5

    def propose(self, tokens: Sequence[int], num_drafts_max: int) -> Sequence[int]:
        """See `Drafter`."""
        known = tuple(tokens)
        for each in self.answers:
            if each[: len(known)] == known:
                return each[len(known) :][: min(self.num_drafts, num_drafts_max)]
        return ()


@cache
def foreseen(model: Llama, temperature: float = 0.9) -> Foreseen:
    """Return a drafter that knows the model's answers to `requests`."""
    prompts = {each.request_id: each.prompt for each in requests()}
    generations = references(model, temperature).items()
    return Foreseen(tuple((*prompts[key.split("#")[0]], *each.tokens) for key, each in generations))
