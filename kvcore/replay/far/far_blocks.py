# SPDX-License-Identifier: Apache-2.0
"""The blocks of a far tier in a replay, by key; the least recently used leaves first.

Only blocks of prompts are kept: no later prompt of a trace contains the answers of an earlier one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvcore.replay.results import StorePolicy


class FarBlocks:
    """At most num_blocks blocks. num_written: how often one was stored.

    policy: a block is stored once it is computed ("publication"), or once a second prompt has it
    ("second_use").
    """

    def __init__(self, num_blocks: int, policy: StorePolicy) -> None:
        self._num_blocks = num_blocks
        self._waits = policy == "second_use"
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._seen: set[bytes] = set()
        self.num_written = 0

    def count(self, keys: Sequence[bytes], start: int, end: int) -> int:
        """Count the stored blocks from `start` on, up to `end` or the first gap; mark them as
        used.
        """
        position = start
        while position < end and keys[position] in self._blocks:
            self._blocks.move_to_end(keys[position])
            position += 1
        return position - start

    def computed(self, keys: Sequence[bytes]) -> None:
        """Note the blocks of a prompt that was computed."""
        for key in keys:
            if key in self._blocks:
                continue
            if self._waits and key not in self._seen:
                self._seen.add(key)
                continue
            self.num_written += 1
            self._blocks[key] = None
            if len(self._blocks) > self._num_blocks:
                self._blocks.popitem(last=False)
