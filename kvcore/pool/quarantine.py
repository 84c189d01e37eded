# SPDX-License-Identifier: Apache-2.0
"""Quarantine: blocks without an owner that a batch in flight still reads or writes.

Invariants: quarantined blocks keep their content and can be hit, but are not available. `busy`
names the batches that still use a block, because a table dropped the block while they ran, or
because they copy from or to it. Each release checks this again. When no such batch is left, the
blocks join the free queue in the order of their release.
Twin: rust/src/pool/quarantine.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from immutables import Map

from kvcore.pool.free_queue import FreeQueue, FreeQueueTransaction, make_free_queue


@attrs.frozen
class Quarantine:
    """The quarantine of one pool as a value.

    queue: its blocks, in the order of their release. busy: block -> the batches that use it.
    """

    queue: FreeQueue
    busy: Map[int, frozenset[int]] = Map()

    def __iter__(self) -> Iterator[int]:
        return iter(self.queue)

    def __len__(self) -> int:
        return len(self.queue)


def make_quarantine(num_blocks: int) -> Quarantine:
    """Make an empty quarantine for blocks 0 to num_blocks - 1."""
    return Quarantine(make_free_queue(num_blocks, []))


class QuarantineTransaction:
    """A quarantine inside a transition: changed in place, frozen at the end.

    If it was not changed, it freezes to the original value.
    """

    __slots__ = ("busy", "quarantine", "queue")

    def __init__(self, quarantine: Quarantine) -> None:
        self.quarantine = quarantine
        self.queue = FreeQueueTransaction(quarantine.queue)
        self.busy = quarantine.busy

    def freeze(self) -> Quarantine:
        """Return the quarantine as an immutable value."""
        old, queue = self.quarantine, self.queue.freeze()
        if queue is old.queue and self.busy is old.busy:
            return old
        return Quarantine(queue, self.busy)

    def use(self, block: int, number: int) -> None:
        """Note that a batch uses a block."""
        self.busy = self.busy.set(block, self.busy.get(block, frozenset()) | {number})

    def end_use(self, ended: Callable[[int], bool]) -> None:
        """Note that the batches with these numbers have ended; no block leaves yet."""
        if not self.busy:
            return
        busy = self.busy.mutate()
        for block, numbers in self.busy.items():
            left = frozenset(number for number in numbers if not ended(number))
            if left:
                busy[block] = left
            else:
                del busy[block]
        self.busy = busy.finish()

    def end(self) -> Iterator[int]:
        """Remove and return the blocks that no batch uses, in the order of their release."""
        for block in list(self.queue):
            if block not in self.busy:
                self.queue.remove(block)
                yield block
