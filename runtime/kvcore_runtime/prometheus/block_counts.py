# SPDX-License-Identifier: Apache-2.0
"""Counts the used, cached, free and quarantined blocks of a pool from the commands of batches.

Why: the manager does not count the free blocks whose content can still be hit, and a walk of the
pool in each step costs more than the step. The commands of a batch are read as whole columns.
"""

from __future__ import annotations

from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from kvcore import KVCacheManager
from kvcore.types.commands import COLUMNS, Allocate, Batch, Evict, EvictAll, Free, Touch
from kvcore.types.keys import HASH_SIZE, KEY_SIZE

_KIND, _BLOCK, _VALUE = (COLUMNS.index(name) for name in ("kind", "a", "b"))
_IS_OF_BLOCK = np.zeros(256, np.bool_)
_IS_OF_BLOCK[[Allocate.kind, Touch.kind, Free.kind, Evict.kind, EvictAll.kind]] = True

Column: TypeAlias = npt.NDArray[np.int32]
Flags: TypeAlias = npt.NDArray[np.bool_]
Places: TypeAlias = npt.NDArray[np.intp]


@attrs.frozen
class BlockStates:
    """Blocks of the device pool by state; their sum is the number of usable blocks.

    used: with an owner. cached: free, with content that can be hit. free: without such content.
    quarantined: without owner, used by a batch in flight.
    """

    used: int
    cached: int
    free: int
    quarantined: int


class BlockCounts:
    """Follows the batches of one manager. Walks the pool when it is made, and in `rest`."""

    def __init__(self, manager: KVCacheManager) -> None:
        config = manager.config
        self._manager = manager
        self._sizes = np.array([group.block_size for group in config.groups])
        self._is_idle = np.zeros(config.num_blocks, np.bool_)
        """For each block, whether it has content that can be hit, and no owner."""
        self._first = np.zeros(config.num_blocks, np.int32)
        """Scratch memory: for each block that a batch names, its first row."""
        self._is_idle[self._idle_blocks()] = True
        self._resting: int | None = None
        """Number of cached blocks as `rest` found it, until the next batch."""
        self._note_pool()
        self.num_evicted_tokens = 0
        """Number of tokens in free blocks whose content was evicted."""

    def update(self, batch: Batch) -> None:
        """Follow the commands of the batch that was taken last. O(commands of the batch)."""
        rows = np.frombuffer(batch.buffer, "<i4").reshape(len(COLUMNS), -1)
        at = np.flatnonzero(_IS_OF_BLOCK[rows[_KIND]])
        if at.size:
            kinds, blocks, values = rows[_KIND][at], rows[_BLOCK][at], rows[_VALUE][at]
            start = 0
            for reset in np.flatnonzero(kinds == EvictAll.kind).tolist():
                part = slice(start, reset)
                self._follow(kinds[part], blocks[part], values[part], batch.keys)
                self._is_idle[:] = False
                start = reset + 1
            self._follow(kinds[start:], blocks[start:], values[start:], batch.keys)
        self._resting = None
        self._note_pool()

    def rest(self) -> None:
        """Count what has been freed since the last batch, which no batch tells yet. O(blocks)."""
        self._note_pool()
        self._resting = sum(block not in self._quarantined for block in self._idle_blocks())

    def states(self) -> BlockStates:
        """Count the blocks by state after the last `update` or `rest`, without the manager."""
        free, quarantined = self._num_free, self._quarantined
        if self._resting is not None:
            cached = self._resting
        else:
            cached = int(np.count_nonzero(self._is_idle))
            cached -= int(np.count_nonzero(self._is_idle[list(quarantined)])) if quarantined else 0
        return BlockStates(
            used=self._manager.config.num_usable_blocks - free - len(quarantined),
            cached=cached,
            free=free - cached,
            quarantined=len(quarantined),
        )

    def _idle_blocks(self) -> list[int]:
        """Return the blocks that have content that can be hit, and no owner."""
        manager, config = self._manager, self._manager.config
        blocks = range(config.num_blocks - config.num_usable_blocks, config.num_blocks)
        keyed = [block for block in blocks if manager.has_key(block)]
        return [block for block in keyed if manager.num_owners(block) == 0]

    def _note_pool(self) -> None:
        self._num_free = self._manager.num_free_blocks
        self._quarantined = self._manager.quarantined_blocks

    def _follow(self, kinds: Column, blocks: Column, values: Column, keys: bytes) -> None:
        becomes_idle = (kinds == Free.kind) & (values != 0)
        evictions = np.flatnonzero(kinds == Evict.kind)
        if evictions.size:
            evicted = values[evictions[self._were_idle(blocks, becomes_idle, evictions)]]
            groups = np.frombuffer(keys, ">u4").reshape(-1, KEY_SIZE // 4)[:, HASH_SIZE // 4]
            self.num_evicted_tokens += int(self._sizes[groups[evicted]].sum())
        self._is_idle[blocks] = becomes_idle  # in order: the last row of a block counts

    def _were_idle(self, blocks: Column, becomes_idle: Flags, rows: Places) -> Flags:
        """Tell whether the blocks of these rows were idle just before their rows."""
        self._first[blocks[::-1]] = np.arange(len(blocks) - 1, -1, -1, dtype=np.int32)
        found = self._is_idle[blocks[rows]]
        for at in np.flatnonzero(self._first[blocks[rows]] < rows):
            before = np.flatnonzero(blocks[: rows[at]] == blocks[rows[at]])
            found[at] = becomes_idle[before[-1]]
        return found
