# SPDX-License-Identifier: Apache-2.0
"""A drafter whose guesses are partly wrong, as tests of rejected drafts need one."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from kvcore_runtime.engine.drafts import Drafter
from kvcore_runtime.model.sampling import uniform


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
