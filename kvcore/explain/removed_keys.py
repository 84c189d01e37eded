# SPDX-License-Identifier: Apache-2.0
"""The last removals of keys: a ring buffer, with a hash table of chains for look-up.

Invariants: a chain has the newest entry first, so the entry that the ring drops is the last of its
chain. Neighbouring keys that one call removed share a removal; the removals are a ring of the same
length. So an entry takes at most ENTRY_BYTES, without the ids of the requests that took blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvcore.explain.explanation import Removal
from kvcore.explain.lost_keys import NEVER, REMOVED

ENTRY_BYTES = 48
"""Most bytes of an entry."""


class RemovedKeys(Sequence[Removal]):
    """The removals of the newest keys. num_entries: maximum number of keys, at least 1.
    has_dropped: whether a key was forgotten since `clear`.
    """

    def __init__(self, num_entries: int) -> None:
        self._most = num_entries
        self._mask = (1 << (11 * num_entries // 4).bit_length() - 1) - 1
        self._kinds: list[str] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.has_dropped = False
        self._num_added = self._num_removals = 0
        self._heads = array("I", bytes(4 * (self._mask + 1)))
        self._keys, self._next = array("Q", [0]), array("I", [0])
        self._marks = array("I", [NEVER])  # these three start at index 1
        self._calls, self._takers = array("Q"), array("I")
        self._steps, self._idle, self._kind_numbers = array("I"), array("I"), array("B")
        self._names: list[str | None] = [None]
        self._numbers: dict[str | None, int] = {None: 0}
        self._uses, self._free_names = [1], array("I")

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, place: int) -> Removal:  # type: ignore[override] # it is never sliced
        return Removal(
            self._names[self._takers[place]],
            self._calls[place],
            self._kinds[self._kind_numbers[place]],
            self._steps[place],
            self._idle[place],
        )

    def add(self, key: int, removal: Removal) -> None:
        """Remember that a folded key was removed."""
        at = self._num_added % self._most + 1
        if self._num_added >= self._most:
            self._drop(at)
        bucket = key & self._mask
        _put(self._keys, at, key)
        _put(self._next, at, self._heads[bucket])
        _put(self._marks, at, REMOVED + self._place_of(removal))
        self._heads[bucket] = at
        self._num_added += 1

    @property
    def columns(self) -> tuple[array[int], ...]:
        """The columns that `mark` reads: heads by bucket, then keys, links and marks by place."""
        return self._heads, self._keys, self._next, self._marks

    def mark(self, key: int) -> int:
        """Return the mark of a folded key: REMOVED or more, by the place of its last removal; else
        NEVER.
        """
        at = self._heads[key & self._mask]
        while at and self._keys[at] != key:
            at = self._next[at]
        return self._marks[at]

    def _drop(self, at: int) -> None:
        """Remove the oldest entry from its chain, and the taker with the last entry of a
        removal.
        """
        self.has_dropped = True
        bucket = self._keys[at] & self._mask
        before = self._heads[bucket]
        if before == at:
            self._heads[bucket] = 0
        else:
            while self._next[before] != at:
                before = self._next[before]
            self._next[before] = 0
        mark, behind = self._marks[at], at % self._most + 1
        if behind == at or self._marks[behind] != mark:
            self._release(self._takers[mark - REMOVED])

    def _place_of(self, removal: Removal) -> int:
        """Return the place of a removal, which is the last one's place if they are equal."""
        if self._num_added and self._most > 1:
            place = (self._num_removals - 1) % self._most
            if self[place] == removal:
                return place
        place = self._num_removals % self._most
        self._num_removals += 1
        if removal.kind not in self._kinds:
            self._kinds.append(removal.kind)
        _put(self._calls, place, removal.call)
        _put(self._takers, place, self._number(removal.request))
        _put(self._steps, place, removal.step)
        _put(self._idle, place, removal.idle_steps)
        _put(self._kind_numbers, place, self._kinds.index(removal.kind))
        return place

    def _number(self, name: str | None) -> int:
        """Return the number of a taker, and count one more removal for it."""
        number = self._numbers.get(name)
        if number is None:
            if self._free_names:
                number = self._free_names.pop()
                self._names[number] = name
            else:
                number = len(self._names)
                self._names.append(name)
                self._uses.append(0)
            self._numbers[name] = number
        self._uses[number] += 1
        return number

    def _release(self, taker: int) -> None:
        self._uses[taker] -= 1
        if not self._uses[taker]:
            del self._numbers[self._names[taker]]
            self._names[taker] = None
            self._free_names.append(taker)


def _put(column: array[int], place: int, value: int) -> None:
    """Set an element of a column; an index one past the end appends."""
    if place == len(column):
        column.append(value)
    else:
        column[place] = value
