# SPDX-License-Identifier: Apache-2.0
"""The memory of staging slots: between the cache and a far tier, and the tier of the batches.

A batch's `Store` copies its block into the slot that is marked for its key, and its `Load` copies
from one. No network can make either fail. The batches may run in a forked process, so slots and
marks lie in shared memory.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from kvcore.far.errors import InvalidTier
from kvcore.far.page import PAYLOAD_START, seal_page
from kvcore.far.slots import MARK_SIZE, Slots, Use
from kvcore_runtime.cache.errors import BlockMissing
from kvcore_runtime.cache.host_memory import allocate

NUM_SLOTS_MIN = 3
_ALIGNMENT = 4096


class Staging(Slots):
    """Holds num_slots slots, each for a page of page_bytes and its header. Raises InvalidTier.

    memory: of all slots. slot_bytes: of each.
    """

    def __init__(self, num_slots: int, page_bytes: int) -> None:
        if num_slots < NUM_SLOTS_MIN:
            expected = f"at least {NUM_SLOTS_MIN}"
            raise InvalidTier(name="staging_pages", value=num_slots, expected=expected)
        size = PAYLOAD_START + page_bytes
        stride = -(-size // _ALIGNMENT) * _ALIGNMENT
        cpu = torch.device("cpu")
        memory = allocate((num_slots, stride), torch.uint8, cpu, shared=True)
        self.memory = memoryview(memory.view(-1).numpy().data)
        views = [self.memory[at * stride : at * stride + size] for at in range(num_slots)]
        super().__init__(views, mmap.mmap(-1, num_slots * MARK_SIZE))
        self.slot_bytes = size
        self._pages = [each[PAYLOAD_START:size] for each in memory]

    def store(self, key: bytes, page: Tensor) -> None:
        """See `ExternalTier`: copy a page into its slot and seal it. Raises BlockMissing."""
        slot = self._slot("store", key)
        self._pages[slot].copy_(page)
        seal_page(self.views[slot])

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """See `ExternalTier`: return the verified page in its slot. Raises BlockMissing."""
        page: Tensor = self._pages[self._slot("load", key)][:num_bytes]
        return page

    def _slot(self, use: Use, key: bytes) -> int:
        slot = self.marked(use, key)
        if slot is None:
            raise BlockMissing(key=key.hex(), place="the staging slots")
        return slot
