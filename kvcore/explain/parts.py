# SPDX-License-Identifier: Apache-2.0
"""The same for managers whose keys may end inside blocks: tails of attention, marked states.

A block may then have several keys, and lose some of them. Which tokens a key names, and which keys
a block has, is asked of the manager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from kvcore.explain.contents import Content, Contents
from kvcore.explain.known_tokens import LABEL
from kvcore.explain.requests import KnownRequest
from kvcore.explain.tables import Tables


class PartContents(Contents):
    """The contents of a manager's findable device blocks. of: by block, the content of each key."""

    of: list[dict[int, Content]]  # type: ignore[assignment] # a block has several

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self._keys = manager._core.block_keys

    def clear(self) -> None:
        """Forget all contents: no key is left."""
        super().clear()
        self.of = [{} for _ in self.of]

    def take(self, taker: str, blocks: Iterable[int], kind: str) -> None:
        """Note that a call took blocks, whose contents are gone."""
        for block in blocks:
            self.lose(block, taker, kind, ())

    def withdraw(self, name: str, blocks: Iterable[int]) -> None:
        """Note which of the keys of these blocks are lost."""
        for block in blocks:
            if self.of[block]:
                self.lose(block, None, name, self._keys(block))

    def lose(self, block: int, taker: str | None, kind: str, keys: Collection[int]) -> None:
        """Note that a block has only these keys left."""
        there = self.of[block]
        for key in [key for key in there if key not in keys]:
            self._lose(block, there.pop(key), taker, kind)

    def add(self, block: int, key: int, content: Content) -> None:
        """Note that a key of a block makes a content findable."""
        if key not in self.of[block]:
            self.of[block][key] = content
            self._find(content)


class PartTables(Tables):
    """The tables of a manager's requests, where a block may have several keys."""

    contents: PartContents

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self.contents = PartContents(manager)
        self._core = manager._core
        self._owed: dict[int, tuple[int, Content]] = {}

    def take(self, request: KnownRequest, blocks: list[int], kind: str) -> None:
        """Note new blocks that a call put into a request's table, and those that it copied."""
        del blocks
        self.rewrite(request, kind)

    def grow(self, request: KnownRequest, place: tuple[int, int], block: int) -> None:
        """Note a block that `append` put at a place (group, position) of a request's table."""
        super().grow(request, place, block)
        request.places[block] = place

    def rewrite(self, request: KnownRequest, kind: str) -> None:
        """Note the blocks that a call gave to a request, and the keys that its write ends."""
        before = request.places
        self.hold(request)
        for block, place in request.places.items():
            if self.contents.of[block]:
                taker = None if before.get(block) == place else request.name
                if taker is not None and block in before:  # it left its place, and was taken again
                    self.contents.release([block])
                self.contents.lose(block, taker, kind, self._core.block_keys(block))

    def trim(self, callers: list[KnownRequest], grown: Iterable[tuple[int, ...]]) -> None:
        """Note which blocks left windows in a call that grew tables, before it took any again."""
        for place in dict.fromkeys(place for place, *_ in grown):
            self.rewrite(callers[place], "decode")

    def publish(self, request: KnownRequest, kind: str = "unknown") -> None:
        """Note the keys of a request's blocks; none if it is of an older epoch."""
        del kind
        if request.epoch != self.epoch:
            return
        known = min(request.computed, len(request.labels) // LABEL)
        is_open, waits = request.step == self.contents.step, False
        request.join()
        for g, table in enumerate(self._manager.get_blocks(request.name).blocks):
            if is_open and self.config.groups[g].is_state:
                self._owe(request, g, table)
            first = request.published[g]
            for position, block in enumerate(table[first:], first):
                is_done = not block and self.config.null_block
                if not is_done:
                    is_done = self._publish(request, g, position, block)
                    waits |= not is_done
                if is_done and not is_open and request.published[g] == position:
                    request.published[g] = position + 1
        if self.config.duplicates == "merge":
            self.hold(request)
        self._wait(request, waits=waits or (is_open and known > 0))

    def publish_owed(self) -> None:
        """Note the states that got their keys after they had left the tables of their requests."""
        for block, (key, content) in list(self._owed.items()):
            if key in self._core.block_keys(block):
                self.contents.add(block, key, content)
                del self._owed[block]

    def _owe(self, request: KnownRequest, g: int, table: tuple[int, ...]) -> None:
        """Note the state that the open batch writes, if it may become findable."""
        end, unit = request.computed, self._sizes[g]
        position = (end - 1) // self.config.groups[g].block_size
        if end and end % unit == 0 and position < len(table):
            for key in self._core.prefix_keys(request.name, g, end - unit, end):
                self._owed[table[position]] = key, request.content(g, end // unit - 1)

    def hold(self, request: KnownRequest) -> None:
        """Note all blocks of a request as held, and those that left its table as released."""
        held = request.held
        request.places = dict(self._places(request))
        request.held = list(request.places)
        self.contents.release(set(held).difference(request.places))

    def _places(self, request: KnownRequest) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the blocks of a request with their places."""
        for g, table in enumerate(self._manager.get_blocks(request.name).blocks):
            for position, block in enumerate(table):
                if block or not self.config.null_block:
                    yield block, (g, position)

    def _publish(self, request: KnownRequest, g: int, position: int, block: int) -> bool:
        """Note the keys of one block. True: it is full and has its own key."""
        size, unit = self.config.groups[g].block_size, self._sizes[g]
        start, there = position * size, self._core.block_keys(block)
        if not there:
            return False
        own = self._core.prefix_keys(request.name, g, start, start + size)
        for number, key in enumerate(own):
            if key in there:
                self.contents.add(block, key, request.content(g, start // unit + number))
        return len(own) * unit == size and own[-1] in there
