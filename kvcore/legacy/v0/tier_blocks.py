# SPDX-License-Identifier: Apache-2.0
"""The blocks of one tier under the ids and hashes that the V0 block manager has for them.

Rules: an id is any int of a given set; its place among them in rising order is the block in the
core. A content hash is an int of Python's `hash`; an int that needs more than 32 bytes has no key
and no block. Its key is the int as 32 bytes, signed and big-endian, mixed so that both ends of the
key are digest, which is all that an index and events read:

    low, high = the int's last 8 bytes, its first 24
    key       = low, high XOR low, a group of 0

so no two ints have one key. Source: S002-04, 16, 43, 54.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.errors import UnknownName, require
from kvcore.pool.priority_eviction import NO_RANK
from kvcore.types.commands import Tier
from kvcore.types.keys import HASH_SIZE, KEY_SIZE, make_key
from kvcore.types.values import Refused

_LOW_BITS = 64
_HIGH_BITS = 8 * HASH_SIZE - _LOW_BITS
_LOW: int = 2**_LOW_BITS - 1
_HIGH: int = 2**_HIGH_BITS - 1
_LIMIT: int = 2 ** (8 * HASH_SIZE - 1)
_pack = struct.Struct(f">4q{KEY_SIZE - HASH_SIZE}x").pack


def key_of_hash(content_hash: int) -> bytes:
    """The key of a content hash. Raises OverflowError where it needs more than 32 bytes."""
    sign = content_hash >> 63
    if -1 <= sign <= 0:  # as all hashes of Python: the same key in one step
        return _pack(content_hash, sign, sign, content_hash ^ sign)
    if not -_LIMIT <= content_hash < _LIMIT:
        raise OverflowError(f"a content hash of {content_hash.bit_length()} bits")
    low, high = content_hash & _LOW, content_hash >> _LOW_BITS & _HIGH
    return make_key((low << _HIGH_BITS | high ^ low).to_bytes(HASH_SIZE, "big"), 0)


def keys_of_hashes(content_hashes: Iterable[int]) -> list[bytes]:
    """The keys of content hashes of Python's own 64 bits."""
    return [
        _pack(each, sign := each >> 63, sign, each ^ sign)  # `key_of_hash` without a call
        for each in content_hashes
    ]


def hash_of_key(key: bytes) -> int:
    """The content hash of a key; undoes `key_of_hash`."""
    mixed = int.from_bytes(key[:HASH_SIZE], "big")
    low = mixed >> _HIGH_BITS
    content_hash = ((mixed & _HIGH) ^ low) << _LOW_BITS | low
    return content_hash - 2 * _LIMIT if content_hash >= _LIMIT else content_hash


def _keys_up_to_none(content_hashes: Iterable[int]) -> list[bytes]:
    """The keys of content hashes up to the first that has none."""
    keys = []
    for content_hash in content_hashes:
        try:
            keys.append(key_of_hash(content_hash))
        except (TypeError, OverflowError):
            break
    return keys


class KeyedHash(int):
    """A content hash that keeps its key, for who asks for it again and again."""

    key: bytes


def keep_key(content_hash: int) -> KeyedHash:
    """The same content hash with its key. Raises OverflowError."""
    kept = KeyedHash(content_hash)
    kept.key = key_of_hash(content_hash)
    return kept


class TierBlocks:
    """One tier of a backing, its blocks named by ids of a caller."""

    __slots__ = ("_first", "_sorted", "backing", "ids", "tier")

    def __init__(self, backing: Backing, tier: Tier, ids: Iterable[int]) -> None:
        """ids: in the order in which they are first taken."""
        self.backing = backing
        self.tier = tier
        order = tuple(ids)
        self.ids = frozenset(order)
        self._sorted = tuple(sorted(self.ids))
        contiguous = not order or self._sorted[-1] - self._sorted[0] == len(order) - 1
        self._first = (self._sorted[0] if order else 0) if contiguous else None
        if order != self._sorted:
            backing.take(len(order), tier)
            backing.release([self.place(each) for each in reversed(order)], tier)

    def __len__(self) -> int:
        return len(self._sorted)

    def place(self, block: int) -> int:
        """The block in the core. Raises UnknownName."""
        if block in self.ids:
            first = self._first
            return block - first if first is not None else bisect_left(self._sorted, block)
        known = f"there are {len(self)} blocks from {min(self.ids, default=None)} on"
        raise UnknownName(name="block", value=repr(block), known=known, block=block)

    def places(self, blocks: Sequence[int]) -> Sequence[int]:
        """The same for each."""
        first = self._first
        if first is None or not self.ids.issuperset(blocks):
            return [self.place(block) for block in blocks]
        return [block - first for block in blocks] if first else blocks

    def names(self, places: Sequence[int]) -> list[int]:
        """The ids of blocks of the core."""
        first = self._first
        if first is None:
            return [self._sorted[place] for place in places]
        return [place + first for place in places] if first else list(places)

    def name(self, place: int) -> int:
        """The id of a block of the core."""
        return place + self._first if self._first is not None else self._sorted[place]

    def num_free(self) -> int:
        """Blocks without owner."""
        return self.backing.blocks.num_free(self.tier) if self._sorted else 0

    def take(self, count: int = 1) -> list[int] | None:
        """The next free blocks, with one owner each; None where there are too few."""
        if not self._sorted:
            return None if count else []
        taken = self.backing.blocks.take(count, self.tier)
        return None if isinstance(taken, Refused) else self.names(taken)

    def find_or_take(
        self, keys: Sequence[bytes | None], lengths: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]] | int:
        """A block for each key, those that are new, those that had no owner; how many are needed
        where there are too few.
        """
        if not self._sorted:
            return len(keys) or ([], [], [])
        placed = self.backing.blocks.find_or_take(keys, lengths, self.tier)
        if isinstance(placed, Refused):
            return placed.needed
        blocks, taken, revived = placed
        return self.names(blocks), self.names(taken), self.names(revived)

    def take_this(self, block: int) -> None:
        """Give one certain block without owner and key an owner."""
        place = self.place(block)
        ahead = self.backing.free_blocks(self.tier).index(place)
        taken = self.backing.take(ahead + 1, self.tier)
        assert not isinstance(taken, Refused)
        self.backing.release(taken[-2::-1] if ahead else (), self.tier)

    def touch(self, blocks: Sequence[int]) -> None:
        """One owner more for each; a free one must have a key."""
        if blocks:
            self.backing.blocks.touch(self.places(blocks), self.tier)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each, in order."""
        if blocks:
            self.backing.blocks.release(self.places(blocks), self.tier)

    def ref_count(self, block: int) -> int:
        """Owners of a block."""
        return self.backing.blocks.ref_count(self.place(block), self.tier)

    def ref_counts(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Owners of each block."""
        return self.backing.blocks.ref_counts(self.places(blocks), self.tier) if blocks else ()

    def owners_of(self, keys: Sequence[bytes]) -> tuple[int | None, ...]:
        """How many own the block of each key, None where there is none."""
        if not self._sorted or not keys:
            return (None,) * len(keys)
        return self.backing.blocks.owners_of(keys, self.tier)

    def last_accessed(self, block: int) -> float:
        """When a block was used, as was said."""
        return self.backing.blocks.rank_of(self.place(block), self.tier)[0]

    def is_evictable(self, block: int) -> bool:
        """Whether a block has a key and no owner."""
        return self.backing.is_cached_free(self.place(block), self.tier)

    def has_key(self, block: int) -> bool:
        """Whether a block can be found."""
        return self.backing.key_of(self.place(block), self.tier) is not None

    def content_hash(self, block: int) -> int | None:
        """The hash under which a block is found."""
        key = self.backing.key_of(self.place(block), self.tier)
        return None if key is None else hash_of_key(key)

    def lookup(self, content_hash: int) -> int | None:
        """The block of a content hash."""
        try:
            key = key_of_hash(content_hash)
        except (TypeError, OverflowError):
            return None
        return self.find(key)

    def find(self, key: bytes | None) -> int | None:
        """The block of a key; None for none."""
        if key is None or not self._sorted:
            return None
        found = self.backing.blocks.lookup(key, self.tier)
        return None if found is None else self.name(found)

    def find_prefix(self, content_hashes: Sequence[int]) -> list[int]:
        """The blocks of content hashes up to the first that has none."""
        kept: Any = content_hashes
        try:
            keys = [each.key for each in kept]
        except AttributeError:  # plain ints
            keys = _keys_up_to_none(content_hashes)
        if not keys or not self._sorted:
            return []
        return self.names(self.backing.blocks.lookup_prefix(keys, self.tier))

    def publish(self, block: int, key: bytes, length: int) -> None:
        """Make a block findable, at the end of a chain of so many tokens."""
        place = self.place(block)
        self.backing.blocks.publish(place, key, self.tier)
        self.backing.blocks.rank([place], None, length, self.tier)

    def rank(self, block: int, time: float | None = None, length: int | None = None) -> None:
        """Say when a block was used, and how many tokens its chain has."""
        self.backing.blocks.rank([self.place(block)], time, length, self.tier)

    def access(self, blocks: Sequence[int], time: float) -> None:
        """Say when blocks were used."""
        if blocks:
            self.backing.blocks.rank(self.places(blocks), time, None, self.tier)

    def evictable(self) -> list[int]:
        """Blocks with a key and no owner, the first to be evicted first. Cost: O(free blocks)."""
        if not self._sorted:
            return []
        key_of, tier = self.backing.key_of, self.tier
        free = self.backing.free_blocks(tier)
        return [self.name(each) for each in free if key_of(each, tier) is not None]

    def evict(self, block: int) -> None:
        """Make the caller the owner of an evictable block, and forget its content."""
        place = self.place(block)
        self.backing.touch([place], self.tier)
        self.backing.unpublish(place, self.tier)
        self.backing.rank([place], *NO_RANK, self.tier)

    def copy(self, block: int) -> int | None:
        """Move one owner of a block to a copy of it; None where no block is free."""
        if self.tier != "device":
            reason = "block {block} is not on the GPU: blocks are copied on write there only"
            require(False, reason, block=block)
        fresh = self.backing.blocks.copy(self.place(block))
        return None if isinstance(fresh, Refused) else self.name(fresh)

    def clear_index(self) -> None:
        """Forget every key."""
        if self._sorted:
            self.backing.clear_index(self.tier)
