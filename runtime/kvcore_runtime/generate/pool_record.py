# SPDX-License-Identifier: Apache-2.0
"""Records, step by step, the use of every block of the pool and the activity of every request.

Owners of blocks, and whether they can still be hit, follow from the commands: an observer needs
only the batches, applied or in flight. Samples of one request count as that request.
"""

import enum

import attrs
import numpy as np
from numpy.typing import NDArray

from kvcore.types.commands import Allocate, Batch, CutTable, Evict, EvictAll, Free, SetTable, Touch
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.engine.exchange import is_null
from kvcore_runtime.engine.sequence import Sequence

FREE = 0
CACHED = 1
SHARED = 2
FIRST_REQUEST = 3
"""What a block is: free, cached without owner, owned by several, or FIRST_REQUEST + the request."""


class Life(enum.Enum):
    """A request's activity in a step."""

    RUNNING = "running"
    SWAPPED = "swapped out"
    WAITING = "waiting again, to be computed anew"


@attrs.define(eq=False)
class PoolRecord:
    """An engine's observer.

    request_ids: in the order of their first step; a request's number is its index there. frames:
    the blocks of each step, [num_blocks] int16. lives: the begun requests of each step, by number.
    """

    request_ids: list[str] = attrs.field(factory=list)
    frames: list[NDArray[np.int16]] = attrs.field(factory=list)
    lives: list[dict[int, Life]] = attrs.field(factory=list)
    _cached: set[int] = attrs.field(factory=set, repr=False)
    _tables: dict[tuple[int, int], list[int]] = attrs.field(factory=dict, repr=False)

    def __call__(self, engine: Engine, batch: Batch) -> None:
        """Record one step, whose batch was just applied or submitted."""
        self._follow(batch)
        scheduler, num_groups = engine.scheduler, engine.runtime.tables.num_groups
        frame = np.full(engine.manager.config.num_blocks, FREE, dtype=np.int16)
        frame[sorted(self._cached)] = CACHED
        owned: set[int] = set()
        for sequence in (*scheduler.running, *scheduler.loading):
            blocks = [
                block
                for group_id in range(num_groups)
                for block in self._tables.get((sequence.row, group_id), ())
                if not is_null(engine.manager.config, block)
            ]
            frame[blocks] = FIRST_REQUEST + self._number(sequence)
            frame[[block for block in blocks if block in owned]] = SHARED
            owned.update(blocks)
        self.frames.append(frame)
        life: dict[int, Life] = {}
        for sequence in scheduler.waiting:
            if sequence.request.request_id in self.request_ids:
                life[self._number(sequence)] = Life.WAITING
        for state, queue in (
            (Life.SWAPPED, scheduler.swapped),
            (Life.RUNNING, [*scheduler.running, *scheduler.loading]),
        ):
            life |= {self._number(sequence): state for sequence in queue}
        self.lives.append(life)

    def blocks(self) -> NDArray[np.int16]:
        """Stack all frames, [num_steps, num_blocks]."""
        return np.stack(self.frames)

    def _number(self, sequence: Sequence) -> int:
        name = sequence.request.request_id
        if name not in self.request_ids:
            self.request_ids.append(name)
        return self.request_ids.index(name)

    def _follow(self, batch: Batch) -> None:
        """Follow the tables, and which blocks have a key but no owner."""
        for command in batch:
            match command:
                case Free(block, cached=True):
                    self._cached.add(block)
                case Free(block) | Evict(block) | Allocate(block) | Touch(block):
                    self._cached.discard(block)
                case EvictAll():
                    self._cached.clear()
                case SetTable(row, group_id, position, block):
                    table = self._tables.setdefault((row, group_id), [])
                    table[position : position + 1] = [block]
                    self._cached.discard(block)
                case CutTable(row, group_id, length):
                    del self._tables.setdefault((row, group_id), [])[length:]
