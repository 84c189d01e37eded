# SPDX-License-Identifier: Apache-2.0
"""Tail keys: the keys of content that ends inside blocks.

Invariants: the tail keys of a block are those of one content, shortest first. A look-up returns the
block that was published first; when it loses the key, the next one is returned. A key without
blocks, and a block without tail keys, has no entry.
Twin: rust/src/pool/tails.rs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import attrs
from immutables import Map

from kvcore.pool.hash_index import HashIndexTransaction
from kvcore.types.commands import Evict
from kvcore.types.effects import Effects


@attrs.frozen
class Tails:
    """The tail keys of the blocks of one tier.

    by_block: those of each block that has any, shortest first. by_key: the blocks of each, first
    published first.
    """

    by_block: Map[int, tuple[bytes, ...]] = Map()
    by_key: Map[bytes, tuple[int, ...]] = Map()

    def keys(self, block: int) -> tuple[bytes, ...]:
        """Return the tail keys of a block, shortest first."""
        return self.by_block.get(block, ())

    def blocks(self, key: bytes) -> tuple[int, ...]:
        """Return the blocks of a tail key, first published first."""
        return self.by_key.get(key, ())

    def insert(self, block: int, key: bytes, place: int) -> Tails:
        """Add a tail key of a block at this place among those that it has."""
        keys, blocks = self.keys(block), self.blocks(key)
        return Tails(
            self.by_block.set(block, (*keys[:place], key, *keys[place:])),
            self.by_key.set(key, (*blocks, block)),
        )

    def remove(self, block: int, key: bytes) -> Tails:
        """Remove a tail key of a block."""
        keys = tuple(each for each in self.keys(block) if each != key)
        blocks = tuple(each for each in self.blocks(key) if each != block)
        return Tails(
            self.by_block.set(block, keys) if keys else self.by_block.delete(block),
            self.by_key.set(key, blocks) if blocks else self.by_key.delete(key),
        )


class Keyed(Protocol):
    """A pool or its transaction."""

    @property
    def keys(self) -> Any:
        """The key of each block."""

    @property
    def tails(self) -> Tails | None:
        """The tail keys of its blocks."""


def has_key(pool: Keyed, block: int) -> bool:
    """Return whether a block has a key or a tail key."""
    return pool.keys[block] is not None or bool(pool.tails and pool.tails.keys(block))


class KeyedTransaction:
    """The part of `PoolTransaction` that gives tail keys to blocks and takes all keys away.

    tails: None if no hit may end inside a block.
    """

    __slots__ = ("silent", "tails")

    keys: Any
    index: HashIndexTransaction
    silent: frozenset[int]
    tails: Tails | None
    effects: Effects

    def has_key(self, block: int) -> bool:
        """Return whether a block has a key or a tail key."""
        return has_key(self, block)

    def unpublish(self, block: int) -> None:
        """Forget the keys of a block, if it has any; its place in the free queue stays."""
        self._drop_key(block)
        if self.tails is not None:
            self.withdraw_tails(block, self.tails.keys(block))

    def unpublish_full(self, block: int) -> None:
        """Forget the key of a block, if it has one, but not its tail keys."""
        if self.tails is None:
            self.unpublish(block)
        else:
            self._drop_key(block)

    def _drop_key(self, block: int) -> None:
        key = self.keys[block]
        if key is None:
            return
        self.keys[block] = None
        self.effects.commands.append(Evict(block, key))
        if self.index.remove(key, block) and block not in self.silent:
            self.effects.announce_removed(key)
        if self.silent:
            self.silent -= {block}

    def tail_keys(self, block: int) -> tuple[bytes, ...]:
        """Return the tail keys of a block, shortest first."""
        return self.tails.keys(block) if self.tails else ()

    def first_tail(self, key: bytes) -> int | None:
        """Return the block that a look-up of a tail key finds."""
        blocks = self.tails.blocks(key) if self.tails else ()
        return blocks[0] if blocks else None

    def publish_tail(self, block: int, key: bytes, place: int) -> None:
        """Make the first tokens of a block findable under a tail key, at its place among those of
        the block.
        """
        assert self.tails is not None
        self.tails = self.tails.insert(block, key, place)

    def withdraw_tails(self, block: int, keys: Iterable[bytes]) -> None:
        """Forget tail keys of a block, in this order."""
        for key in keys:
            assert self.tails is not None
            self.effects.commands.append(Evict(block, key))
            self.tails = self.tails.remove(block, key)
