# SPDX-License-Identifier: Apache-2.0
"""The true contents of every slot, changed as a runtime changes them: a second opinion on the core.

A slot holds nothing, or the identity of a prefix (all tokens up to and including its own) and the
group that wrote it. Identities are only compared, so they may be numbers of prefixes
(`prefixes.py`), digests, or the tokens themselves. A block of a state group has one content, in its
first slot: the prefix that its state stands for.

Invariants: contents change only by the commands of a batch, in order, and by the forward pass after
them. No transition calls anything here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, TypeVar

import attrs

from kvcore.types.commands import Command, Load, Tier
from kvcore.types.errors import InvariantViolation
from kvcore.types.keys import HASH_SIZE

T = TypeVar("T")
Content = tuple[Any, int] | None
TierBlock = tuple[Tier, int]
Slots = tuple[Content, ...]
Contents = dict[TierBlock, Slots]

RUBBISH: Content = (-1, 0)
ZEROS: Content = (-2, 0)
SPOILT: Content = (-3, 0)
"""The content of a slot without a token: scratch, zeros, or the leftovers of a failed load."""


@attrs.frozen
class WrongSlot:
    """A slot with the wrong content."""

    place: TierBlock
    slot: int
    held: Content
    wanted: Content


class SlotStore:
    """The slots of all written blocks.

    sizes: slots per block of each group. num_null: the first `num_null` device blocks are never
    written.
    """

    def __init__(
        self, sizes: Sequence[int], contents: Contents | None = None, num_null: int = 0
    ) -> None:
        self.sizes = sizes
        self.contents: Contents = {} if contents is None else contents
        self._num_null = num_null
        self._nothing: Slots = (None,) * max(sizes)

    def get(self, place: TierBlock) -> Slots:
        """Return the contents of a block's slots."""
        return self.contents.get(place, self._nothing)

    def forget(self, block: int) -> None:
        """Make the content of a device block undefined."""
        self.contents.pop(("device", block), None)

    def copy(self, command: Command) -> None:
        """Do what a copying command does to contents; other commands do nothing."""
        copy(self.contents, command, len(self._nothing))

    def put(self, table: Sequence[TierBlock], group_id: int, start: int, run: Slots) -> None:
        """Write a run of slots, beginning at a position. Raises InvariantViolation (KV-READ) if the
        table lacks a block.
        """
        size, end = self.sizes[group_id], start + len(run)
        for at in range(start // size, -(-end // size)):
            place, first = block_at(table, at), at * size
            if place[1] < self._num_null and place[0] == "device":
                continue
            low, high = max(start, first), min(end, first + size)
            held = self.contents.get(place, self._nothing)
            written = run[low - start : high - start]
            self.contents[place] = (*held[: low - first], *written, *held[high - first :])

    def wrong(
        self,
        table: Sequence[TierBlock],
        group_id: int,
        nodes: Sequence[object],
        first: int,
        end: int,
    ) -> Iterator[WrongSlot]:
        """Yield the slots of positions [first, end) that do not hold their nodes. Raises
        InvariantViolation (KV-READ) if the table lacks a block.
        """
        size = self.sizes[group_id]
        for at in range(first // size, -(-end // size)):
            place, start = block_at(table, at), at * size
            low, high = max(first, start), min(end, start + size)
            held = self.contents.get(place, self._nothing)[low - start : high - start]
            wanted = run_of(nodes[low:high], group_id)  # repeat is endless
            if held != wanted:
                for slot, pair in enumerate(zip(held, wanted, strict=True), low - start):
                    if pair[0] != pair[1]:
                        yield WrongSlot(place, slot, *pair)


def group_of(key: bytes) -> int:
    """Decode the id of the group from a block's key."""
    return int.from_bytes(key[HASH_SIZE:], "big")


def run_of(nodes: Sequence[object], group_id: int) -> Slots:
    """Build the contents of slots in which a group wrote these nodes."""
    return tuple(zip(nodes, repeat(group_id)))


def block_at(table: Sequence[T], position: int) -> T:
    """Return a table's block at a position. Raises InvariantViolation (KV-READ) if there is
    none.
    """
    if position >= len(table):
        raise InvariantViolation(
            "KV-READ", f"a table of {len(table)} blocks has no position {position}"
        )
    return table[position]


def copy(contents: Contents, command: Command, block_size: int) -> None:
    """Do what a copying command does to contents; other commands do nothing."""
    source, target = command.reads(), command.writes()
    if isinstance(command, Load):
        contents.pop(("device", command.block), None)
    elif target is not None:
        contents[target] = read(contents, source, block_size)


def read(contents: Contents, source: TierBlock | None, block_size: int) -> Slots:
    """Return the contents that a command copies from `source`; zeros if it has no source."""
    if source is None:
        return (ZEROS,) * block_size
    return contents.get(source, (None,) * block_size)
