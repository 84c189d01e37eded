# SPDX-License-Identifier: Apache-2.0
"""The free queue: blocks without an owner, in the order in which they are taken.

Invariants: the front leaves first. The queue is several rings of links, and all blocks of a ring
leave before those of the next. Each ring is closed by its own sentinel, an id above the last block,
so removing a block from the middle takes O(1) and the ends need no special case. A block outside
the queue links to itself, so no number stands for "none". The caller decides which ring a freed
block joins, and in which order.
Source: S001-10 to S001-20. Twin: rust/src/pool/free_queue.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
from pyrsistent import PVector, pvector

OLDER, CURRENT = 0, 1
"""The rings of every queue: blocks of older epochs, and blocks of this one."""
NUM_RINGS = 2


@attrs.frozen
class FreeQueue:
    """The queue as a value: two columns of links, the number of blocks in it, and its capacity,
    which is also the sentinel of the first ring.
    """

    following: PVector[int]
    preceding: PVector[int]
    length: int
    num_blocks: int

    @property
    def num_rings(self) -> int:
        """The number of rings."""
        return len(self.following) - self.num_blocks

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return _walk(self.following, self.num_blocks)


def make_free_queue(
    num_blocks: int, order: Iterable[int], num_older: int = 0, num_rings: int = NUM_RINGS
) -> FreeQueue:
    """Make a queue for blocks 0 to num_blocks - 1 that holds those of `order`, front first: the
    first `num_older` in the ring of older epochs, the others in that of this epoch.
    """
    links = pvector(range(num_blocks + num_rings))
    queue = FreeQueueTransaction(FreeQueue(links, links, 0, num_blocks))
    for place, block in enumerate(order):
        queue.append(block, OLDER if place < num_older else CURRENT)
    return queue.freeze()


def num_older(queue: FreeQueue) -> int:
    """Count the blocks in the ring of older epochs."""
    following, sentinel = queue.following, queue.num_blocks + OLDER
    count, block = 0, following[sentinel]
    while block != sentinel:
        count, block = count + 1, following[block]
    return count


class FreeQueueTransaction:
    """A free queue inside a transition: the value itself until it is opened for the first change,
    then changed in place, and frozen at the end.
    """

    __slots__ = ("following", "is_open", "length", "num_blocks", "preceding", "queue")

    def __init__(self, queue: FreeQueue) -> None:
        self.queue = queue
        self.following: Any = queue.following
        self.preceding: Any = queue.preceding
        self.length = queue.length
        self.num_blocks = queue.num_blocks
        self.is_open = False

    def _open(self) -> None:
        self.is_open = True
        self.following, self.preceding = self.following.evolver(), self.preceding.evolver()

    def freeze(self) -> FreeQueue:
        """Return the queue as an immutable value."""
        if not self.is_open:
            return self.queue
        following, preceding = self.following.persistent(), self.preceding.persistent()
        return FreeQueue(following, preceding, self.length, self.num_blocks)

    def __contains__(self, block: int) -> bool:
        return bool(self.following[block] != block)

    def __iter__(self) -> Iterator[int]:
        return _walk(self.following, self.num_blocks)

    def sentinel(self, ring: int = CURRENT) -> int:
        """Return the id that closes a ring."""
        return self.num_blocks + ring

    def first_ring(self) -> int:
        """Find the ring whose front leaves next: the first that is not empty, or the last ring."""
        last = self.queue.num_rings - 1
        for ring in range(last):
            if self.sentinel(ring) in self:
                return ring
        return last

    def front(self) -> int:
        """Return the block that leaves next; a sentinel if the queue is empty."""
        front: int = self.following[self.sentinel(self.first_ring())]
        return front

    def remove(self, block: int) -> None:
        """Remove a block from any place."""
        if not self.is_open:
            self._open()
        before, after = self.preceding[block], self.following[block]
        self.following[before] = after
        self.preceding[after] = before
        self.following[block] = block
        self.preceding[block] = block
        self.length -= 1

    def take_front(self, count: int) -> list[int]:
        """Remove this many blocks from the front, and return them in order. IndexError if there are
        fewer.
        """
        sentinel, blocks = self.sentinel(0), list[int]()
        for _ in range(count):
            while self.following[sentinel] == sentinel:
                sentinel += 1  # the next ring's
            blocks.append(self.following[sentinel])
            self.remove(blocks[-1])
        return blocks

    def append(self, block: int, ring: int = CURRENT) -> None:
        """Put a block at the back of a ring."""
        self.insert(self.preceding[self.sentinel(ring)], block)

    def prepend(self, block: int) -> None:
        """Put a block at the front of the queue."""
        self.insert(self.sentinel(self.first_ring()), block)

    def insert(self, before: int, block: int) -> None:
        """Put a block after another one; after a sentinel, it is at the front of the sentinel's
        ring.
        """
        if not self.is_open:
            self._open()
        after = self.following[before]
        self.following[before] = block
        self.preceding[block] = before
        self.following[block] = after
        self.preceding[after] = block
        self.length += 1

    def splice(self, ring: int, behind: int) -> None:
        """Move all blocks of a ring to the back of another."""
        source, target = self.sentinel(ring), self.sentinel(behind)
        if source not in self:
            return
        if not self.is_open:
            self._open()
        front, back, last = self.following[source], self.preceding[source], self.preceding[target]
        self.following[last], self.preceding[front] = front, last
        self.following[back], self.preceding[target] = target, back
        self.following[source] = self.preceding[source] = source


def _walk(following: Sequence[int], num_blocks: int) -> Iterator[int]:
    """Yield the blocks in the order in which they leave, ring by ring."""
    for sentinel in range(num_blocks, len(following)):
        block = following[sentinel]
        while block != sentinel:
            yield block
            block = following[block]
