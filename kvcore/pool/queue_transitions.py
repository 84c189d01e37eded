# SPDX-License-Identifier: Apache-2.0
"""The free queue by itself, for managers whose blocks are objects of their own.

Rules: a block stands in the queue once. What is asked is checked first, so that a call which raises
leaves the queue as it was; here it is changed in place. Source: S001-10 to S001-20. Twin:
rust/src/pool/queue_transitions.rs.
"""

from __future__ import annotations

from typing import Any

from kvcore.pool.free_queue import FreeQueueTransaction
from kvcore.types.arguments import read_int
from kvcore.types.errors import AlreadyQueued, NotQueued, UnknownBlock


def popleft(queue: FreeQueueTransaction) -> int | None:
    """Take out the block that leaves next, if there is one."""
    block = queue.front()
    if block == queue.sentinel:
        return None
    queue.remove(block)
    return block


def remove(queue: FreeQueueTransaction, block: int) -> None:
    """Take a block out, from wherever it is. Raises UnknownBlock, NotQueued."""
    known = check_block(queue, block)
    if known not in queue:
        raise NotQueued(block=known)
    queue.remove(known)


def append(queue: FreeQueueTransaction, block: int) -> None:
    """Put a block at the back. Raises UnknownBlock, AlreadyQueued."""
    queue.append(_check_outside(queue, block))


def prepend(queue: FreeQueueTransaction, block: int) -> None:
    """Put a block at the front. Raises UnknownBlock, AlreadyQueued."""
    queue.prepend(_check_outside(queue, block))


def back(queue: FreeQueueTransaction) -> int | None:
    """The block that leaves last, if there is one. Does not modify the queue."""
    block = queue.preceding[queue.sentinel]
    return None if block == queue.sentinel else block


def neighbours(queue: FreeQueueTransaction, block: int) -> tuple[int | None, int | None]:
    """What leaves just before and just after a block; none where it is not in the queue.

    Does not modify the queue. Raises UnknownBlock.
    """
    known = check_block(queue, block)
    nothing = (known, queue.sentinel)
    before, after = queue.preceding[known], queue.following[known]
    return None if before in nothing else before, None if after in nothing else after


def check_block(queue: FreeQueueTransaction, block: Any) -> int:
    """The block of this number. Raises UnknownBlock."""
    number, last = read_int(block), queue.sentinel - 1
    if not isinstance(number, int) or not 0 <= number <= last:
        raise UnknownBlock(block=number, first=0, last=last)
    return number


def _check_outside(queue: FreeQueueTransaction, block: Any) -> int:
    known = check_block(queue, block)
    if known in queue:
        raise AlreadyQueued(block=known)
    return known
