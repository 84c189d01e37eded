# SPDX-License-Identifier: Apache-2.0
"""Numbers the prefixes of a trace, since the content of an id depends on the ids before it.

A prefix is its last id and the prefix before that, so two prompts share a number exactly where they
share the prefix. A block belongs to the id that contains its last token, so a block of any size is
identified by its prefix and its place in it.
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
        """Return the number of each prefix of ids, the shortest first; new ones are added."""
        numbers, known, before = [], self._numbers, -unit
        for each in ids:
            before = known.setdefault((before, each), len(known))
            numbers.append(before)
        return numbers


Share = tuple[int, int]
"""The blocks of one id of a prompt: those that the prompt fills, and those of them that a look-up
can find, since it leaves a token to compute.
"""


def shares(num_tokens: int, unit: int, block_size: int) -> list[Share]:
    """Return the share of each id in a prompt of this many tokens."""
    starts = range(0, num_tokens, unit)
    if unit % block_size:
        return [_share(start, num_tokens, unit, block_size) for start in starts]
    whole = (unit // block_size, unit // block_size)
    return [*[whole] * (len(starts) - 1), _share(starts[-1], num_tokens, unit, block_size)]


def _share(start: int, num_tokens: int, unit: int, block_size: int) -> Share:
    first, end = start // block_size, start + unit
    full = min(end, num_tokens) // block_size - first
    return full, min(end, num_tokens - 1) // block_size - first
