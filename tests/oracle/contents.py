# SPDX-License-Identifier: Apache-2.0
"""The identity of what a slot holds: a number for each prefix of tokens and extra keys.

Why: a number per prefix, given out in the order of first use, is an exact digest: two prefixes
never share one, as two hashes might.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from tests.oracle.finding import demand

UNDEFINED, ZERO, RUBBISH = -1, -2, -3
MAX_GROUPS = 8

Slot = int | tuple[int, frozenset[int]]
"""A digest, or a digest that rests on these failed loads and is therefore wrong."""


class Contents:
    """Numbers of prefixes, and which key stands for which content."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[int, Hashable], int] = {}
        self._by_key: dict[bytes, tuple[int, bool]] = {}
        self._keys: dict[tuple[int, bool], bytes] = {}

    def prefix(self, parent: int, stuff: Hashable) -> int:
        """Return the number of a prefix that ends with this token. parent: the number of the one
        before, or 0.
        """
        return self._prefixes.setdefault((parent, stuff), len(self._prefixes) + 1)

    def chain(self, parent: int, stuffs: Iterable[Hashable]) -> list[int]:
        """Return the numbers of the prefixes that end with each of these tokens."""
        found = []
        for stuff in stuffs:
            parent = self.prefix(parent, stuff)
            found.append(parent)
        return found

    def learn(self, key: bytes, content: int, own: bool, same_key: bool) -> None:
        """Note that a key stands for a content; own: the engine's hash.

        One key never stands for two contents. same_key: one content has one key, too.
        """
        known = self._by_key.setdefault(key, (content, own))
        demand(known == (content, own), f"two contents have the key {key.hex()}")
        if same_key:
            first = self._keys.setdefault((content, own), key)
            demand(first == key, f"one content has the keys {first.hex()} and {key.hex()}")

    def of_key(self, key: bytes) -> int | None:
        """Return the content at the end of a key's block, None if no known request has it."""
        return self._by_key.get(key, (None, False))[0]


def digest(prefix: int, group_id: int) -> int:
    """Return a digest of the content of a group's slot after a prefix."""
    return prefix * MAX_GROUPS + group_id


def spoilt_by(slot: Slot) -> frozenset[int]:
    """Return the failed loads that a slot depends on."""
    return slot[1] if isinstance(slot, tuple) else frozenset()


def truth(slot: Slot) -> int:
    """Return what a slot would hold if no load had failed."""
    return slot[0] if isinstance(slot, tuple) else slot
