# SPDX-License-Identifier: Apache-2.0
"""What an observer learns from block tables: which blocks a call took, and which are findable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from kvcore.explain.contents import Contents
from kvcore.explain.known_tokens import LABEL
from kvcore.explain.lengths import mark_sizes
from kvcore.explain.requests import KnownRequest
from kvcore.state.state import NULL_BLOCK


class Tables:
    """The tables of a manager's requests, where each key stands for a whole block.

    contents: of the findable blocks. unpublished: requests with full blocks that had no key when
    they were last looked at. epoch: of the weights.
    """

    contents: Any

    def __init__(self, manager: Any) -> None:
        self.config = manager.config
        self.contents = Contents(manager)
        self.unpublished: dict[str, KnownRequest] = {}
        self.epoch = 0
        self._manager, self._has_key = manager, manager.has_key
        self._sizes = mark_sizes(self.config)
        self._groups = [g for g, each in enumerate(self.config.groups) if not each.is_cross]
        self._is_plain = len(self._sizes) == 1 and not self.config.has_windows

    def take(self, request: KnownRequest, blocks: list[int], kind: str) -> None:
        """Note new blocks that a call put into a request's table, in the order of the groups."""
        request.held += blocks
        if self.config.has_windows:  # which of its blocks have left its windows
            self.hold(request)
        self.contents.take(request.name, blocks, kind)

    def grow(self, request: KnownRequest, place: tuple[int, int], block: int) -> None:
        """Note a block that `append` put at a place (group, position) of a request's table."""
        self.contents.take(request.name, [block], "decode")
        request.places[place] = block
        if not request.has_moved:
            request.held.append(block)

    def step(self, request: KnownRequest, *, moved: bool) -> None:
        """Note what else `append` did to a request's table. moved: places of it were set."""
        del moved
        if request.is_odd:
            self.rewrite(request, "decode")

    def hold(self, request: KnownRequest) -> None:
        """Note all blocks of a request as held, and those that left its table as released."""
        held = request.held
        places: dict[tuple[int, int], int] = {}
        request.places = places
        for g, table in enumerate(self._manager.get_blocks(request.name).blocks):
            first = table.count(NULL_BLOCK) if self.config.null_block else 0
            blocks = table[first:]  # mostly those that left a window are the first ones
            named: Iterable[tuple[tuple[int, int], int]]
            named = zip(zip(repeat(g), range(first, len(table)), strict=False), blocks, strict=True)
            if first and NULL_BLOCK in blocks:
                named = (((g, place), each) for place, each in enumerate(table) if each)
            places.update(named)
        request.held = list(places.values())
        self.contents.release(set(held).difference(request.held))

    def rewrite(self, request: KnownRequest, kind: str) -> None:
        """Note the blocks that a call gave to a request, and the keys that its write ends."""
        self.contents.take(request.name, self._fresh(request), kind)
        if kind != "swap_in":
            self.contents.withdraw(kind, request.held)

    def trim(self, callers: list[KnownRequest], grown: Iterable[tuple[int, ...]]) -> None:
        """Note which blocks left windows in a call that grew tables, before it took any again."""
        for place, group_id, position, block in grown:
            request = callers[place]
            left = None if block else request.places.pop((group_id, position), None)
            if left is not None:
                self.contents.release([left])
                request.has_moved = True

    def publish(self, request: KnownRequest, kind: str = "unknown") -> None:
        """Note which full blocks of a request now have a key; none if it is of an older epoch.

        kind: of the call, if it may have written over other contents.
        """
        if request.epoch != self.epoch:
            return
        known = min(request.computed, len(request.labels) // LABEL)
        waits, tables = False, None
        for g in self._groups:
            first, full = request.published[g], known // self._sizes[g]
            if full <= first:
                continue
            table: Any = request.held
            if not self._is_plain or request.is_odd:
                tables = tables or self._manager.get_blocks(request.name).blocks
                table = tables[g]
            request.join()
            full = min(full, len(table))
            request.published[g] = self._publish(request, g, table, range(first, full), kind)
            waits |= request.published[g] < full
            if self.config.duplicates == "merge":
                self.hold(request)
        self._wait(request, waits=waits)

    def _publish(
        self, request: KnownRequest, g: int, table: Sequence[int], places: range, kind: str
    ) -> int:
        """Note the keys of full blocks. Returns the position of the first that has none yet."""
        position, first = places.start, places.stop
        while position < places.stop:
            content, end = request.run_from(g, position)
            blocks = table[position : min(end, places.stop)]
            if 0 not in blocks and all(map(self._has_key, blocks)):
                self.contents.mark_run(blocks, content, kind)
                position += len(blocks)
                continue
            for place, block in enumerate(blocks, position):
                if not block and self.config.null_block:
                    continue
                if self._has_key(block):
                    self.contents.mark(block, request.content(g, place), kind)
                else:
                    first = min(first, place)
            position += len(blocks)
        return first

    def publish_owed(self) -> None:
        """Note what got its keys after it had left the tables of its request: no whole block."""

    def _wait(self, request: KnownRequest, *, waits: bool) -> None:
        """Note whether blocks of a request are to become findable."""
        if waits:
            self.unpublished[request.name] = request
        elif self.unpublished:
            self.unpublished.pop(request.name, None)

    def _fresh(self, request: KnownRequest) -> list[int]:
        """Return the new blocks of a request, without those hit by their content; note all its
        blocks as held, and those that left as released.
        """
        held, before = set(request.held), request.places
        self.hold(request)
        fresh = []
        for (g, position), block in request.places.items():
            there = self.contents.of[block]
            if block in held and (there is None or before.get((g, position)) == block):
                continue
            is_same = there == request.content(g, position)
            if not (is_same and (block in held or self._has_key(block))):
                fresh.append(block)  # else a hit, since a part of a block may have that content
        return fresh
