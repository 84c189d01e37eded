# SPDX-License-Identifier: Apache-2.0
"""Drafts: guesses of the next tokens, computed in one step with the token they follow.

A drafter is a function of the tokens alone, so a run can be repeated. A draft is accepted if the
model samples exactly that token at its position; the first other one and all drafts after it are
rejected, and the token sampled there is used instead. Sampling draws from a stream by position
(sampling.py), so answers are the same as without drafts, at every temperature. Source: speculative
decoding, Leviathan et al. 2023; prompt look-up, Saxena 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from kvcore_runtime.engine.errors import InvalidOption


class Drafter(Protocol):
    """Guesses the next tokens."""

    def propose(self, tokens: Sequence[int], num_drafts_max: int) -> Sequence[int]:
        """Return guesses of up to `num_drafts_max` next tokens, none if it has no guess."""
        ...


@attrs.frozen(kw_only=True)
class PromptLookup:
    """Guesses that the newest few tokens are followed by the same tokens as last time.

    num_matched: tokens that must repeat. num_drafts: most tokens to guess. Raises InvalidOption.
    """

    num_matched: int = 2
    num_drafts: int = 4

    def __attrs_post_init__(self) -> None:
        for name in ("num_matched", "num_drafts"):
            if getattr(self, name) < 1:
                raise InvalidOption(name=name, value=getattr(self, name), least=1)

    def propose(self, tokens: Sequence[int], num_drafts_max: int) -> Sequence[int]:
        """See `Drafter`."""
        newest = list(tokens[-self.num_matched :])
        for start in range(len(tokens) - self.num_matched - 1, -1, -1):
            after = start + self.num_matched
            if list(tokens[start:after]) == newest:
                return tokens[after : after + min(self.num_drafts, num_drafts_max)]
        return ()


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """Count the leading drafts that equal the tokens sampled at their positions."""
    pairs = enumerate(zip(drafts, sampled, strict=False))
    return next((place for place, (draft, token) in pairs if draft != token), len(drafts))
