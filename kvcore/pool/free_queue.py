# SPDX-License-Identifier: Apache-2.0
"""The free queue: blocks without owner, in the order in which they leave.

Invariants: the front leaves first. The queue is a ring of links through one sentinel, the id behind
the last block. A block outside the queue links to itself, so no number stands for "none". A block
is taken out of the middle in O(1). The caller decides in which order blocks are freed.
Source: S001-10 to S001-20. Twin: rust/src/pool/free_queue.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from pyrsistent import PVector, pvector


class FreeQueue(Struct, frozen=True, gc=False):
    """The queue as a value: two columns of links and the number of blocks in it."""

    following: PVector[int]
    preceding: PVector[int]
    length: int

    @property
    def sentinel(self) -> int:
        """The id that closes the ring."""
        return len(self.following) - 1

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        following, sentinel = self.following, len(self.following) - 1
        block = following[sentinel]
        while block != sentinel:
            yield block
            block = following[block]


def make_free_queue(num_blocks: int, order: list[int]) -> FreeQueue:
    """A queue over blocks 0 to num_blocks - 1 that holds those of `order`, front first."""
    following = list(range(num_blocks + 1))
    preceding = list(range(num_blocks + 1))
    before = num_blocks
    for block in order:
        following[before] = block
        preceding[block] = before
        before = block
    following[before] = num_blocks
    preceding[num_blocks] = before
    return FreeQueue(pvector(following), pvector(preceding), len(order))


class FreeQueueTransaction:
    """A free queue inside a transition: changed in place, frozen at the end.

    An untouched one freezes to the value that it came from.
    """

    __slots__ = ("following", "length", "preceding", "queue", "sentinel")

    def __init__(self, queue: FreeQueue) -> None:
        self.queue = queue
        self.following = queue.following.evolver()
        self.preceding = queue.preceding.evolver()
        self.length = queue.length
        self.sentinel = len(queue.following) - 1

    def freeze(self) -> FreeQueue:
        """The queue as a value."""
        queue, following = self.queue, self.following.persistent()
        if following is queue.following and self.length == queue.length:
            return queue
        return FreeQueue(following, self.preceding.persistent(), self.length)

    def __contains__(self, block: int) -> bool:
        return self.following[block] != block

    def __iter__(self) -> Iterator[int]:
        block = self.following[self.sentinel]
        while block != self.sentinel:
            yield block
            block = self.following[block]

    def front(self) -> int:
        """The block that leaves next; the sentinel if the queue is empty."""
        return self.following[self.sentinel]

    def remove(self, block: int) -> None:
        """Take a block out, from wherever it is."""
        before, after = self.preceding[block], self.following[block]
        self.following[before] = after
        self.preceding[after] = before
        self.following[block] = block
        self.preceding[block] = block
        self.length -= 1

    def append(self, block: int) -> None:
        """Put a block at the back."""
        self.insert(self.preceding[self.sentinel], block)

    def prepend(self, block: int) -> None:
        """Put a block at the front."""
        self.insert(self.sentinel, block)

    def insert(self, before: int, block: int) -> None:
        """Put a block behind another one, or behind the sentinel, which is the front."""
        after = self.following[before]
        self.following[before] = block
        self.preceding[block] = before
        self.following[block] = after
        self.preceding[after] = block
        self.length += 1
