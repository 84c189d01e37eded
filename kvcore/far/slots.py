# SPDX-License-Identifier: Apache-2.0
"""Staging slots: which are free, who uses the others, and the marks that batches find them by.

A mark stands for one store or load of a key, and the batch that carries it out uses its slot.
Invariants: STAGING: each slot is free, or has one user; a mark stands for one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Literal

from kvcore.far.page import begin_page
from kvcore.far.tier import View
from kvcore.types.keys import KEY_SIZE

Use = Literal["load", "store"]
MARK_SIZE = 1 + KEY_SIZE
_KINDS: dict[Use, bytes] = {"load": b"L", "store": b"S"}


class Slots:
    """The slots of an exchange. views: the bytes of each. marks: MARK_SIZE bytes for each, 0."""

    def __init__(self, views: Sequence[View], marks: mmap | bytearray) -> None:
        self.views = views
        self._marks = marks
        self._free = list(range(len(views)))
        self._uses: dict[int, Use] = {}
        # A third is reserved for the other use.
        self._num_each_max = len(views) - len(views) // 3

    @property
    def used(self) -> frozenset[int]:
        """The slots that are not free."""
        return frozenset(self._uses)

    @property
    def with_marks(self) -> frozenset[int]:
        """The slots that are marked."""
        return frozenset(each for each in self._uses if self._marks[each * MARK_SIZE])

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
        at = slot * MARK_SIZE
        self._marks[at + 1 : at + MARK_SIZE] = key
        self._marks[at : at + 1] = _KINDS[use]  # last: a reader sees a complete mark or none

    def unmark(self, slot: int) -> None:
        """Remove the mark of a slot, so that no operation uses it."""
        self._marks[slot * MARK_SIZE] = 0

    def marked(self, use: Use, key: bytes) -> int | None:
        """Return the slot that is marked for a key, or None."""
        mark, at = _KINDS[use] + key, -1
        while (at := self._marks.find(mark, at + 1)) >= 0:
            if at % MARK_SIZE == 0:
                return at // MARK_SIZE
        return None
