# SPDX-License-Identifier: Apache-2.0
"""The hits of an unlimited cache, in which each look-up finds everything before it.

Counted from ids, without a manager. A look-up finds full blocks from the start of the prompt on,
and leaves a token to compute, as the manager's does; it finds all blocks that earlier requests
filled. Outputs are never found, since traces do not contain them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.replay.bounds.prefix_tree import PrefixTree, shares


class Ideal:
    """The unlimited cache of one block size, and the tokens found so far."""

    def __init__(self, block_size: int, tree: PrefixTree | None = None) -> None:
        self._block_size = block_size
        self._tree = PrefixTree() if tree is None else tree
        self._num_filled: dict[int, int] = {}
        self.hit_tokens = 0
        self.looked_up_tokens = 0

    def look_up(self, ids: Sequence[int], num_tokens: int, unit: int) -> int:
        """Look a prompt up, then add it; return and count the tokens found."""
        filled, hit_blocks, matches = self._num_filled, 0, True
        numbers = self._tree.numbers(ids, unit)
        of_ids = shares(num_tokens, unit, self._block_size)
        for number, (full, found) in zip(numbers, of_ids, strict=True):
            there = filled.get(number, 0)
            if matches:
                hit_blocks += min(there, found)
                matches = there >= found
            if full > there:
                filled[number] = full
        self.looked_up_tokens += num_tokens
        self.hit_tokens += hit_blocks * self._block_size
        return hit_blocks * self._block_size
