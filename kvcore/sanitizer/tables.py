# SPDX-License-Identifier: Apache-2.0
"""The requests, their tables, and the requests affected by the change of a block."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.contents import BlockAddress, Blocks, Event
from kvcore.sanitizer.requests import DISTURBED, Followed

DEVICE = "device"


class Tables:
    """Requests and blocks, changed in the order of issue.

    A claim is a place of a table that names a block and that its request may still see.
    """

    def __init__(self, groups: Sequence[CacheGroup], _: int) -> None:
        self.groups = groups
        sizes: dict[int, int] = {}
        for group in groups:
            sizes[group.pool] = max(sizes.get(group.pool, 0), group.block_size)
        self._blocks = Blocks([sizes.get(pool, 1) for pool in range(max(sizes) + 1)])
        self._requests: dict[int, Followed] = {}
        self._claims: dict[BlockAddress, dict[int, int]] = {}
        self._epoch = 0

    def begin(
        self, serial: int, tokens: Sequence[int], base: int, parent: int | None, checked: bool
    ) -> None:
        """Follow a request from now on; a fork may read what its parent may read."""
        epoch = self._epoch if parent is None else self._requests[parent].epoch
        request = self._requests[serial] = Followed(serial, tokens, base, epoch)
        request.checked = checked
        request.empty_tables(len(self.groups))

    def renew(self, serial: int) -> None:
        """Let a request that has no blocks expect KV of the current weights."""
        self._requests[serial].epoch = self._epoch

    def extend(
        self, serial: int, group_id: int, position: int, blocks: Sequence[int], step: int
    ) -> None:
        """Put blocks into a table from a place on, replacing those there."""
        request, group = self._requests[serial], self.groups[group_id]
        table = request.tables[group_id]
        for at, block in enumerate(blocks, position):
            if at < len(table):
                self._release(request, group_id, at, step)
                table[at] = block
            else:
                table.append(block)
            if block >= group.num_null:
                place = (DEVICE, group.pool, block)
                self._blocks.at(place).happened("given", step, serial, at)
                if at >= request.trimmed[group_id]:
                    request.repeats |= self._claim(place, serial) > 1
        self._forget_from(request, group, position)

    def cut(self, serial: int, group_id: int, length: int, step: int) -> None:
        """Shorten a table to this many blocks."""
        request, table = self._requests[serial], self._requests[serial].tables[group_id]
        for at in range(length, len(table)):
            self._release(request, group_id, at, step)
        del table[length:]
        request.trimmed[group_id] = min(request.trimmed[group_id], length)
        self._forget_from(request, self.groups[group_id], length)

    def drop(self, serial: int, step: int) -> None:
        """Give up all tables of a request."""
        for group_id in range(len(self.groups)):
            self.cut(serial, group_id, 0, step)
        self._requests[serial].empty_tables(len(self.groups))

    def end(self, serial: int, step: int) -> None:
        """Give up all tables of a request, and stop following it."""
        self.drop(serial, step)
        del self._requests[serial]

    def advance_epoch(self) -> None:
        """Note that the weights changed."""
        self._epoch += 1

    def copy(self, source: BlockAddress, target: BlockAddress, step: int, moves: bool) -> None:
        """Copy a block, and empty the source if it moves."""
        self._blocks.copy(source, target, step)
        self._disturb(target, None)
        if moves:
            self.lose(source, step)

    def zero(self, place: BlockAddress, step: int) -> None:
        """Zero a block."""
        self._blocks.zero(place, step)
        self._disturb(place, None)

    def lose(self, place: BlockAddress, step: int) -> None:
        """Leave a block unwritten."""
        self._blocks.lose(place, step)
        self._disturb(place, None)

    def events(self, place: BlockAddress) -> Sequence[Event]:
        """Return the last events of a block, the oldest first."""
        return tuple(self._blocks.at(place).events)

    def _release(self, request: Followed, group_id: int, at: int, step: int) -> None:
        """Give up the block at a place of a table."""
        group, block = self.groups[group_id], request.tables[group_id][at]
        if block >= group.num_null:
            place = (DEVICE, group.pool, block)
            self._blocks.at(place).happened("dropped", step, request.serial, at)
            if at >= request.trimmed[group_id]:
                self._unclaim(place, request.serial)

    def _forget_from(self, request: Followed, group: CacheGroup, position: int) -> None:
        """Lower the verified length to the blocks before a place of a table."""
        if group.ring:
            request.verified = DISTURBED
        request.forget_from(position * group.block_size, self._epoch)

    def _claim(self, place: BlockAddress, serial: int) -> int:
        """Claim a block once more; return how many times the request claims it."""
        claims = self._claims.setdefault(place, {})
        claims[serial] = claims.get(serial, 0) + 1
        return claims[serial]

    def _unclaim(self, place: BlockAddress, serial: int) -> None:
        claims = self._claims[place]
        claims[serial] -= 1
        if not claims[serial]:
            del claims[serial]

    def _disturb(self, place: BlockAddress, writer: int | None) -> None:
        for serial in self._claims.get(place, {}):
            if serial != writer:
                self._requests[serial].verified = DISTURBED

    def _trim(self, request: Followed, group_id: int, first: int) -> None:
        """Claim exactly the blocks of a table from the first visible one on."""
        group, table = self.groups[group_id], request.tables[group_id]
        first, before = min(first, len(table)), request.trimmed[group_id]
        for block in table[before:first]:
            if block >= group.num_null:
                self._unclaim((DEVICE, group.pool, block), request.serial)
        for block in table[first:before]:
            request.verified = DISTURBED
            if block >= group.num_null:
                self._claim((DEVICE, group.pool, block), request.serial)
        request.trimmed[group_id] = first
