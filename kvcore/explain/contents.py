# SPDX-License-Identifier: Apache-2.0
"""What findable blocks hold, how each key was lost, and when each block last had an owner."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.explain.explanation import Removal
from kvcore.explain.known_tokens import FINDABLE, NEVER, REMOVED, Segment

Content = tuple[Segment, int, int]
"""A segment, a group, and the index of the mark."""


class Contents:
    """The contents of a manager's findable device blocks. Changes their marks.

    of: by block. removals: those that marks name. call, step: of the call that is noted.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._has_key = manager.has_key
        self._freed = array("I", bytes(4 * manager.config.num_blocks))
        self.removals: list[Removal] = []
        self.call = self.step = 0
        self.clear()

    def clear(self) -> None:
        """Forget all contents: no key is left."""
        self.of: list[Content | None] = [None] * self._manager.config.num_blocks
        self._copies: dict[Content, int] = {}

    def release(self, blocks: Iterable[int]) -> None:
        """Note that a request no longer owns these blocks."""
        for block in blocks:
            self._freed[block] = self.step

    def take(self, taker: str, blocks: Iterable[int], kind: str) -> None:
        """Note that a call took blocks, whose contents are gone."""
        of, freed, number, last = self.of, self._freed, -1, -1
        for block in blocks:
            content = of[block]
            if content is None:
                continue
            of[block] = None
            if self._copies and content in self._copies:
                self._lose(block, content, taker, kind)
                continue
            if number < 0 or freed[block] != last:
                last = freed[block]
                number = self._removal(taker, kind, self.step - last)
            segment, group_id, place = content
            segment.marks[group_id][place] = REMOVED + number

    def _remove(self, block: int, taker: str | None, kind: str) -> None:
        content = self.of[block]
        assert content is not None
        self.of[block] = None
        self._lose(block, content, taker, kind)

    def _lose(self, block: int, content: Content, taker: str | None, kind: str) -> None:
        """Note that a block makes a content findable no more."""
        copies = self._copies.pop(content, 1) - 1
        if copies:
            if copies > 1:
                self._copies[content] = copies
            return
        is_owned = taker is None and self._manager.num_owners(block)
        number = self._removal(taker, kind, 0 if is_owned else self.step - self._freed[block])
        segment, group_id, place = content
        segment.marks[group_id][place] = REMOVED + number

    def _removal(self, taker: str | None, kind: str, idle: int) -> int:
        """Return the number of a removal by this call; neighbouring equal ones are one."""
        removals = self.removals
        last = removals[-1] if removals else None
        if last is None or (last.call, last.idle_steps, last.request) != (self.call, idle, taker):
            removals.append(Removal(taker, self.call, kind, self.step, idle))
        return len(removals) - 1

    def withdraw(self, name: str, blocks: Iterable[int]) -> None:
        """Note which of these blocks have lost their keys."""
        for block in blocks:
            if self.of[block] is not None and not self._has_key(block):
                self._remove(block, None, name)

    def mark(self, block: int, content: Content, kind: str) -> None:
        """Note that a block makes a content findable, after a call of this kind."""
        there = self.of[block]
        if there is not None:
            if there == content:
                return
            self._remove(block, None, kind)
        self.of[block] = content
        self._find(content)

    def mark_run(self, blocks: Sequence[int], content: Content, kind: str) -> None:
        """Note that blocks make a content and those behind it in its segment findable."""
        segment, group_id, first = content
        of, marks = self.of, segment.marks[group_id]
        missing = first + len(blocks) - len(marks)
        if missing > 0:
            marks.extend([NEVER] * missing)
        for place, block in enumerate(blocks, first):
            there, content = of[block], (segment, group_id, place)
            if there is not None:
                if there == content:
                    continue
                self._remove(block, None, kind)
            of[block] = content
            if marks[place] == FINDABLE:
                self._copies[content] = self._copies.get(content, 1) + 1
            marks[place] = FINDABLE

    def _find(self, content: Content) -> None:
        """Note that one more block makes a content findable."""
        segment, group_id, place = content
        marks = segment.marks[group_id]
        if place >= len(marks):
            marks.extend([NEVER] * (place + 1 - len(marks)))
        if marks[place] == FINDABLE:
            self._copies[content] = self._copies.get(content, 1) + 1
        marks[place] = FINDABLE
