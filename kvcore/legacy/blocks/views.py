# SPDX-License-Identifier: Apache-2.0
"""Blocks of a pool as the objects that V1's managers hand out, and the pool's free queue.

A view keeps no state: it reads the blocks of a facade at each access. The queue moves with the
owners of the blocks, so it can be read but not changed. Source: S001-06, 09, 83;
S004-12, 16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from kvcore.legacy.blocks.blocks import Backing
from kvcore.types.errors import KvcoreError

T = TypeVar("T", bound="BlockView")


class NotByHand(KvcoreError):
    """A call that would change the free queue of a pool by hand."""

    message = "block {block}: a pool's free queue changes by {calls} alone"


class BlockView:
    """One block: its id, and its owners and its neighbours in the free queue as they are now.

    place: its number in the pool, which is its id unless the block is in no manager's pool.
    content: what a manager notes of the content that the block was last given.
    """

    __slots__ = ("_place", "_pool", "_queue", "block_id", "content")

    def __init__(self, block_id: int, pool: Backing, place: int, queue: Any) -> None:
        self.block_id = block_id
        self._pool = pool
        self._place = place
        self._queue = queue
        self.content: Any = None

    @property
    def ref_cnt(self) -> int:
        """Number of owners."""
        return self._pool.blocks.ref_count(self._place, "device")

    @property
    def prev_free_block(self) -> Any:
        """The block before it in the free queue; None for the first one and outside a queue.

        Cost: O(free blocks) in the queue of a pool.
        """
        return self._queue and self._queue.neighbours(self)[0]

    @property
    def next_free_block(self) -> Any:
        """The block behind it in the free queue; None for the last one and outside a queue.

        Cost: O(free blocks) in the queue of a pool.
        """
        return self._queue and self._queue.neighbours(self)[1]


class BlockQueue(ABC, Generic[T]):
    """A free queue as a ring of blocks that None closes."""

    def __repr__(self) -> str:
        ids = [block.block_id for block in self.get_all_free_blocks()]
        return f"{type(self).__name__}({ids})"

    @property
    def free_list_head(self) -> T | None:
        """The block that leaves next; None if the queue is empty."""
        return self.neighbours(None)[1]

    @property
    def free_list_tail(self) -> T | None:
        """The block that leaves last; None if the queue is empty."""
        return self.neighbours(None)[0]

    @abstractmethod
    def get_all_free_blocks(self) -> list[T]:
        """The blocks from head to tail."""

    @abstractmethod
    def neighbours(self, block: T | None) -> tuple[T | None, T | None]:
        """The blocks before and behind one in the ring."""


class PoolQueue(BlockQueue[T]):
    """The free queue of a pool, to be read. A question costs O(free blocks).

    blocks: the view of each block of the pool. calls: names of the calls that move the queue.
    """

    def __init__(self, pool: Backing, blocks: Sequence[T], calls: str) -> None:
        self._pool = pool
        self._blocks = blocks
        self._calls = calls

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks in the queue."""
        return self._pool.blocks.num_free("device")

    def get_all_free_blocks(self) -> list[T]:
        """The blocks from head to tail."""
        return [self._blocks[number] for number in self._pool.blocks.free_blocks("device")]

    def neighbours(self, block: T | None) -> tuple[T | None, T | None]:
        """The blocks before and behind one; None for none, and if it is not in the queue."""
        ring: list[T | None] = [*self.get_all_free_blocks(), None]
        place = next((at for at, each in enumerate(ring) if each is block), None)
        return (None, None) if place is None else (ring[place - 1], ring[place + 1 - len(ring)])

    def remove(self, block: BlockView | None = None) -> NoReturn:
        """Raises NotByHand, as `append` and `popleft` do."""
        raise NotByHand(block=block and block.block_id, calls=self._calls)

    append = popleft = remove


class CachedBlocks(Mapping[Any, Mapping[int, T]]):
    """Which blocks each hash is found by, the one that answers first. Cost: O(pool) a question.

    blocks: the view of each block of the pool; its `block_hash` is what the block is found by.
    """

    def __init__(self, pool: Backing, blocks: Sequence[Any]) -> None:
        self._pool = pool
        self._blocks = blocks

    def __getitem__(self, block_hash: Any) -> Mapping[int, T]:
        return self.listed()[block_hash]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.listed())

    def __len__(self) -> int:
        return len(self._pool.state().device.index)

    def __repr__(self) -> str:
        return repr(self.listed())

    def listed(self) -> dict[Any, dict[int, T]]:
        """All of it as it is now."""
        index, blocks = self._pool.state().device.index, self._blocks
        listed: dict[Any, dict[int, T]] = {}
        for key, first in index.firsts.items():
            found = {number: blocks[number] for number in index[key]}
            listed.setdefault(blocks[first].block_hash, {}).update(found)
        return listed
