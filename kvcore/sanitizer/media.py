# SPDX-License-Identifier: Apache-2.0
"""Tokens with media items at their positions, for engines with media in prompts.

Content before an item does not depend on it, so an item belongs to its positions, not to a
request's namespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import attrs


@attrs.frozen
class Item:
    """A media item, or embeddings, at the place of tokens. content: its bytes, or a name
    for them.
    """

    first: int
    length: int
    content: bytes

    @property
    def number(self) -> int:
        """Return the number that stands for its first position; the next positions count up."""
        return int.from_bytes(blake2b(self.content, digest_size=8).digest(), "big")


class MediaTokens(Sequence[int]):
    """An engine's list of tokens with items at their positions."""

    def __init__(self, tokens: Sequence[int], items: Sequence[Item]) -> None:
        self._tokens = tokens
        self._items = [(each.first, each.first + each.length, each.number) for each in items]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, position: Any) -> Any:
        for first, end, number in self._items:
            if first <= position < end:
                return number + position - first & 0xFFFFFFFF
        return self._tokens[position]
