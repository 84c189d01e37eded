# SPDX-License-Identifier: Apache-2.0
"""What no policy passes: Belady's MIN with bypass over the look-ups of a run.

The full blocks of the prompts that a run admitted, in its order and one after the other,
each prompt from its start. All usable blocks are cache, a block may be left out, and blocks are
found one by one (no prefix need be there): so nothing that a manager can do finds more. What comes
back after a preemption fills the cache again and counts nothing; the last block of a prompt that
ends with it is filled and not looked up, as the manager leaves a token to compute.

The blocks of one id are referenced together nearly always. An item is a run of blocks that is
referenced as a whole throughout, and the choices of MIN within an item are all alike: the next uses
of its blocks follow each other, and those of two items never interleave. So what is cached of an
item is its first blocks, evictions take its last, and one heap entry stands for all of them. The
answer is exactly that of MIN block by block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from kvcore.replay.prefix_tree import PrefixTree, shares

_NEVER = 0
"""No later use that counts; as the next use of a reference, which is never the first one."""


class LookUps:
    """The look-ups of a run, kept until it is over: four bytes per id."""

    def __init__(self, block_size: int, tree: PrefixTree | None = None) -> None:
        self._block_size = block_size
        self._tree = PrefixTree() if tree is None else tree
        self._numbers = array("I")
        self._lengths: list[tuple[int, int, bool]] = []

    def add(self, ids: Sequence[int], num_tokens: int, unit: int, *, counts: bool = True) -> None:
        """Note that a prompt was looked up. counts: not where it only comes back."""
        self._numbers.extend(self._tree.numbers(ids, unit))
        self._lengths.append((num_tokens, unit, counts))

    def best_hit_tokens(self, num_blocks: int) -> int:
        """The most tokens that a cache of this many blocks finds in these look-ups."""
        return sum(self._hits(*self._references()[:3], num_blocks)) * self._block_size

    def found_blocks(self, num_blocks: int) -> Iterator[bytearray]:
        """Of each look-up that counts, in order, a flag per full block: whether it is found."""
        items, counted, widths, ends = self._references()
        hits = self._hits(items, counted, widths, num_blocks)
        position = 0
        for num_tokens, unit, counts in self._lengths:
            flags = bytearray()
            for share in shares(num_tokens, unit, self._block_size):
                start = 0
                for end in ends[self._numbers[position]]:
                    if end > share.num_full:
                        break
                    num_hits = next(hits)
                    flags += b"\1" * num_hits + bytes(end - start - num_hits)
                    start = end
                position += 1
            if counts:
                yield flags

    def _hits(
        self, items: array[int], counted: bytearray, widths: array[int], num_blocks: int
    ) -> Iterator[int]:
        return _run(items, _next_uses(items, counted), counted, widths, num_blocks)

    def _prefixes(self) -> Iterator[tuple[int, int, int, bool]]:
        """Each prefix looked up: its number, full blocks, those to be found, whether it counts."""
        position = 0
        for num_tokens, unit, counts in self._lengths:
            for full, found in shares(num_tokens, unit, self._block_size):
                yield self._numbers[position], full, found, counts
                position += 1

    def _references(self) -> tuple[array[int], bytearray, array[int], dict[int, list[int]]]:
        """The items referenced in order, whether each reference counts, the items' widths, and
        where the items of each prefix end in it.
        """
        cuts: dict[int, set[int]] = {}
        for number, full, found, _ in self._prefixes():
            known = cuts.get(number)
            if known is None:
                cuts[number] = {full, found}
            else:
                known.add(full)
                known.add(found)
        ends: dict[int, list[int]] = {}
        first_items, widths = {}, array("I")
        for number, places in cuts.items():
            ends[number] = sorted(places - {0})
            first_items[number] = len(widths)
            widths.extend(b - a for a, b in zip([0, *ends[number]], ends[number], strict=False))
        items, counted = array("I"), bytearray()
        for number, full, found, counts in self._prefixes():
            for item, end in enumerate(ends[number], first_items[number]):
                if end > full:
                    break
                items.append(item)
                counted.append(counts and end <= found)
        return items, counted, widths, ends


def _next_uses(items: array[int], counted: bytearray) -> array[int]:
    """For each reference the next one of its item, _NEVER if there is none or it does not count.

    A block that is filled again before it counts need not be kept till then.
    """
    following = array("Q", bytes(8 * len(items)))
    newest: dict[int, int] = {}
    for place in range(len(items) - 1, -1, -1):
        item = items[place]
        following[place] = newest.get(item, _NEVER)
        newest[item] = place if counted[place] else _NEVER
    return following


def _run(
    items: array[int],
    following: array[int],
    counted: bytearray,
    widths: array[int],
    num_blocks: int,
) -> Iterator[int]:
    """The blocks that MIN finds at each reference; those it finds are the item's first ones."""
    cached, next_use = array("I", bytes(4 * len(widths))), array("Q", bytes(8 * len(widths)))
    farthest: list[int] = []
    num_free = num_blocks
    for place, item in enumerate(items):
        kept, use = cached[item], following[place]
        yield kept if counted[place] else 0
        next_use[item] = use
        if use == _NEVER:
            num_free += kept
            cached[item] = 0
            continue
        taken = min(widths[item] - kept, num_free)
        num_free -= taken
        kept += taken
        while kept < widths[item] and farthest:
            last_use = -farthest[0]
            other = items[last_use]
            if next_use[other] != last_use or cached[other] == 0:
                heappop(farthest)
                continue
            if last_use < use:
                break
            taken = min(widths[item] - kept, cached[other])
            cached[other] -= taken
            kept += taken
        cached[item] = kept
        if kept:
            heappush(farthest, -use)
