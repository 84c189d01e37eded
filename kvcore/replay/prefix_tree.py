# SPDX-License-Identifier: Apache-2.0
"""Prefixes of a trace, each with a number: what an id is depends on the ids before it.

A prefix is its last id and the prefix before that, so two prompts have a number in common
exactly where they have the prefix in common. A block belongs to the id in which its last token
lies; so blocks of every size are known by their prefix and their place in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs


class PrefixTree:
    """The prefixes seen so far, numbered from 0."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, ids: Sequence[int], unit: int) -> list[int]:
        """The number of each prefix of ids, the shortest first. Adds those that are new."""
        numbers, known, before = [], self._numbers, -unit
        for each in ids:
            before = known.setdefault((before, each), len(known))
            numbers.append(before)
        return numbers


@attrs.frozen
class Share:
    """The blocks that belong to one id of a prompt.

    num_full: those that the prompt fills. num_found: those of them that a look-up can find, since
    it leaves a token to compute.
    """

    num_full: int
    num_found: int


def shares(num_tokens: int, unit: int, block_size: int) -> Iterator[Share]:
    """The share of each id in a prompt of this many tokens."""
    for start in range(0, num_tokens, unit):
        first, end = start // block_size, start + unit
        full = min(end, num_tokens) // block_size - first
        found = min(end, num_tokens - 1) // block_size - first
        yield Share(full, found)
