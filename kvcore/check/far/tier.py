# SPDX-License-Identifier: Apache-2.0
"""The adversary: a far tier whose answers a search chooses, one fault at a time.

A page is real: its header, its name and its checksum are those of kvcore/far/page.py, and its
payload says which prefix it holds. So what the client verifies is verified here as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvcore.far import page
from kvcore.far.page import PAYLOAD_START, PageOwner, identify_pages
from kvcore.far.pending import PendingTier, PendingTransfer
from kvcore.far.slots import MARK_SIZE, Slots
from kvcore.far.tier import FarStatus, View
from kvcore.oracle.contents import Slots as Contents
from kvcore.oracle.contents import run_of
from kvcore.oracle.prefixes import EPOCH, Letter, Prefixes, in_epoch
from kvcore.types.keys import KEY_SIZE

FAULTS = {"find": ("lies",), "load": ("fails", "torn", "other"), "store": ("fails", "torn", "lost")}
"""What can go wrong with one name of an operation."""
UNDEFINED = b"\xff" * 8
"""The payload of a page whose slots hold no prefix."""


class Adversary(PendingTier):
    """See `PendingTier`. num_tickets: the most that it has without an answer."""

    def __init__(self, num_tickets: int) -> None:
        super().__init__()
        self.num_tickets = num_tickets

    @property
    def accepts(self) -> bool:
        """See `PendingTier`."""
        return len(self.pending) < self.num_tickets

    def cancel(self, ticket: int) -> None:
        """See `FarTier`: the answer still comes, at any later moment."""

    def close(self, timeout_s: float) -> None:
        """See `FarTier`."""

    def answer(self, transfer: PendingTransfer, fault: str = "", at: int = 0) -> None:
        """End a ticket. fault: what goes wrong with the name at a place; nothing if it is empty."""
        faults = [fault if place == at else "" for place in range(len(transfer.names))]
        answers = {"find": self._found, "load": self._got, "store": self._put}
        self._end(transfer, answers[transfer.operation](transfer, faults))

    def kill(self) -> None:
        """Lose all entries, and fail what is under way; then start again."""
        self.entries.clear()
        for each in list(self.pending):
            self._end(each, (FarStatus.FAILED,) * len(each.names))

    def damage(self, name: str) -> None:
        """Flip a bit of an entry."""
        self.entries[name] = torn(self.entries[name])

    def _found(self, transfer: PendingTransfer, faults: list[str]) -> Iterator[FarStatus]:
        for name, fault in zip(transfer.names, faults, strict=True):
            says = (name in self.entries) != (fault == "lies")
            yield FarStatus.OK if says else FarStatus.MISSING

    def _got(self, transfer: PendingTransfer, faults: list[str]) -> list[FarStatus]:
        got: list[int | FarStatus] = []
        for name, view, fault in zip(transfer.names, transfer.views, faults, strict=True):
            held = self.entries.get(name)
            if fault == "other":
                others = [each for each in sorted(self.entries) if each != name]
                held = self.entries[others[0]] if others else None
            if held is not None:
                view[:] = torn(held) if fault in ("torn", "fails") else held
            missing = FarStatus.FAILED if fault == "fails" else FarStatus.MISSING
            got.append(missing if held is None or fault == "fails" else len(held))
        return page.check_pages(transfer.names, transfer.views, got, self.remove)

    def remove(self, names: Sequence[str]) -> None:
        """Remove entries."""
        for name in names:
            self.entries.pop(name, None)

    def _put(self, transfer: PendingTransfer, faults: list[str]) -> Iterator[FarStatus]:
        for name, view, fault in zip(transfer.names, transfer.views, faults, strict=True):
            if fault in ("", "torn"):
                self.entries.setdefault(name, torn(view) if fault else bytes(view))
            yield FarStatus.OK if fault in ("", "lost") else FarStatus.FAILED


class FarSlots(Slots):
    """Slots with real pages of eight bytes; a free one holds zeros."""

    def __init__(self, num_slots: int) -> None:
        views = [bytearray(PAYLOAD_START + len(UNDEFINED)) for _ in range(num_slots)]
        super().__init__(views, bytearray(num_slots * MARK_SIZE))

    def give_back(self, slot: int) -> None:
        """See `Slots`."""
        super().give_back(slot)
        self.views[slot][:] = bytes(len(self.views[slot]))

    def store(self, key: bytes, payload: bytes) -> bool:
        """Copy a block into its slot and seal it. Returns whether there is a slot."""
        slot = self.marked("store", key)
        if slot is not None:
            self.views[slot][PAYLOAD_START:] = payload
            page.seal_page(self.views[slot])
        return slot is not None

    def load(self, key: bytes) -> bytes | None:
        """Return the payload in the slot of a key; None if there is no slot."""
        slot = self.marked("load", key)
        return None if slot is None else bytes(self.views[slot][PAYLOAD_START:])


def torn(held: bytes | View) -> bytes:
    """Return a page with another token in its payload."""
    at = PAYLOAD_START + 2
    return bytes((*held[:at], held[at] ^ 1, *held[at + 1 :]))


def place_of(epoch: int) -> PageOwner:
    """Return where the pages of an epoch belong."""
    return PageOwner(identify_pages((f"weights {epoch}",)))


def key_in(name: str) -> bytes:
    """Return the key in a page's name."""
    key = bytes.fromhex(name.split("/")[-1])
    assert len(key) == KEY_SIZE
    return key


def payload_of(prefixes: Prefixes, held: Contents) -> bytes:
    """Return the payload of a block with these contents."""
    last = held[-1]
    if last is None or last[0] <= 0:
        return UNDEFINED
    payload = encoded(prefixes.path(last[0]))
    return payload if held == contents_of(prefixes, payload, len(held)) else UNDEFINED


def encoded(letters: Sequence[Letter]) -> bytes:
    """Return the payload of a prefix, whose first letter may be its epoch."""
    told: tuple[Any, ...] = letters[0]
    epoch = told[1] if told[0] == EPOCH else 0
    tokens: list[Any] = [each[0] for each in (letters[1:] if epoch else letters)]
    return bytes((epoch, len(tokens), *tokens)).ljust(len(UNDEFINED), b"\0")


def contents_of(prefixes: Prefixes, payload: bytes, num_slots: int) -> Contents:
    """Return the contents of a block with this many slots that was filled from a payload."""
    epoch, size = payload[:2]
    if payload == UNDEFINED or size < num_slots:
        return (None,) * num_slots
    letters = tuple((token,) for token in payload[2 : 2 + size])
    return run_of(prefixes.number(in_epoch(letters, epoch))[-num_slots:], 0)


def wanted_in(prefixes: Prefixes, name: str, epoch: int) -> bytes:
    """Return the payload that the page of a name must have."""
    return encoded(in_epoch(prefixes.chain(key_in(name)), epoch))
