# SPDX-License-Identifier: Apache-2.0
"""Prefixes of a trace, each with a number: what an id is depends on the ids before it.

A prefix is its last id and the prefix before that, so two prompts have a number in common
exactly where they have the prefix in common. A block belongs to the id in which its last token
lies; so blocks of every size are known by their prefix and their place in it.
"""

from __future__ import annotations

from collections.abc import Sequence


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


Share = tuple[int, int]
"""The blocks that belong to one id of a prompt: those that the prompt fills, and those of them that
a look-up can find, since it leaves a token to compute.
"""


def shares(num_tokens: int, unit: int, block_size: int) -> list[Share]:
    """The share of each id in a prompt of this many tokens."""
    starts = range(0, num_tokens, unit)
    if unit % block_size:
        return [_share(start, num_tokens, unit, block_size) for start in starts]
    whole = (unit // block_size, unit // block_size)
    return [*[whole] * (len(starts) - 1), _share(starts[-1], num_tokens, unit, block_size)]


def _share(start: int, num_tokens: int, unit: int, block_size: int) -> Share:
    first, end = start // block_size, start + unit
    full = min(end, num_tokens) // block_size - first
    return full, min(end, num_tokens - 1) // block_size - first
