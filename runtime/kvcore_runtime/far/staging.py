# SPDX-License-Identifier: Apache-2.0
"""Staging slots: host memory between the cache and a far tier, and the tier of the batches.

A batch's `Store` copies its block into the slot that is marked for its key, and its `Load` copies
from one. No network can make either fail. The batches may run in a forked process, so slots and
marks lie in shared memory.
Invariants: STAGING: each slot is free, or has one user; a mark stands for one operation.
"""

from __future__ import annotations

import mmap
from typing import Literal

import torch
from torch import Tensor

from kvcore.types.keys import KEY_SIZE
from kvcore_runtime.cache.errors import BlockMissing
from kvcore_runtime.cache.host_memory import allocate
from kvcore_runtime.far.errors import InvalidTier
from kvcore_runtime.far.page import PAYLOAD_START, begin_page, seal_page

Use = Literal["load", "store"]
NUM_SLOTS_MIN = 3
_ALIGNMENT = 4096
_MARK_SIZE = 1 + KEY_SIZE
_KINDS: dict[Use, bytes] = {"load": b"L", "store": b"S"}


class Staging:
    """Holds num_slots slots, each for a page of page_bytes and its header. Raises InvalidTier."""

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        if num_slots < NUM_SLOTS_MIN:
            expected = f"at least {NUM_SLOTS_MIN}"
            raise InvalidTier(name="staging_pages", value=num_slots, expected=expected)
        size = PAYLOAD_START + page_bytes
        stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        cpu = torch.device("cpu")
        self._slots = allocate((num_slots, stride), torch.uint8, cpu, shared=True)
        self.memory = memoryview(self._slots.view(-1).numpy().data)
        self.views = [self.memory[at * stride : at * stride + size] for at in range(num_slots)]
        self._pages = [each[PAYLOAD_START:size] for each in self._slots]
        self._marks = mmap.mmap(-1, num_slots * _MARK_SIZE)
        self._free = list(range(num_slots))
        self._uses: dict[int, Use] = {}
        self._num_each_max = num_slots - num_slots // 3  # a third is reserved for the other use

    @property
    def used(self) -> frozenset[int]:
        """The slots that are not free."""
        return frozenset(self._uses)

    def num_free(self, use: Use) -> int:
        """Return the number of slots that `take` would give."""
        used = sum(each == use for each in self._uses.values())
        return min(len(self._free), self._num_each_max - used)

    def take(self, use: Use, num_slots: int) -> list[int]:
        """Take up to num_slots free slots."""
        count = min(num_slots, self.num_free(use))
        taken, self._free = self._free[:count], self._free[count:]
        self._uses |= dict.fromkeys(taken, use)
        return taken

    def give_back(self, slot: int) -> None:
        """Free a slot, so that it can be taken again."""
        self.unmark(slot)
        del self._uses[slot]
        self._free.append(slot)

    def mark(self, slot: int, key: bytes, identity: bytes) -> None:
        """Mark a slot for the operation of this key, by the slot's use a store or a load."""
        use = self._uses[slot]
        if use == "store":
            begin_page(self.views[slot], identity, key)
        at = slot * _MARK_SIZE
        self._marks[at + 1 : at + _MARK_SIZE] = key
        self._marks[at : at + 1] = _KINDS[use]  # last: a reader sees a complete mark or none

    def unmark(self, slot: int) -> None:
        """Remove the mark of a slot, so that no operation uses it."""
        self._marks[slot * _MARK_SIZE] = 0

    def store(self, key: bytes, page: Tensor) -> None:
        """See `ExternalTier`: copy a page into its slot and seal it. Raises BlockMissing."""
        slot = self._marked("store", key)
        self._pages[slot].copy_(page)
        seal_page(self.views[slot])

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """See `ExternalTier`: return the verified page in its slot. Raises BlockMissing."""
        page: Tensor = self._pages[self._marked("load", key)][:num_bytes]
        return page

    def _marked(self, use: Use, key: bytes) -> int:
        """Find the slot that is marked for a key."""
        mark, at = _KINDS[use] + key, -1
        while (at := self._marks.find(mark, at + 1)) >= 0:
            if at % _MARK_SIZE == 0:
                return at // _MARK_SIZE
        raise BlockMissing(key=key.hex(), place="the staging slots")
