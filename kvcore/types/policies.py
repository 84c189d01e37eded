# SPDX-License-Identifier: Apache-2.0
"""The eviction policies that a `Config` can name, besides `lru` and `uncached_first`.

Those two need no places: the pool puts a block at an end of the queue.
Twin: rust/src/types/policies.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.types.policy import (
    FIRST_SECTION,
    ORDERS_END,
    EvictionPolicy,
    Front,
    Memory,
    Place,
    Seen,
)

DUE_SECTION = 2
SMALL, MAIN = 1, 2
KINDS, RATE_BITS, COUNT_MAX = 64, 16, 1024
"""For `Learned`: number of kinds, bits of a rate, and the count at which a kind's counts are
halved.
"""
DEFAULT_LEVEL = 35
Wish = tuple[int, int, int]
"""Of `retention`: base, level, and the ms for which the level holds; 0 and 0 without a duration."""
Step = tuple[int, Wish]
"""The first position that has a wish, up to the next step."""
DEFAULT_STEPS: tuple[Step, ...] = ((0, (DEFAULT_LEVEL, 0, 0)),)


class QueueAware(EvictionPolicy):
    """Evicts what no waiting request will look up, least recently used first; then what is due
    last.
    """

    sees_waiting = True

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Place due contents after all others; the sooner a content is due, the later it leaves."""
        place = (
            (FIRST_SECTION, 0) if block.due is None else (DUE_SECTION, ORDERS_END - 1 - block.due)
        )
        return memory, place


class LRU2(EvictionPolicy):
    """Evicts the content whose last use but one is longest ago; first those used only once.

    Source: O'Neil, O'Neil and Weikum, The LRU-K page replacement algorithm, SIGMOD 1993.
    """

    remembers = True

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Place a content by its last use but one."""
        return memory, (FIRST_SECTION, block.before)


class S3FIFO(EvictionPolicy):
    """New contents enter a small queue, a tenth of all, and are evicted from there unless used
    again.

    The main queue gets those used more than once since they entered, and those that return while
    they are remembered. Both are first in, first out; a content that was used since it joined goes
    to the back of the main queue when it reaches its front.
    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023; there a content
    in the main queue counts up to three uses, here one.
    """

    remembers = True

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Return a content to its queue if it has one."""
        if block.place is not None:
            return memory, block.place
        return memory, (SMALL if block.uses == 1 else MAIN, block.now)

    def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
        """Evict from the small queue while it has its share."""
        front = fronts[0]
        if len(fronts) > 1 and 9 * front.length < fronts[1].length:
            front = fronts[1]
        block = front.block
        if front.section == SMALL:
            return memory, SMALL, (MAIN, block.now) if block.uses > 2 else None
        used = block.place is not None and block.last >= block.place[1]
        return memory, MAIN, (MAIN, block.now) if used else None


class Learned(EvictionPolicy):
    """Evicts the content of the kind that is least often used again.

    A kind is a number of uses and a depth. The rate at which each kind is used again is learnt from
    counts, which are halved from time to time. A place is that rate plus the place evicted last, so
    contents that are unused for long leave, whatever their kind.
    Source: Cao and Irani, Cost-aware WWW proxy caching algorithms, USITS 1997, for the ageing.
    """

    remembers = True

    def start(self, num_blocks: int) -> Memory:
        """Make the memory: the place evicted last, then releases and reuses of each kind."""
        del num_blocks
        return (0,) * (1 + 2 * KINDS)

    def on_use(self, memory: Memory, block: Seen) -> Memory:
        """Count a reuse of the kind that it had."""
        if block.uses == 1:
            return memory
        return count_one(memory, 2 + 2 * kind_of(block.uses - 1, block.depth))

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Place a content by the rate of its kind."""
        at = 1 + 2 * kind_of(block.uses, block.depth)
        memory = count_one(memory, at)
        rate = (memory[at + 1] + 1 << RATE_BITS) // (memory[at] + 2)
        return memory, (FIRST_SECTION, min(memory[0] + rate, ORDERS_END - 1))

    def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
        """Evict the lowest place, which becomes the base of later places."""
        place = fronts[0].block.place
        level = memory[0] if place is None else place[1]
        return (level, *memory[1:]), fronts[0].section, None


def kind_of(uses: int, depth: int) -> int:
    """Return the kind of a content, by its uses and the order of magnitude of its depth."""
    return 8 * min(max(uses, 1) - 1, 7) + min(depth.bit_length(), 7)


def count_one(memory: Memory, at: int) -> Memory:
    """Return the memory with one count raised; both counts of a kind are halved when one is
    full.
    """
    counts = list(memory)
    counts[at] += 1
    first = at - (at - 1) % 2
    if counts[at] == COUNT_MAX:
        counts[first], counts[first + 1] = counts[first] // 2, counts[first + 1] // 2
    return tuple(counts)


BUILT_IN: dict[str, EvictionPolicy] = {
    "queue_aware": QueueAware(),
    "lru2": LRU2(),
    "s3fifo": S3FIFO(),
    "learned": Learned(),
}
"""Each policy that orders the queue, by its name in a `Config`."""


def policy_of(eviction: str | EvictionPolicy) -> EvictionPolicy | None:
    """Return the policy of a name, or the policy itself; None if the queue needs none."""
    return BUILT_IN.get(eviction) if isinstance(eviction, str) else eviction
