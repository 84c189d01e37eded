# SPDX-License-Identifier: Apache-2.0
"""Tracks the content of every slot, and checks what the queries of a step read.

A step's writes take effect before its reads; groups of rings and states read first. A request's
verified length is the length up to which its tables are known to hold its prefix: positions are
read again only if it is less than the chunk's start, and a write that changes a block resets it (to
-1) for every other table with that block. `full` reads everything in every step, and finds the
same. A request is checked up to its first finding; its writes are followed further.

Twin: rust/src/sanitizer/slot_checker.rs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.contents import DELTA_MAX, Block, BlockAddress, Event, Held
from kvcore.sanitizer.digests import NOTHING, UNKNOWN, WORD, ZEROS, mix, slot_digest
from kvcore.sanitizer.lines import BlockLists, Line, SlotLists, WrongAccess
from kvcore.sanitizer.requests import DISTURBED
from kvcore.sanitizer.tables import DEVICE, Tables


class SlotChecker(Tables):
    """Checks steps over the tables and blocks that it follows."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, full: bool) -> None:
        super().__init__(groups, num_blocks)
        self._full = full
        self._has_rings = any(group.reads_first for group in groups)
        self._found: list[WrongAccess] = []

    def load(
        self, serial: int, group_id: int | None, start: int, count: int, step: int
    ) -> list[WrongAccess]:
        """Write loaded content, like a step that reads nothing."""
        self._found, end = [], start + count
        line = Line(self._requests[serial], start, end, (), None, loads=True, group_id=group_id)
        line.oldest_epoch = self._epoch
        line.request.forget_from(start, self._epoch)
        self._write(line, step)
        return self._found

    def step(
        self,
        step: int,
        serials: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        drafts: Mapping[int, Sequence[int]],
        slots: Mapping[int, SlotLists],
        tables: Mapping[int, BlockLists],
    ) -> list[WrongAccess]:
        """Write and read what the chunks of a step do; return the errors, at most one per chunk.

        drafts, slots, tables: by the number of the chunk; tables are appended to first.
        """
        for at, lists in tables.items():
            request = self._requests[serials[at]]
            for group_id, blocks in enumerate(lists):
                length = len(request.tables[group_id])
                self.extend(request.serial, group_id, length, blocks, step)
        self._found = []
        lines = []
        for at, (serial, start, count) in enumerate(zip(serials, starts, counts, strict=True)):
            request = self._requests[serial]
            if count == 0:  # there are no queries
                continue
            line = Line(request, start, start + count, drafts.get(at, ()), slots.get(at))
            lines.append(line)
            self._set_out(line)
            if self._has_rings:
                self._read(line, step, rings=True)
        for line in lines:
            self._write(line, step)
        for line in lines:
            self._read(line, step, rings=False)
            self._record_verified(line)
        return self._found

    def _set_out(self, line: Line) -> None:
        """Lower the verified length if a chunk goes back, and set the epoch of its writes."""
        request = line.request
        if line.slots is not None:
            line.oldest_epoch = self._epoch
            return
        if line.start < request.verified and self._has_rings:
            request.verified = DISTURBED
        request.forget_from(line.start, self._epoch)
        for group_id, group in enumerate(self.groups):
            if not group.ring:
                self._trim(request, group_id, group.first(line.start) // group.block_size)
        is_known = line.start > 0 and request.verified > 0
        line.oldest_epoch = min(self._epoch, request.oldest_epoch) if is_known else self._epoch

    def _write(self, line: Line, step: int) -> None:
        totals, line.written = self._totals(line, line.start), line.oldest_epoch
        for group_id, slots in self._written(line):
            for position, slot in slots:
                if line.loads and self._is_null(line, group_id, position):
                    continue
                place = self._place(line, group_id, position, slot, step, "null-write")
                if place is None:
                    break
                index, block_id, offset = place
                total = totals[position - line.start]
                digest = UNKNOWN if total is None else slot_digest(total, group_id)
                block_place = (DEVICE, self.groups[group_id].pool, block_id)
                block = self._blocks.at(block_place)
                event = block.written_by(line.request.serial, index, step)
                held = Held(digest, line.oldest_epoch, event, min(step - event.step, DELTA_MAX))
                self._put(block_place, block, offset, held, line, group_id, position, step)

    def _put(
        self,
        place: BlockAddress,
        block: Block,
        offset: int,
        held: Held,
        line: Line,
        group_id: int,
        position: int,
        step: int,
    ) -> None:
        """Write a slot; if that changes it, reset the other requests with its block."""
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
        """Return the first wrong slot that the queries of a chunk see."""
        request, known = line.request, line.request.verified
        if not request.checked or line.wrong:
            return
        whole = self._full or request.repeats or known == DISTURBED or line.slots is not None
        if not whole and known >= line.start:
            return
        lowest = 0 if whole else known
        begin = max(lowest, min(group.first(line.start) for group in self.groups))
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
        """Return whether a slot holds the content that a query expects; also lower the chunk's
        oldest epoch to the slot's.
        """
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
            name = "stale-weights" if held.oldest_epoch < request.epoch else None
            line.oldest_epoch = min(line.oldest_epoch, held.oldest_epoch)
        if name is not None:
            self._find(name, line, group_id, position, (block_id, offset), held, step)
        return name is None

    def _record_verified(self, line: Line) -> None:
        """Apply an older epoch that was read to the chunk's writes, and set the verified length."""
        request = line.request
        for group_id, slots in self._written(line) if line.oldest_epoch < line.written else ():
            group = self.groups[group_id]
            for position, slot in slots:
                found = self._slot_of(line, group_id, position, slot)
                if found is None or found[1] < group.num_null:
                    break
                place = (DEVICE, group.pool, found[1])
                block = self._blocks.at(place)
                held = block.slots[found[2]]
                writer = _writer(block, held)
                if (
                    held.oldest_epoch > line.oldest_epoch
                    and writer
                    and writer.serial == request.serial
                ):
                    block.slots[found[2]] = attrs.evolve(
                        held, oldest_epoch=line.oldest_epoch, event=held.event, delta=held.delta
                    )
                    self._disturb(place, request.serial)
        if line.slots is not None:
            return
        known = min(line.end - len(line.drafts), len(request.tokens))
        disturbed = self._has_rings and request.verified == DISTURBED
        if disturbed or line.wrong or self._overtakes(line, known):
            known = DISTURBED
        request.verified, request.oldest_epoch = known, line.oldest_epoch

    def _overtakes(self, line: Line, known: int) -> bool:
        """Return whether a chunk overwrote ring slots that the next chunk may see."""
        for group_id, group in enumerate(self.groups):
            if group.ring:
                length = len(line.request.tables[group_id]) * group.block_size
                if line.end - 1 - length >= group.first(known):
                    return True
        return False

    def _totals(self, line: Line, first: int) -> list[int | None]:
        """Return the sums of the prefixes that end at [first, the chunk's end); None: not known."""
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
        """Yield the positions that a chunk writes, by group, each with its slot if given."""
        if line.slots is not None:
            group_id, writes, _ = line.slots
            pairs = zip(range(line.start, line.end), writes, strict=False)
            yield group_id, ((at, slot) for at, slot in pairs if slot >= 0)
            return
        for group_id in range(len(self.groups)) if line.group_id is None else (line.group_id,):
            first = line.end - 1 if self.groups[group_id].state else line.start
            yield group_id, ((at, None) for at in range(first, line.end))

    def _visible(
        self, line: Line, rings: bool, verified: int, whole: bool
    ) -> Iterator[tuple[int, Iterator[tuple[int, int | None]]]]:
        """Yield the positions to read, either of the ring groups or of the others."""
        if line.slots is not None:
            group_id, _, reads = line.slots
            if self.groups[group_id].reads_first is rings:
                end = line.start if rings else line.end
                yield group_id, iter(list(zip(range(end - len(reads), end), reads, strict=True)))
            return
        for group_id, group in enumerate(self.groups):
            if group.reads_first is rings:
                first = max(verified, group.first(line.start))
                end = line.end if whole and not rings else line.start
                yield group_id, ((at, None) for at in range(first, end))

    def _place(
        self, line: Line, group_id: int, position: int, slot: int | None, step: int, null: str
    ) -> tuple[int, int, int] | None:
        """Return the index, block and offset of a position; None after a finding."""
        found = self._slot_of(line, group_id, position, slot)
        if found is None:
            self._find("no-slot", line, group_id, position, (None, None), None, step)
        elif found[1] < self.groups[group_id].num_null:
            self._find(null, line, group_id, position, (found[1], found[2]), None, step)
            return None
        return found

    def _is_null(self, line: Line, group_id: int, position: int) -> bool:
        found = self._slot_of(line, group_id, position, None)
        return found is not None and found[1] < self.groups[group_id].num_null

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
        offset = 0 if group.state else position % size
        return (index, table[index], offset) if index < len(table) else None

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
            if not request.checked:
                return
            line.wrong, request.checked = True, False
        event = None
        if held is not None and where[0] is not None:
            pool = self.groups[group_id].pool
            event = _writer(self._blocks.at((DEVICE, pool, where[0])), held)
        self._found.append(
            WrongAccess(
                name, request.serial, group_id, line.start, position, *where, held, event, step
            )
        )


def _writer(block: Block, held: Held) -> Event | None:
    """Return the event under which a slot was written; None if it is forgotten."""
    return held.event if held.event in block.events else None
