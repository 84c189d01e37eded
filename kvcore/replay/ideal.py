# SPDX-License-Identifier: Apache-2.0
"""What a cache without limit gives: each look-up finds all that was there before.

Rules: counted from ids, with no manager. A look-up finds full blocks from the start of the prompt
on, and leaves a token to compute, as the manager's does; all blocks that earlier requests filled
are there. Outputs are found by nobody: no trace says what they were. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from kvcore.replay.prefix_tree import PrefixTree, shares
from kvcore.replay.workload import TraceRequest


class Ideal:
    """The unlimited cache of one block size, and what was found there so far."""

    def __init__(self, block_size: int, tree: PrefixTree | None = None) -> None:
        self._block_size = block_size
        self._tree = PrefixTree() if tree is None else tree
        self._num_filled: dict[int, int] = {}
        self.hit_tokens = 0
        self.looked_up_tokens = 0

    def look_up(self, ids: Sequence[int], num_tokens: int, unit: int) -> int:
        """Look a prompt up and put it there; returns the tokens found, which are counted too."""
        filled, hit_blocks, matches = self._num_filled, 0, True
        numbers = self._tree.numbers(ids, unit)
        for number, share in zip(numbers, shares(num_tokens, unit, self._block_size), strict=True):
            there = filled.get(number, 0)
            if matches:
                hit_blocks += min(there, share.num_found)
                matches = there >= share.num_found
            if share.num_full > there:
                filled[number] = share.num_full
        self.looked_up_tokens += num_tokens
        self.hit_tokens += hit_blocks * self._block_size
        return hit_blocks * self._block_size


@attrs.frozen
class Reuse:
    """Ids of a trace, the last of a prompt perhaps partial, and how many of them came before."""

    num_ids: int
    num_hits: int

    @property
    def rate(self) -> float:
        """Hits over ids, 0.0 without ids."""
        return self.num_hits / self.num_ids if self.num_ids else 0.0


def count_reuse(requests: Iterable[TraceRequest]) -> Reuse:
    """How often a prefix of ids of a trace was there before: a trace's own measure of sharing."""
    tree, num_ids = PrefixTree(), 0
    for request in requests:
        num_ids += len(tree.numbers(request.hash_ids, request.unit))
    return Reuse(num_ids, num_ids - len(tree))
