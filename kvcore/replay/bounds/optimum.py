# SPDX-License-Identifier: Apache-2.0
"""A bound that no policy exceeds: Belady's MIN with bypass over the look-ups of a run.

The references are the full blocks of the prompts that a run admitted, in its order, each prompt
from its start. All usable blocks are cache, a block may be bypassed, and blocks are found one by
one (without their prefix), so no manager can find more. A prompt that returns after a preemption
fills the cache again, but does not count. If a prompt ends with a full block, that block is filled
but not looked up, since the manager leaves a token to compute. The blocks of one id are nearly
always referenced together. An item is a run of blocks that is always referenced as a whole, and MIN
treats the blocks of an item alike: their next uses follow each other, and those of two items never
interleave. So the first blocks of an item are cached, evictions take its last ones, and one heap
entry stands for all of them. The result is exactly that of MIN block by block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heappop, heappush

from kvcore.replay.bounds.prefix_tree import PrefixTree, Share, shares

Parts = tuple[int, list[int]]
"""The first item of a prefix, and the end of each of its items."""
NUM_CACHED = 4096
_NEVER = 0
"""Stands for no later use that counts; the first reference is never a next use."""


class LookUps:
    """The look-ups of a run, kept until its end: four bytes per id."""

    def __init__(self, block_size: int, tree: PrefixTree | None = None) -> None:
        self._block_size = block_size
        self._tree = PrefixTree() if tree is None else tree
        self._numbers = array("I")
        self._lengths: list[tuple[int, int, bool]] = []

    def add(self, ids: Sequence[int], num_tokens: int, unit: int, *, counts: bool = True) -> None:
        """Note that a prompt was looked up. counts: False if it only returns after a preemption."""
        self._numbers.extend(self._tree.numbers(ids, unit))
        self._lengths.append((num_tokens, unit, counts))

    def best_hit_tokens(self, num_blocks: int) -> int:
        """Return the most tokens that a cache of this many blocks finds in these look-ups."""
        return sum(self._hits(*self._references()[:3], num_blocks)) * self._block_size

    def found_blocks(self, num_blocks: int) -> Iterator[bytearray]:
        """Return, for each look-up that counts, in order, a flag per full block: whether it is
        found.
        """
        items, counted, widths, parts = self._references()
        hits = self._hits(items, counted, widths, num_blocks)
        for numbers, of_ids, counts in self._prefixes():
            flags = bytearray()
            for number, (full, _) in zip(numbers, of_ids, strict=True):
                start = 0
                for end in parts[number][1]:
                    if end > full:
                        break
                    num_hits = next(hits)
                    flags += b"\1" * num_hits + bytes(end - start - num_hits)
                    start = end
            if counts:
                yield flags

    def _hits(
        self, items: array[int], counted: bytearray, widths: array[int], num_blocks: int
    ) -> Iterator[int]:
        return _run(items, _next_uses(items, counted), counted, widths, num_blocks)

    def _prefixes(self) -> Iterator[tuple[Sequence[int], list[Share], bool]]:
        """Yield, for each look-up, its prefixes' numbers, their blocks, and whether it counts."""
        position = 0
        for num_tokens, unit, counts in self._lengths:
            of_ids = shares(num_tokens, unit, self._block_size)
            yield self._numbers[position : position + len(of_ids)], of_ids, counts
            position += len(of_ids)

    def _references(self) -> tuple[array[int], bytearray, array[int], dict[int, Parts]]:
        """Return the items in order of reference, whether each reference counts, the items' widths,
        and for each prefix its first item and the ends of its items.
        """
        cuts: dict[int, tuple[int, ...]] = {}
        for numbers, of_ids, _ in self._prefixes():
            for number, share in zip(numbers, of_ids, strict=True):
                known = cuts.setdefault(number, share)
                if known != share:
                    cuts[number] = tuple({*known, *share})
        parts: dict[int, Parts] = {}
        widths = array("I")
        for number, places in cuts.items():
            ends, between = _parts(places)
            parts[number] = len(widths), ends
            widths.extend(between)
        items, counted = array("I"), bytearray()
        for numbers, of_ids, counts in self._prefixes():
            for number, (full, found) in zip(numbers, of_ids, strict=True):
                item, ends = parts[number]
                for end in ends:
                    if end > full:
                        break
                    items.append(item)
                    counted.append(counts and end <= found)
                    item += 1
        return items, counted, widths, parts


@lru_cache(NUM_CACHED)
def _parts(cuts: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return the ends and widths of the items of a prefix that is cut at these places."""
    ends = sorted({*cuts} - {0})
    return ends, [b - a for a, b in zip([0, *ends], ends, strict=False)]


def _next_uses(items: array[int], counted: bytearray) -> array[int]:
    """Return for each reference the next one of its item; _NEVER if there is none or it does not
    count.

    A block that is filled again before its next counted use need not be kept until then.
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
    """Yield how many blocks MIN finds at each reference; these are the item's first ones."""
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
