# SPDX-License-Identifier: Apache-2.0
"""The hash index: key to the ordered blocks that hold that content.

Rules: the block that was published first answers a look-up; when it loses the key the next one
answers (S001-82). A key without blocks has no entry. Keys are opaque bytes. Twin:
rust/src/hash_index.rs.
"""

from __future__ import annotations

from immutables import Map

HashIndex = Map[bytes, tuple[int, ...]]


class HashIndexDraft:
    """A hash index inside a transition: changed in place, frozen at the end."""

    __slots__ = ("_entries",)

    def __init__(self, index: HashIndex) -> None:
        self._entries = index.mutate()

    def freeze(self) -> HashIndex:
        """The index as a value."""
        return self._entries.finish()

    def first(self, key: bytes) -> int | None:
        """The block that answers for a key."""
        blocks = self._entries.get(key)
        return None if blocks is None else blocks[0]

    def insert(self, key: bytes, block: int) -> None:
        """Add a block behind those that hold the same content."""
        self._entries[key] = (*self._entries.get(key, ()), block)

    def remove(self, key: bytes, block: int) -> bool:
        """Take a block from under its key. True: it was the last one."""
        rest = tuple(each for each in self._entries[key] if each != block)
        if rest:
            self._entries[key] = rest
            return False
        del self._entries[key]
        return True

    def clear(self) -> None:
        """Forget every key."""
        self._entries = Map[bytes, tuple[int, ...]]().mutate()
