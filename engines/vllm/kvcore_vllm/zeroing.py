# SPDX-License-Identifier: Apache-2.0
"""The blocks that workers zero before a step: new ones, unless a load writes them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec

Tables = Sequence[Sequence[int]]


class Zeroing:
    """Collects blocks until they are taken. wanted: whether this cache needs zeroing."""

    def __init__(self, specs: Sequence[Any], *, wanted: bool) -> None:
        self.wanted = wanted
        self._groups = [number for number, s in enumerate(specs) if isinstance(s, AttentionSpec)]
        self._blocks: list[int] = []

    def note(self, tables: Tables, skipped: Sequence[int] = ()) -> None:
        """Note the blocks of all groups except the skipped ones; the null block is never zeroed."""
        for number in self._groups if self.wanted else ():
            if number not in skipped:
                self._blocks += [each for each in tables[number] if each != 0]

    def take(self) -> list[int]:
        """Return the blocks that were noted since the last call."""
        taken, self._blocks = self._blocks, []
        return taken
