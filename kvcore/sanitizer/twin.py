# SPDX-License-Identifier: Apache-2.0
"""The compiled slot checker, with the calls and values of slot_checker.py, and the choice between
both.

Twin: rust/src/bindings/sanitizer.rs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvcore import _twin
from kvcore.sanitizer.chunks import CacheGroup
from kvcore.sanitizer.contents import BlockAddress, Event, Held
from kvcore.sanitizer.lines import BlockLists, SlotLists, WrongAccess
from kvcore.sanitizer.slot_checker import SlotChecker
from kvcore.sanitizer.tables import DEVICE
from kvcore.types.base_error import BackendMissing

NumberedAddress = tuple[int, int, int]


class TwinSlotChecker:
    """The slot checker over the compiled twin. Raises BackendMissing."""

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, full: bool) -> None:
        facts = [attrs.astuple(group) for group in groups]
        self._twin = _twin.make_slot_checker(facts, num_blocks, full)
        self._tiers = {DEVICE: 0}
        self.begin, self.renew, self.end = self._twin.begin, self._twin.renew, self._twin.end
        self.extend, self.cut, self.drop = self._twin.extend, self._twin.cut, self._twin.drop
        self.advance_epoch = self._twin.advance_epoch

    def copy(self, source: BlockAddress, target: BlockAddress, step: int, moves: bool) -> None:
        """Copy a block, and empty the source if it moves."""
        self._twin.copy(self._numbered(source), self._numbered(target), step, moves)

    def zero(self, place: BlockAddress, step: int) -> None:
        """Zero a block."""
        self._twin.zero(self._numbered(place), step)

    def lose(self, place: BlockAddress, step: int) -> None:
        """Leave a block unwritten."""
        self._twin.lose(self._numbered(place), step)

    def load(
        self, serial: int, group_id: int | None, start: int, count: int, step: int
    ) -> list[WrongAccess]:
        """Write loaded content, like a step that reads nothing."""
        found = self._twin.load(serial, group_id, start, count, step)
        return [_wrong(*fields) for fields in found]

    def events(self, place: BlockAddress) -> Sequence[Event]:
        """Return the last events of a block, the oldest first."""
        return tuple(Event(*fields) for fields in self._twin.events(self._numbered(place)))

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
        """Write and read what the chunks of a step do; return the errors, at most one per chunk."""
        columns = serials, starts, counts, dict(drafts), dict(slots), dict(tables)
        found = self._twin.step(step, *columns)
        return [_wrong(*fields) for fields in found] if found else []

    def num_bytes(self) -> int:
        """Return the bytes of contents, events and claims of the device."""
        return self._twin.num_bytes()

    def _numbered(self, place: BlockAddress) -> NumberedAddress:
        return self._tiers.setdefault(place[0], len(self._tiers)), place[1], place[2]


def _wrong(
    name: str,
    serial: int,
    group_id: int,
    start: int,
    position: int,
    block: int | None,
    slot: int | None,
    held: tuple[int, int, int] | None,
    event: tuple[str, int, int | None, int] | None,
    step: int,
) -> WrongAccess:
    """Convert a value of the twin to the slot checker's."""
    by = None if event is None else Event(*event)
    content = None if held is None else Held(held[0], held[1], by, held[2])
    return WrongAccess(name, serial, group_id, start, position, block, slot, content, by, step)


def make_slot_checker(
    groups: Sequence[CacheGroup], num_blocks: int, full: bool, backend: str | None
) -> SlotChecker | TwinSlotChecker:
    """Make the slot checker of a backend, "rust" or "python"; None: the twin if it is compiled.

    Raises BackendMissing.
    """
    if backend is None:
        backend = "rust" if _twin.available() else "python"
    checkers: dict[str, type[SlotChecker | TwinSlotChecker]] = {
        "rust": TwinSlotChecker,
        "python": SlotChecker,
    }
    if backend not in checkers:
        raise BackendMissing(backend=backend, reason="it is neither 'rust' nor 'python'")
    return checkers[backend](groups, num_blocks, full)
