# SPDX-License-Identifier: Apache-2.0
"""What the slots of both tiers really hold, changed as a runtime changes them.

Rules: a slot holds the tokens up to its own, or nothing. The copies of a batch run in their order.
A block that is handed out holds nothing until it is written, and one without owner and key holds
nothing that anyone may read. Twin: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcore.types.commands import Allocate, Command, Tier
from kvcore.types.errors import InvariantViolation

Place = tuple[Tier, int]
Content = tuple[int, ...] | None
"""The tokens up to the one that a slot is for; None where nothing was written."""


class Memory:
    """The slots of every block that was written."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[Place, list[Content]] = {}

    def run(self, commands: Iterable[Command]) -> None:
        """Run the copies of a batch, in order."""
        for command in commands:
            if isinstance(command, Allocate):
                self.slots.pop(("device", command.block), None)
            source, target = command.reads(), command.writes()
            if source is not None and target is not None:
                self.slots[target] = list(self._block(source))

    def write(self, who: str, table: list[Place], tokens: tuple[int, ...], first: int) -> None:
        """Write the tokens of a sequence from a position on, where its table has them.

        Raises InvariantViolation (KV-READ) where the table has no block for one.
        """
        for position in range(first, len(tokens)):
            place, slot = self._find(who, table, position)
            block = self.slots.setdefault(place, [None] * self.block_size)
            block[slot] = tokens[: position + 1]

    def read(self, who: str, table: list[Place], tokens: tuple[int, ...], first: int) -> None:
        """Read them as an attention does. Raises InvariantViolation (KV-READ)."""
        for position in range(first, len(tokens)):
            place, slot = self._find(who, table, position)
            held, wanted = self._block(place)[slot], tokens[: position + 1]
            if held != wanted:
                detail = f"{who} reads {place[0]} block {place[1]} slot {slot}"
                said = f"it holds {said_of(held)}, not {said_of(wanted)}"
                raise InvariantViolation("KV-READ", f"{detail}: {said}")

    def forget(self, is_read: Callable[[Place], bool]) -> None:
        """Forget the blocks that nobody may read."""
        self.slots = {place: slots for place, slots in self.slots.items() if is_read(place)}

    def row(self, place: Place) -> str:
        """The slots of a block, as a story shows them."""
        slots = self._block(place)
        return " | ".join(map(said_of, slots)) if any(slots) else "-"

    def _block(self, place: Place) -> list[Content]:
        return self.slots.get(place) or [None] * self.block_size

    def _find(self, who: str, table: list[Place], position: int) -> tuple[Place, int]:
        at, slot = divmod(position, self.block_size)
        if at >= len(table):
            detail = f"the table of {who} has {len(table)} blocks, none for token {position}"
            raise InvariantViolation("KV-READ", detail)
        return table[at], slot


def said_of(content: Content) -> str:
    """A content in words: its token behind those before it."""
    return "?" if content is None else "-".join(map(str, content))
