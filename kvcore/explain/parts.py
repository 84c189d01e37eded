# SPDX-License-Identifier: Apache-2.0
"""What an observer learns from tables whose keys may end inside blocks: parts, marked states.

A block may then have several keys, and lose some of them. Which tokens a key names, and which keys
a block has, is asked of the manager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
        kinds = self.config.groups
        self._states = [g for g in self._groups if kinds[g].is_state]
        self._trims = any(each.is_windowed and not each.is_state for each in kinds)

    def take(self, request: KnownRequest, blocks: list[int], kind: str) -> None:
        """Note new blocks that a call put into a request's table, and those that it copied."""
        del blocks
        self.rewrite(request, kind)

    def step(self, request: KnownRequest, *, moved: bool) -> None:
        """Note what else `append` did to a request's table. moved: places of it were set.

        Else its state was written in place, unless its block has a key or gets one.
        """
        if request.is_odd:
            self.rewrite(request, "decode")
        elif moved or self._may_stay(request.states.values()):
            tables, before = self._manager.get_blocks(request.name).blocks, request.states
            request.states = dict(self._held_states(tables))
            for block in before.values():
                if block not in request.states.values():
                    self.contents.release([block])
                    request.held.remove(block)
            if request.states != before:
                request.held += set(request.states.values()).difference(request.held)
            self._lose(request, "decode", request.states, before)

    def _may_stay(self, blocks: Iterable[int]) -> bool:
        """Return whether a block of these states may have been kept, and replaced by a copy."""
        of, owed = self.contents.of, self._owed
        return any(of[block] or block in owed for block in blocks)

    def rewrite(self, request: KnownRequest, kind: str) -> None:
        """Note the blocks that a call gave to a request, and the keys that its write ends."""
        before = request.places | request.states
        self.hold(request)
        self._lose(request, kind, request.places, before)

    def _lose(
        self,
        request: KnownRequest,
        kind: str,
        places: Mapping[tuple[int, int], int],
        before: Mapping[tuple[int, int], int],
    ) -> None:
        """Note the keys that blocks lost which were taken, or that were written over in place."""
        known: set[int] | None = None
        for (g, position), block in places.items():
            if not self.contents.of[block]:
                continue
            is_new = before.get((g, position)) != block
            if not is_new and (position + 1) * self.config.groups[g].block_size <= request.computed:
                continue
            if is_new:
                known = set(before.values()) if known is None else known
                if block in known:  # it left its place, and was taken again
                    self.contents.release([block])
            taker = request.name if is_new else None
            self.contents.lose(block, taker, kind, self._core.block_keys(block))

    def trim(self, callers: list[KnownRequest], grown: Iterable[tuple[int, ...]]) -> None:
        """Note which blocks left windows in a call that grew tables, before it took any again."""
        if self._trims:
            for place in dict.fromkeys(place for place, *_ in grown):
                self.rewrite(callers[place], "decode")

    def publish(self, request: KnownRequest, kind: str = "unknown") -> None:
        """Note the keys of a request's blocks; none if it is of an older epoch."""
        del kind
        if request.epoch != self.epoch:
            return
        known = min(request.computed, len(request.labels) // LABEL)
        is_open = request.step == self.contents.step
        waits = is_open and known > 0
        request.join()
        for g, table in enumerate(self._manager.get_blocks(request.name).blocks):
            if is_open and self.config.groups[g].is_state:
                self._owe(request, g, table)
            size, first = self.config.groups[g].block_size, request.published[g]
            is_whole = self._sizes[g] == size  # its keys are those of whole blocks
            end = known // size if is_whole else len(table)
            unit, start, own = self._sizes[g], -1, list[int]()
            for position, block in enumerate(table[first:end], first):
                is_done = not block and self.config.null_block
                if not is_done and is_whole:
                    is_done = self._look_whole(request, g, position, block)
                    waits |= not is_done and not self.config.groups[g].is_state
                elif not is_done:
                    if start < 0:
                        start = position * size
                        own = self._core.prefix_keys(request.name, g, start, end * size)
                    at = (position * size - start) // unit
                    keys = own[at : at + size // unit]
                    is_done, lacks_key = self._look(request, g, position, block, keys)
                    waits |= lacks_key and not self.config.groups[g].is_state
                if is_done and (is_whole or not is_open) and request.published[g] == position:
                    request.published[g] = position + 1
        if self.config.duplicates == "merge":
            held = request.held
            self.hold(request)  # a block that another one replaces loses the keys of its parts
            self.contents.withdraw("take_batch", set(held).difference(request.held))
        self._wait(request, waits=waits)

    def publish_owed(self) -> None:
        """Note the states that got their keys after they had left the tables of their requests."""
        for block, (key, content) in list(self._owed.items()):
            if key in self._core.block_keys(block):
                self.contents.add(block, key, content)
            elif self.config.publish == "completed" and self._manager.num_owners(block):
                continue  # its batch is not finished, or it is no checkpoint
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
        super().hold(request)
        if self._states:
            tables = self._manager.get_blocks(request.name).blocks
            request.states = dict(self._held_states(tables))

    def _held_states(
        self, tables: Sequence[Sequence[int]]
    ) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the states of a request with their places, which are the last ones."""
        for g in self._states:
            table = tables[g]
            first = max(0, len(table) - self.config.groups[g].draft_states - 3)
            for position in range(first, len(table)):
                if table[position]:
                    yield (g, position), table[position]

    def _look(
        self, request: KnownRequest, g: int, position: int, block: int, own: Sequence[int]
    ) -> tuple[bool, bool]:
        """Note the keys of one block. Returns whether it is full and has its own key, and whether a
        key is to come. own: the keys of what the request has there.
        """
        size, unit = self.config.groups[g].block_size, self._sizes[g]
        start, there = position * size, set(self._core.block_keys(block))
        known = min(request.computed, len(request.labels) // LABEL, start + size) // unit * unit
        if not there and known <= start:
            return False, False
        noted = self.contents.of[block]
        (content, end), at = request.run_from(g, start // unit), start // unit
        for place, key in enumerate(own, start // unit):
            if key in there and key not in noted:
                if place >= end:
                    (content, end), at = request.run_from(g, place), place
                self.contents.add(block, key, (content[0], g, content[2] + place - at))
        num_known = (known - start) // unit
        lacks_key = num_known > 0 and not there.intersection(own[num_known - 1 : num_known])
        comes = self.config.publish == "completed" or known == start + size
        return len(own) * unit == size and own[-1] in there, lacks_key and comes

    def _look_whole(self, request: KnownRequest, g: int, position: int, block: int) -> bool:
        """Note the key of a full block whose only key is its own. Returns whether it has one."""
        for key in self._core.block_keys(block):
            self.contents.add(block, key, request.content(g, position))
            return True
        return False
