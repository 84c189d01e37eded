# SPDX-License-Identifier: Apache-2.0
"""Follows what every slot holds, and judges what the queries of a step read.

A step's writes take effect before its reads; a ring group reads first. A request's verified length
says up to where its tables hold its prefix: a row is read again only where that falls short of its
start, and a write that changes a block takes the length away (-1) from every other table with that
block. `full` reads everything in every step, and finds the same. A request is judged up to its
first finding; what it writes is followed on.

Twin: rust/src/sanitizer/judge.rs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvcore.sanitizer.contents import DELTA_MAX, Block, Blocks, Event, Held, Place
from kvcore.sanitizer.digests import NOTHING, UNKNOWN, WORD, ZEROS, mix, slot_digest
from kvcore.sanitizer.rows import CacheGroup

DISTURBED = -1
"""The verified length of a request whose blocks were changed by somebody else."""
DEVICE = "device"

SlotLists = tuple[int, Sequence[int], Sequence[int]]
"""A group, the slots that are written and those that are read."""


@attrs.frozen
class Wrong:
    """What a row did or found that is no right read; `alias` is the one that proves nothing.

    block, slot, held and event are None where the table has no block for the position.
    """

    name: str
    serial: int
    group: int
    start: int
    position: int
    block: int | None
    slot: int | None
    held: Held | None
    event: Event | None
    step: int


class Followed:
    """A request: its tokens, its tables, and what is known of them."""

    def __init__(self, serial: int, tokens: Sequence[int], base: int, epoch: int) -> None:
        self.serial, self.tokens, self.epoch = serial, tokens, epoch
        self.base, self.judged = base, True
        self.tables: list[list[int]] = []
        self.trimmed: list[int] = []
        self.empty_tables(0)

    def empty_tables(self, num_groups: int) -> None:
        """Begin without blocks. trimmed: the first block of each table that is still claimed."""
        self.tables = [[] for _ in range(num_groups)]
        self.trimmed = [0] * num_groups
        self.verified, self.low, self.repeats = 0, 0, False
        self.summed, self.total = 0, self.base


@attrs.define
class Line:
    """One row of a step while it is judged.

    low: of what it read and writes; written: what low was when it wrote.
    """

    request: Followed
    start: int
    end: int
    drafts: Sequence[int]
    slots: SlotLists | None
    low: int = 0
    written: int = 0
    wrong: bool = False


class Judge:
    """Contents, tables and verified lengths, changed in the order of issue."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, full: bool) -> None:
        self.groups, self.num_blocks, self._full = groups, num_blocks, full
        sizes: dict[int, int] = {}
        for group in groups:
            sizes[group.pool] = max(sizes.get(group.pool, 0), group.block_size)
        self._blocks = Blocks([sizes.get(pool, 1) for pool in range(max(sizes) + 1)])
        self._requests: dict[int, Followed] = {}
        self._claims: dict[Place, dict[int, int]] = {}
        self._epoch = 0
        self._has_rings = any(group.ring for group in groups)
        self._found: list[Wrong] = []

    def begin(
        self, serial: int, tokens: Sequence[int], base: int, parent: int | None, judged: bool
    ) -> None:
        """Follow a request from here on; a fork reads what its parent may read."""
        epoch = self._epoch if parent is None else self._requests[parent].epoch
        request = self._requests[serial] = Followed(serial, tokens, base, epoch)
        request.judged = judged
        request.empty_tables(len(self.groups))

    def renew(self, serial: int) -> None:
        """Let a request that has no blocks expect KV of the current weights."""
        self._requests[serial].epoch = self._epoch

    def extend(self, serial: int, group_id: int, blocks: Sequence[int], step: int) -> None:
        """Append blocks to a table."""
        request, pool = self._requests[serial], self.groups[group_id].pool
        table = request.tables[group_id]
        for block in blocks:
            if block >= self.groups[group_id].num_null:
                place = (DEVICE, pool, block)
                self._blocks.at(place).happened("given", step, serial, len(table))
                claims = self._claims.setdefault(place, {})
                claims[serial] = claims.get(serial, 0) + 1
                request.repeats |= claims[serial] > 1
            table.append(block)

    def drop(self, serial: int, step: int) -> None:
        """Give up all tables of a request."""
        request = self._requests[serial]
        for group_id, table in enumerate(request.tables):
            group = self.groups[group_id]
            for at, block in enumerate(table):
                if block >= group.num_null:
                    place = (DEVICE, group.pool, block)
                    self._blocks.at(place).happened("dropped", step, serial, at)
                    if at >= request.trimmed[group_id]:
                        self._unclaim(place, serial)
        request.empty_tables(len(self.groups))

    def end(self, serial: int) -> None:
        """Follow a request without tables no more."""
        del self._requests[serial]

    def advance_epoch(self) -> None:
        """Say that the weights changed."""
        self._epoch += 1

    def copy(self, source: Place, target: Place, step: int, moves: bool) -> None:
        """Copy a block, and empty the source if it moves."""
        self._blocks.copy(source, target, step)
        self._disturb(target, None)
        if moves:
            self.lose(source, step)

    def zero(self, place: Place, step: int) -> None:
        """Zero a block."""
        self._blocks.zero(place, step)
        self._disturb(place, None)

    def lose(self, place: Place, step: int) -> None:
        """Leave a block unwritten."""
        self._blocks.lose(place, step)
        self._disturb(place, None)

    def events(self, place: Place) -> Sequence[Event]:
        """The last events of a block, the oldest first."""
        return tuple(self._blocks.at(place).events)

    def step(
        self,
        step: int,
        serials: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
        slots: Mapping[int, SlotLists],
    ) -> list[Wrong]:
        """Write and read as the rows of a step do; what is wrong, at most once a row.

        drafts, slots: of the rows of these numbers.
        """
        self._found = []
        lines = []
        for at, (serial, start, count) in enumerate(zip(serials, starts, counts, strict=True)):
            request = self._requests[serial]
            if count == 0:  # no query reads anything
                continue
            line = Line(request, start, start + count, drafts.get(at, ()), slots.get(at))
            lines.append(line)
            self._set_out(line)
            self._read(line, step, rings=True)
        for line in lines:
            self._write(line, step)
        for line in lines:
            self._read(line, step, rings=False)
            self._settle(line)
        return self._found

    def _set_out(self, line: Line) -> None:
        """Cut the verified length by a row that goes back, and say what low its writes have."""
        request = line.request
        if line.slots is not None:
            line.low = self._epoch
            return
        if line.start < request.verified:
            is_known = request.low == self._epoch and not self._has_rings
            request.verified = line.start if is_known else DISTURBED
        for group_id, group in enumerate(self.groups):
            if not group.ring:
                self._trim(request, group_id, self._first(group, line.start) // group.block_size)
        is_known = 0 < line.start <= request.verified
        line.low = min(self._epoch, request.low) if is_known else self._epoch

    def _trim(self, request: Followed, group_id: int, first: int) -> None:
        """Claim of a table the blocks from the first visible one on, and no others."""
        group, table = self.groups[group_id], request.tables[group_id]
        first, before = min(first, len(table)), request.trimmed[group_id]
        for block in table[before:first]:
            if block >= group.num_null:
                self._unclaim((DEVICE, group.pool, block), request.serial)
        for block in table[first:before]:
            request.verified = DISTURBED
            if block >= group.num_null:
                claims = self._claims.setdefault((DEVICE, group.pool, block), {})
                claims[request.serial] = claims.get(request.serial, 0) + 1
        request.trimmed[group_id] = first

    def _write(self, line: Line, step: int) -> None:
        totals, line.written = self._totals(line, line.start), line.low
        for group_id, slots in self._written(line):
            for position, slot in slots:
                place = self._place(line, group_id, position, slot, step, "null-write")
                if place is None:
                    break
                index, block_id, offset = place
                total = totals[position - line.start]
                digest = UNKNOWN if total is None else slot_digest(total, group_id)
                block_place = (DEVICE, self.groups[group_id].pool, block_id)
                block = self._blocks.at(block_place)
                event = block.written_by(line.request.serial, index, step)
                held = Held(digest, line.low, event, min(step - event.step, DELTA_MAX))
                self._put(block_place, block, offset, held, line, group_id, position, step)

    def _put(
        self,
        place: Place,
        block: Block,
        offset: int,
        held: Held,
        line: Line,
        group_id: int,
        position: int,
        step: int,
    ) -> None:
        """Write a slot, and disturb the other requests with its block if that changes it."""
        before, serial = block.slots[offset], line.request.serial
        block.slots[offset] = held
        if before == held and held.digest != UNKNOWN:
            return
        writer = _writer(block, before)
        others = self._claims.get(place, {})
        is_shared = writer is not None and writer.serial != serial and writer.serial in others
        if is_shared and before.digest not in (held.digest, NOTHING, ZEROS):
            self._find("alias", line, group_id, position, (place[2], offset), before, step)
        self._disturb(place, serial)

    def _read(self, line: Line, step: int, rings: bool) -> None:
        """Find the first wrong slot that the queries of a row see."""
        request, known = line.request, line.request.verified
        if not request.judged or line.wrong:
            return
        whole = self._full or request.repeats or known == DISTURBED or line.slots is not None
        if not whole and known >= line.start:
            return
        lowest = 0 if whole else known
        begin = max(lowest, min(self._first(group, line.start) for group in self.groups))
        if line.slots is not None:
            begin = 0
        totals = self._totals(line, begin)
        for group_id, slots in self._visible(line, rings, lowest, whole):
            for position, slot in slots:
                place = self._place(line, group_id, position, slot, step, "null-read")
                if place is None:
                    return
                total = totals[position - begin]
                if not self._agrees(line, group_id, position, place, total, step):
                    return

    def _agrees(
        self,
        line: Line,
        group_id: int,
        position: int,
        place: tuple[int, int, int],
        total: int | None,
        step: int,
    ) -> bool:
        """Whether a slot holds what a query must find; lowers the row's low to the slot's."""
        group, request = self.groups[group_id], line.request
        _, block_id, offset = place
        block = self._blocks.at((DEVICE, group.pool, block_id))
        held, name = block.slots[offset], None
        if total is None:
            writer = _writer(block, held)
            own = held.digest == UNKNOWN and (writer is None or writer.serial == request.serial)
            name = "wrong-kv" if position >= line.start and not own else None
        elif held.digest == NOTHING or (held.digest == ZEROS and not group.zeros_readable):
            name = "unwritten-read"
        elif held.digest == ZEROS:
            return True
        elif held.digest != slot_digest(total, group_id):
            name = "wrong-kv"
        else:
            name = "stale-weights" if held.low < request.epoch else None
            line.low = min(line.low, held.low)
        if name is not None:
            self._find(name, line, group_id, position, (block_id, offset), held, step)
        return name is None

    def _settle(self, line: Line) -> None:
        """Carry a low that was read into what the row wrote, and say what is verified now."""
        request = line.request
        for group_id, slots in self._written(line) if line.low < line.written else ():
            group = self.groups[group_id]
            for position, slot in slots:
                found = self._slot_of(line, group_id, position, slot)
                if found is None or found[1] < group.num_null:
                    break
                place = (DEVICE, group.pool, found[1])
                block = self._blocks.at(place)
                held = block.slots[found[2]]
                writer = _writer(block, held)
                if held.low > line.low and writer and writer.serial == request.serial:
                    block.slots[found[2]] = attrs.evolve(
                        held, low=line.low, event=held.event, delta=held.delta
                    )
                    self._disturb(place, request.serial)
        if line.slots is not None:
            return
        known = min(line.end - len(line.drafts), len(request.tokens))
        disturbed = self._has_rings and request.verified == DISTURBED
        if disturbed or line.wrong or self._overtakes(line, known):
            known = DISTURBED
        request.verified, request.low = known, line.low

    def _overtakes(self, line: Line, known: int) -> bool:
        """Whether a row wrote in a ring over what the next row may see."""
        for group_id, group in enumerate(self.groups):
            if group.ring:
                length = len(line.request.tables[group_id]) * group.block_size
                if line.end - 1 - length >= self._first(group, known):
                    return True
        return False

    def _totals(self, line: Line, first: int) -> list[int | None]:
        """The sums of the prefixes that end at [first, the row's end); None: not known."""
        request, known_end = line.request, line.end - len(line.drafts)
        tokens, begin, total = request.tokens, 0, request.base
        if not self._full and request.summed <= first:
            begin, total = request.summed, request.total
        totals: list[int | None] = []
        sum_: int | None = total
        for position in range(begin, line.end):
            if position == known_end and sum_ is not None and known_end > 0:
                request.summed, request.total = position, sum_
            if position >= known_end:
                token = line.drafts[position - known_end]
            else:
                token = tokens[position] if position < len(tokens) else -1
            sum_ = None if sum_ is None or token < 0 else sum_ + mix(token, position) & WORD
            if position >= first:
                totals.append(sum_)
        if not line.drafts and sum_ is not None:
            request.summed, request.total = line.end, sum_
        return totals

    def _written(self, line: Line) -> Iterator[tuple[int, Iterator[tuple[int, int | None]]]]:
        """The positions that a row writes, by group, each with its slot if the row says it."""
        if line.slots is not None:
            group_id, writes, _ = line.slots
            pairs = zip(range(line.start, line.end), writes, strict=False)
            yield group_id, ((at, slot) for at, slot in pairs if slot >= 0)
            return
        for group_id in range(len(self.groups)):
            yield group_id, ((at, None) for at in range(line.start, line.end))

    def _visible(
        self, line: Line, rings: bool, verified: int, whole: bool
    ) -> Iterator[tuple[int, Iterator[tuple[int, int | None]]]]:
        """The positions to read of the groups that are rings, or of the others."""
        if line.slots is not None:
            group_id, _, reads = line.slots
            if self.groups[group_id].ring is rings:
                end = line.start if rings else line.end
                yield group_id, iter(list(zip(range(end - len(reads), end), reads, strict=True)))
            return
        for group_id, group in enumerate(self.groups):
            if group.ring is rings:
                first = max(verified, self._first(group, line.start))
                end = line.end if whole and not rings else line.start
                yield group_id, ((at, None) for at in range(first, end))

    def _place(
        self, line: Line, group_id: int, position: int, slot: int | None, step: int, null: str
    ) -> tuple[int, int, int] | None:
        """The index, block and offset of a position; None after a finding."""
        found = self._slot_of(line, group_id, position, slot)
        if found is None:
            self._find("no-slot", line, group_id, position, (None, None), None, step)
        elif found[1] < self.groups[group_id].num_null:
            self._find(null, line, group_id, position, (found[1], found[2]), None, step)
            return None
        return found

    def _slot_of(
        self, line: Line, group_id: int, position: int, slot: int | None
    ) -> tuple[int, int, int] | None:
        group = self.groups[group_id]
        size, table = group.block_size, line.request.tables[group_id]
        if slot is not None:
            return position // size, slot // size, slot % size
        index = position // size
        if group.ring and table:
            index %= len(table)
        return (index, table[index], position % size) if index < len(table) else None

    def _find(
        self,
        name: str,
        line: Line,
        group_id: int,
        position: int,
        where: tuple[int | None, int | None],
        held: Held | None,
        step: int,
    ) -> None:
        request = line.request
        if name != "alias":
            if not request.judged:
                return
            line.wrong, request.judged = True, False
        event = None
        if held is not None and where[0] is not None:
            pool = self.groups[group_id].pool
            event = _writer(self._blocks.at((DEVICE, pool, where[0])), held)
        self._found.append(
            Wrong(name, request.serial, group_id, line.start, position, *where, held, event, step)
        )

    def _disturb(self, place: Place, writer: int | None) -> None:
        for serial in self._claims.get(place, {}):
            if serial != writer:
                self._requests[serial].verified = DISTURBED

    def _unclaim(self, place: Place, serial: int) -> None:
        claims = self._claims[place]
        claims[serial] -= 1
        if not claims[serial]:
            del claims[serial]

    def _first(self, group: CacheGroup, start: int) -> int:
        """The first position that the queries from start on see."""
        return 0 if group.window is None else max(0, start - group.window + 1)


def _writer(block: Block, held: Held) -> Event | None:
    """The event under which a slot was written; None if it is forgotten."""
    return held.event if held.event in block.events else None
