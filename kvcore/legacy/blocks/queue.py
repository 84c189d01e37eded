# SPDX-License-Identifier: Apache-2.0
"""The core's free queue by itself, over either backend: for seed 001's `FreeKVCacheBlockQueue`.

Rules: blocks are named by ids from 0 to num_blocks - 1 and stand in the queue once. A call that
raises leaves the queue as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvcore import _twin
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.pool import queue_transitions
from kvcore.pool.free_queue import FreeQueueTransaction, make_free_queue
from kvcore.types.arguments import read_count, read_ints
from kvcore.types.errors import BackendMissing


class BackingQueue:
    """A queue of block ids, changed by each call."""

    __slots__ = ("_queue",)

    def __init__(
        self,
        num_blocks: int,
        order: Iterable[int] | None = None,
        *,
        backend: BackendName = "python",
    ) -> None:
        """Holds the blocks of `order`, front first; None: all, lowest first.

        Raises InvalidCount, UnknownBlock, AlreadyQueued, BackendMissing.
        """
        size = read_count("num_blocks", num_blocks)
        ids = range(size) if order is None else read_ints(order)
        self._queue = _make(backend, size)
        for block in ids:
            self._queue.append(block)

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: object) -> bool:
        """Raises UnknownBlock."""
        answer: bool = self._queue.contains(block)
        return answer

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue.blocks())

    def front(self) -> int | None:
        """The block that leaves next; None where the queue is empty."""
        block: int | None = self._queue.front()
        return block

    def back(self) -> int | None:
        """The block that leaves last; None where the queue is empty."""
        block: int | None = self._queue.back()
        return block

    def neighbours(self, block: int) -> tuple[int | None, int | None]:
        """What leaves just before and just after a block; None for none, and where it is outside.

        Raises UnknownBlock.
        """
        around: tuple[int | None, int | None] = self._queue.neighbours(block)
        return around

    def popleft(self) -> int | None:
        """Take out the block that leaves next; None where the queue is empty."""
        block: int | None = self._queue.popleft()
        return block

    def remove(self, block: int) -> None:
        """Take a block out, from wherever it is. Raises UnknownBlock, NotQueued."""
        self._queue.remove(block)

    def append(self, block: int) -> None:
        """Put a block at the back. Raises UnknownBlock, AlreadyQueued."""
        self._queue.append(block)

    def prepend(self, block: int) -> None:
        """Put a block at the front. Raises UnknownBlock, AlreadyQueued."""
        self._queue.prepend(block)

    def blocks(self) -> tuple[int, ...]:
        """All blocks, front first. Cost: O(blocks)."""
        blocks: tuple[int, ...] = self._queue.blocks()
        return blocks


class PureQueue:
    """The core's queue in Python; the twin's `FreeQueue` has the same methods."""

    __slots__ = ("_queue",)

    def __init__(self, num_blocks: int) -> None:
        self._queue = FreeQueueTransaction(make_free_queue(num_blocks, []))

    def __len__(self) -> int:
        return self._queue.length

    def front(self) -> int | None:
        """The block that leaves next."""
        block = self._queue.front()
        return None if block == self._queue.sentinel else block

    def back(self) -> int | None:
        """The block that leaves last."""
        return queue_transitions.back(self._queue)

    def neighbours(self, block: int) -> tuple[int | None, int | None]:
        """What leaves just before and just after a block."""
        return queue_transitions.neighbours(self._queue, block)

    def popleft(self) -> int | None:
        """Take out the block that leaves next."""
        return queue_transitions.popleft(self._queue)

    def remove(self, block: int) -> None:
        """Take a block out."""
        queue_transitions.remove(self._queue, block)

    def append(self, block: int) -> None:
        """Put a block at the back."""
        queue_transitions.append(self._queue, block)

    def prepend(self, block: int) -> None:
        """Put a block at the front."""
        queue_transitions.prepend(self._queue, block)

    def contains(self, block: int) -> bool:
        """Whether a block is in the queue."""
        return queue_transitions.check_block(self._queue, block) in self._queue

    def blocks(self) -> tuple[int, ...]:
        """All blocks, front first."""
        return tuple(self._queue)


def _make(backend: Any, num_blocks: int) -> Any:
    if backend == "python":
        return PureQueue(num_blocks)
    if backend != "rust":
        raise BackendMissing(backend=repr(backend), reason="there are 'python' and 'rust'")
    return _twin.make_queue(num_blocks)
