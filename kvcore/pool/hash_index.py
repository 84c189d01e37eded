# SPDX-License-Identifier: Apache-2.0
"""The hash index: maps a key to the ordered blocks that hold its content.

Invariants: a look-up returns the block that was published first; when it loses the key, the next
one is returned (S001-82). A key without blocks has no entry. Keys are opaque bytes. If a key has
several blocks, they form a ring of links, so each step is O(1). A block that is alone under its key
has no links, so equal contents are equal values.
Twin: rust/src/pool/hash_index.rs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from immutables import Map

from kvcore.pool.key_map import KeyMap


@attrs.frozen
class HashIndex(Mapping[bytes, tuple[int, ...]]):
    """The index as a value: each key with its blocks, first published first.

    Indexing by a key walks all its blocks; `in` and `firsts` do not.

    firsts: key -> the block that a look-up returns. following, preceding: the ring of blocks of
    each key that has several, in order of publication; the first one follows the last.
    """

    firsts: KeyMap = attrs.field(factory=KeyMap)
    following: Map[int, int] = attrs.field(factory=Map)
    preceding: Map[int, int] = attrs.field(factory=Map)

    def __getitem__(self, key: bytes) -> tuple[int, ...]:
        first = self.firsts[key]
        blocks = [first]
        block = self.following.get(first, first)
        while block != first and len(blocks) < len(self.following):
            blocks.append(block)
            block = self.following[block]
        return tuple(blocks)

    def __contains__(self, key: object) -> bool:
        return key in self.firsts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.firsts)

    def __len__(self) -> int:
        return len(self.firsts)

    def ranks(self) -> dict[int, int]:
        """Number each block among those of its key; 0 is the one that a look-up returns.
        O(blocks).
        """
        return {block: rank for blocks in self.values() for rank, block in enumerate(blocks)}


class HashIndexTransaction:
    """A hash index inside a transition: the value itself until it is opened for the first change,
    then changed in place, and frozen at the end.
    """

    __slots__ = ("firsts", "following", "index", "is_open", "preceding")

    def __init__(self, index: HashIndex) -> None:
        self.index = index
        self.is_open = False
        self.firsts: Any = index.firsts
        self.following: Any = index.following
        self.preceding: Any = index.preceding

    def _open(self) -> None:
        self.is_open = True
        self.firsts, self.following = self.firsts.mutate(), self.following.mutate()
        self.preceding = self.preceding.mutate()

    def freeze(self) -> HashIndex:
        """Return the index as an immutable value."""
        if not self.is_open:
            return self.index
        return HashIndex(self.firsts.finish(), self.following.finish(), self.preceding.finish())

    def first(self, key: bytes) -> int | None:
        """Return the block that a look-up of a key finds."""
        found: int | None = self.firsts.get(key)
        return found

    def blocks(self, key: bytes) -> list[int]:
        """List the blocks under a key, first published first."""
        block = first = self.firsts.get(key)
        blocks = []
        while block is not None:
            blocks.append(block)
            after = self.following.get(block, first)
            block = None if after == first else after
        return blocks

    def insert(self, key: bytes, block: int) -> None:
        """Add a block after those that hold the same content."""
        if not self.is_open:
            self._open()
        first = self.firsts.get(key)
        if first is None:
            self.firsts[key] = block
            return
        self._link(self.preceding.get(first, first), block)
        self._link(block, first)

    def remove(self, key: bytes, block: int) -> bool:
        """Remove a block from its key. True: it was the last one."""
        if not self.is_open:
            self._open()
        if block not in self.following:
            del self.firsts[key]
            return True
        before, after = self.preceding.pop(block), self.following.pop(block)
        if before == after:
            del self.following[after]
            del self.preceding[after]
        else:
            self._link(before, after)
        if self.firsts[key] == block:
            self.firsts[key] = after
        return False

    def clear(self) -> None:
        """Forget every key."""
        empty = HashIndex()
        self.firsts, self.following, self.preceding = empty.firsts, empty.following, empty.preceding
        self._open()

    def _link(self, before: int, after: int) -> None:
        self.following[before] = after
        self.preceding[after] = before
