# SPDX-License-Identifier: Apache-2.0
"""The eviction policies that a `Config` names, besides `lru` and `uncached_first`.

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
"""Of `Learned`: kinds of contents, bits of a rate, and the count at which a kind's are halved."""
DEFAULT_LEVEL = 35
Wish = tuple[int, int, int]
"""Of `retention`: base, level, and the ms for which the level holds; 0 and 0 without a duration."""
Step = tuple[int, Wish]
"""The first position that has a wish, up to the next step."""
DEFAULT_STEPS: tuple[Step, ...] = ((0, (DEFAULT_LEVEL, 0, 0)),)


class QueueAware(EvictionPolicy):
    """Least recently used first of what no waiting request will look up; then what is due last."""

    sees_waiting = True

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Behind all that is not due, the later the sooner it is due."""
        place = (
            (FIRST_SECTION, 0) if block.due is None else (DUE_SECTION, ORDERS_END - 1 - block.due)
        )
        return memory, place


class LRU2(EvictionPolicy):
    """The content whose use before the last is longest ago leaves first; first what has none.

    Source: O'Neil, O'Neil and Weikum, The LRU-K page replacement algorithm, SIGMOD 1993.
    """

    remembers = True

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """By the use before the last."""
        return memory, (FIRST_SECTION, block.before)


class S3FIFO(EvictionPolicy):
    """New contents wait in a small queue, a tenth of all, and leave from there unless used again.

    The main queue gets those that were used more than once since they came, and those that come
    back while they are remembered. Both go by the time of joining; what was used since then joins
    the main queue again when it comes to its front.
    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023; there a content
    in the main queue counts up to three uses, here one.
    """

    remembers = True

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """Where it was, if it was here."""
        if block.place is not None:
            return memory, block.place
        return memory, (SMALL if block.uses == 1 else MAIN, block.now)

    def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
        """From the small queue while it has its share."""
        front = fronts[0]
        if len(fronts) > 1 and 9 * front.length < fronts[1].length:
            front = fronts[1]
        block = front.block
        if front.section == SMALL:
            return memory, SMALL, (MAIN, block.now) if block.uses > 2 else None
        used = block.place is not None and block.last >= block.place[1]
        return memory, MAIN, (MAIN, block.now) if used else None


class Learned(EvictionPolicy):
    """The content of the kind that is least often used again leaves first.

    A kind is a number of uses and a depth. How often each is used again is counted as it goes, and
    counts are halved from time to time. A place is that rate above the place that was evicted last,
    so what is not used for long leaves, whatever its kind.
    Source: Cao and Irani, Cost-aware WWW proxy caching algorithms, USITS 1997, for the ageing.
    """

    remembers = True

    def start(self, num_blocks: int) -> Memory:
        """The last evicted place, then releases and uses again of each kind."""
        del num_blocks
        return (0,) * (1 + 2 * KINDS)

    def on_use(self, memory: Memory, block: Seen) -> Memory:
        """One more use of the kind that it had."""
        if block.uses == 1:
            return memory
        return count_one(memory, 2 + 2 * kind_of(block.uses - 1, block.depth))

    def on_release(self, memory: Memory, block: Seen) -> tuple[Memory, Place]:
        """By the rate of its kind."""
        at = 1 + 2 * kind_of(block.uses, block.depth)
        memory = count_one(memory, at)
        rate = (memory[at + 1] + 1 << RATE_BITS) // (memory[at] + 2)
        return memory, (FIRST_SECTION, min(memory[0] + rate, ORDERS_END - 1))

    def take(self, memory: Memory, fronts: Sequence[Front]) -> tuple[Memory, int, Place | None]:
        """The lowest, which becomes the place that others stand above."""
        place = fronts[0].block.place
        level = memory[0] if place is None else place[1]
        return (level, *memory[1:]), fronts[0].section, None


def kind_of(uses: int, depth: int) -> int:
    """A kind of content, by the order of magnitude of its depth."""
    return 8 * min(max(uses, 1) - 1, 7) + min(depth.bit_length(), 7)


def count_one(memory: Memory, at: int) -> Memory:
    """The memory with one more at a place; both counts of a kind are halved when one is full."""
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
"""Each policy of its own order, by its name in a `Config`."""


def policy_of(eviction: str | EvictionPolicy) -> EvictionPolicy | None:
    """The policy of this name, or itself; None if the queue needs none."""
    return BUILT_IN.get(eviction) if isinstance(eviction, str) else eviction
