# SPDX-License-Identifier: Apache-2.0
"""Views of a pool's blocks as the objects that V1's managers hand out, and free queues of them.

A view keeps no state: each access reads the blocks of a facade. The free queue of a manager follows
from the owners of the blocks, so it can be read but not changed (`PoolQueue`). A block that is made
alone is a pool of one block; such blocks can be linked into a queue, each into one at most
(`LinkedQueue`). Source: S001-06 to 20, 83; S004-12, 16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.types.arguments import check_kind
from kvcore.types.errors import KvcoreError

T = TypeVar("T", bound="BlockView")


class NotByHand(KvcoreError):
    """Raised if a call would change the free queue of a pool directly."""

    message = "block {block}: only {calls} change a pool's free queue"


class NoFreeBlocks(KvcoreError):
    """Raised if the free queue is empty."""

    message = "No free blocks available"


class NotInQueue(KvcoreError, RuntimeError):
    """Raised if a block is removed from a free queue that it is not in."""

    message = "block {block} is not in the free queue"


class AlreadyInQueue(KvcoreError, RuntimeError):
    """Raised if a block is added that is already in a free queue."""

    message = "block {block} is in the free queue already"


class BlockView:
    """One block: its id, and its current owners and neighbours in the free queue.

    content: the manager's record of the content that the block was last given.
    """

    __slots__ = ("_after", "_before", "_place", "_pool", "_queue", "block_id", "content")

    _before: Any
    _after: Any

    def __init__(
        self,
        block_id: int,
        pool: Backing | None = None,
        queue: Any = None,
        *,
        backend: BackendName = "python",
    ) -> None:
        """pool, queue: those of the block's manager. backend: for a block without a manager."""
        self.block_id = block_id
        self._place = 0 if pool is None else block_id
        self._pool = pool or Backing(1, backend=backend)
        self._queue = queue
        self.content: Any = None

    @property
    def ref_cnt(self) -> int:
        """Number of owners."""
        return self._pool.blocks.ref_count(self._place, "device")

    def _is_alone(self) -> bool:
        """Return whether the block is the only one of its own pool."""
        return not isinstance(self._queue, PoolQueue)

    @property
    def prev_free_block(self) -> Any:
        """The previous block in the free queue; None for the first one and outside a queue.

        Cost: O(free blocks) in the queue of a pool.
        """
        return self._queue and self._queue.neighbours(self)[0]

    @property
    def next_free_block(self) -> Any:
        """The next block in the free queue; None for the last one and outside a queue.

        Cost: O(free blocks) in the queue of a pool.
        """
        return self._queue and self._queue.neighbours(self)[1]


class BlockQueue(ABC, Generic[T]):
    """A free queue: a ring of blocks, closed by None."""

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
        """Return the blocks from head to tail."""

    @abstractmethod
    def neighbours(self, block: T | None) -> tuple[T | None, T | None]:
        """Return the previous and the next block of one in the ring."""


class PoolQueue(BlockQueue[T]):
    """A read-only view of a pool's free queue, with views of all blocks of the pool.

    kinds: the class of each view. calls: names of the calls that change the queue, for messages.
    Each query costs O(free blocks).
    """

    def __init__(self, pool: Backing, kinds: Iterable[type[T]], calls: str) -> None:
        self._pool = pool
        self._calls = calls
        self.blocks = [kind(number, pool=pool, queue=self) for number, kind in enumerate(kinds)]

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks in the queue."""
        return self._pool.blocks.num_free("device")

    def get_all_free_blocks(self) -> list[T]:
        """Return the blocks from head to tail."""
        return [self.blocks[number] for number in self._pool.blocks.free_blocks("device")]

    def neighbours(self, block: T | None) -> tuple[T | None, T | None]:
        """Return the previous and the next block; None at an end and outside the queue."""
        ring: list[T | None] = [*self.get_all_free_blocks(), None]
        place = next((at for at, each in enumerate(ring) if each is block), None)
        return (None, None) if place is None else (ring[place - 1], ring[place + 1 - len(ring)])

    def remove(self, block: BlockView | None = None) -> NoReturn:
        """Raise NotByHand; so do `append` and `popleft`."""
        raise NotByHand(block=block and block.block_id, calls=self._calls)

    append = popleft = remove


class LinkedQueue(BlockQueue[T]):
    """A queue of blocks that belong to no pool, as a ring of links; the head leaves first.

    blocks: the initial content, in order; may be empty.
    """

    kind: type[T]

    def __init__(self, blocks: Sequence[T]) -> None:
        """Raises WrongArgument, AlreadyInQueue."""
        self.num_free_blocks = 0
        self._end = self.kind.__new__(self.kind)
        self._end._before = self._end._after = self._end
        try:
            for block in blocks:
                self.append(block)
        except KvcoreError:
            while self.num_free_blocks:
                self.popleft()
            raise

    def popleft(self) -> T:
        """Remove and return the block at the head. Raises NoFreeBlocks."""
        block: T = self._end._after
        if block is self._end:
            raise NoFreeBlocks
        self.remove(block)
        return block

    def remove(self, block: T) -> None:
        """Remove a block from any position. Raises WrongArgument, NotInQueue."""
        check_kind("block", block, self.kind)
        if block._queue is not self:
            raise NotInQueue(block=block.block_id)
        block._before._after, block._after._before = block._after, block._before
        block._queue = None
        self.num_free_blocks -= 1

    def append(self, block: T) -> None:
        """Append a block at the tail. Raises WrongArgument, AlreadyInQueue."""
        check_kind("block", block, self.kind)
        if block._queue is not None:
            raise AlreadyInQueue(block=block.block_id)
        block._queue, block._before, block._after = self, self._end._before, self._end
        self._end._before._after = self._end._before = block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[T]:
        """Return the blocks from head to tail. Cost: O(blocks)."""
        found = [self._end]
        while (block := found[-1]._after) is not self._end:
            found.append(block)
        return found[1:]

    def neighbours(self, block: T | None) -> tuple[T | None, T | None]:
        """Return the previous and the next block of one in this queue."""
        end = self._end
        before, after = (block or end)._before, (block or end)._after
        return None if before is end else before, None if after is end else after


class CachedBlocks(Mapping[Any, Mapping[int, T]]):
    """Maps each hash to its blocks, the one that answers first. Each query costs O(pool).

    blocks: the view of each block of the pool; the keys are their `block_hash`.
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
        """Return the current content as a dict."""
        index, blocks = self._pool.state().device.index, self._blocks
        listed: dict[Any, dict[int, T]] = {}
        for key, first in index.firsts.items():
            found = {number: blocks[number] for number in index[key]}
            listed.setdefault(blocks[first].block_hash, {}).update(found)
        return listed
