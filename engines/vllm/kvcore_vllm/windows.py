# SPDX-License-Identifier: Apache-2.0
"""Blocks behind a window that a step in flight still reads, held until its output arrives.

The core gives a block back once no later query sees it. vLLM keeps it while tokens are in flight,
since an asynchronous load may write to a free block before the step that reads it is over.
"""

from __future__ import annotations

from kvcore.compat import KVCacheManager
from kvcore.types.groups import skipped_blocks


class Windows:
    """Pins of such blocks, by request, group and position in the table."""

    def __init__(self, compat: KVCacheManager) -> None:
        self._compat = compat
        self._held: dict[str, dict[tuple[int, int], int]] = {}

    def hold(self, name: str, num_computed: int, num_in_flight: int) -> None:
        """Unpin what no step reads any more, and pin what this count is about to give back."""
        processed = max(0, num_computed - num_in_flight)
        self.release(name, processed)
        if not num_in_flight:
            return
        held, tables = self._held.setdefault(name, {}), self._compat.get_block_ids(name)
        for number, group in enumerate(self._compat.config.groups):
            end = min(len(tables[number]), skipped_blocks(group, num_computed))
            for place in range(skipped_blocks(group, processed), end):
                block = tables[number][place]
                if block != 0 and (number, place) not in held:
                    self._compat.core.pin([block])
                    held[number, place] = block

    def release(self, name: str, processed: int) -> None:
        """Unpin the blocks that no query from this count on sees, the newest first."""
        held = self._held.get(name)
        if not held:
            return
        groups = self._compat.config.groups
        over = [at for at in held if at[1] < skipped_blocks(groups[at[0]], processed)]
        self._compat.remove_skipped_blocks(name, processed)  # those in the table are the newest
        over.sort(key=lambda at: (at[0], -at[1]))
        self._compat.core.unpin([held.pop(at) for at in over])
        if not held:
            del self._held[name]

    def complete(self, name: str, tables: tuple[list[int], ...]) -> tuple[list[int], ...]:
        """Put the held blocks back into their positions of the tables. Returns the tables."""
        for (group, place), block in self._held.get(name, {}).items():
            tables[group][place] = block
        return tables

    def pop(self, name: str) -> list[int]:
        """Forget a request. Returns its held blocks, whose pins the caller takes over."""
        return list(self._held.pop(name, {}).values())
