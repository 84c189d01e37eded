# SPDX-License-Identifier: Apache-2.0
"""A persistent map from keys to blocks, for an index as large as the pool.

The map is a table of chains in one persistent vector, by linear hashing: when there are more keys
than chains, one chain is split in two, so no call pays for the whole table. It never shrinks, so
equal maps can have different tables, and equality compares the items.
Why: its entries are not tracked by the garbage collector. The nodes of a general persistent map
are, and creating them started collections so often that these took 40 % of a long run, since each
collection visits the tokens of every running request. The twin has a plain hash map, since it
changes its state in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from pyrsistent import PVector, pvector

SLOTS_MIN = 8


class Entry(Struct, frozen=True, gc=False):
    """A key with its block, and the entries after it in its chain."""

    key: bytes
    block: int
    more: Entry | None = None


EMPTY: PVector[Entry | None] = pvector([None] * SLOTS_MIN)


class KeyMap(Mapping[bytes, int]):
    """The map as a value. slots: the first entry of each chain."""

    __slots__ = ("length", "slots")

    def __init__(self, slots: PVector[Entry | None] = EMPTY, length: int = 0) -> None:
        self.slots = slots
        self.length = length

    @classmethod
    def of(cls, items: Mapping[bytes, int]) -> KeyMap:
        """Build a map from these items."""
        tx = cls().mutate()
        for key, block in items.items():
            tx[key] = block
        return tx.finish()

    def mutate(self) -> KeyMapTransaction:
        """Open a transaction that changes the map in place."""
        return KeyMapTransaction(self.slots, self.length)

    # Mapping's own raises and catches an error for each key that is unknown, as most are.
    def get(self, key: bytes) -> int | None:  # type: ignore[override]  # no default
        """Return the block of a key, None if it is unknown."""
        entry = find(self.slots, key)
        return None if entry is None else entry.block

    def __getitem__(self, key: bytes) -> int:
        entry = find(self.slots, key)
        if entry is None:
            raise KeyError(key)
        return entry.block

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and find(self.slots, key) is not None

    def __iter__(self) -> Iterator[bytes]:
        for entry in self.slots:
            while entry is not None:
                yield entry.key
                entry = entry.more

    def __len__(self) -> int:
        return self.length

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        # Python's hash of a key differs from process to process.
        return KeyMap.of, (dict(self.items()),)

    def __repr__(self) -> str:
        return f"KeyMap.of({dict(self.items())!r})"


class KeyMapTransaction:
    """A map inside a transition: changed in place, then finished."""

    __slots__ = ("length", "slots")

    def __init__(self, slots: PVector[Entry | None], length: int) -> None:
        self.slots = slots.evolver()
        self.length = length

    def finish(self) -> KeyMap:
        """Return the map as an immutable value."""
        return KeyMap(self.slots.persistent(), self.length)

    def get(self, key: bytes) -> int | None:
        """Return the block of a key, None if it is unknown."""
        entry = find(self.slots, key)
        return None if entry is None else entry.block

    def __setitem__(self, key: bytes, block: int) -> None:
        place = slot(key, len(self.slots))
        chain = self.slots[place]
        left = without(chain, key)
        self.length += left is chain
        self.slots[place] = Entry(key, block, left)
        if self.length > len(self.slots):
            self._split()

    def __getitem__(self, key: bytes) -> int:
        entry = find(self.slots, key)
        if entry is None:
            raise KeyError(key)
        return entry.block

    def __delitem__(self, key: bytes) -> None:
        place = slot(key, len(self.slots))
        chain = self.slots[place]
        left = without(chain, key)
        if left is chain:
            raise KeyError(key)
        self.slots[place] = left
        self.length -= 1

    def _split(self) -> None:
        """Split one chain in two: the new one takes the entries that belong to it."""
        count = len(self.slots)
        source = count - (1 << count.bit_length() - 1)
        chains: dict[int, Entry | None] = {source: None, count: None}
        entry = self.slots[source]
        while entry is not None:
            place = slot(entry.key, count + 1)
            chains[place] = Entry(entry.key, entry.block, chains[place])
            entry = entry.more
        self.slots[source] = chains[source]
        self.slots.append(chains[count])


def slot(key: bytes, num_slots: int) -> int:
    """Choose the chain of a key in a table of `num_slots` chains."""
    most = 1 << (num_slots - 1).bit_length()
    place = hash(key) & (most - 1)
    return place if place < num_slots else place - (most >> 1)


def find(slots: Any, key: bytes) -> Entry | None:
    """Find the entry of a key in a table."""
    return find_in(slots[slot(key, len(slots))], key)


def find_in(chain: Entry | None, key: bytes) -> Entry | None:
    """Find the entry of a key in a chain."""
    while chain is not None and chain.key != key:
        chain = chain.more
    return chain


def without(chain: Entry | None, key: bytes) -> Entry | None:
    """Return a chain without a key; the same chain if it does not have the key."""
    if chain is None or find_in(chain, key) is None:
        return chain
    left: Entry | None = None
    while chain is not None:
        if chain.key != key:
            left = Entry(chain.key, chain.block, left)
        chain = chain.more
    return left
