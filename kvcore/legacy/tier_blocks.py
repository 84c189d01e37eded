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

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from kvcore.commands import Tier
from kvcore.hashing import HASH_SIZE, make_key
from kvcore.legacy.backing import Backing
from kvcore.legacy.block_errors import UnknownName, require
from kvcore.values import Refused

_LOW_BITS = 64
_HIGH_BITS = 8 * HASH_SIZE - _LOW_BITS
_LOW: int = 2**_LOW_BITS - 1
_HIGH: int = 2**_HIGH_BITS - 1
_LIMIT: int = 2 ** (8 * HASH_SIZE - 1)


def key_of_hash(content_hash: int) -> bytes:
    """The key of a content hash. Raises OverflowError where it needs more than 32 bytes."""
    if not -_LIMIT <= content_hash < _LIMIT:
        raise OverflowError(f"a content hash of {content_hash.bit_length()} bits")
    low, high = content_hash & _LOW, content_hash >> _LOW_BITS & _HIGH
    return make_key((low << _HIGH_BITS | high ^ low).to_bytes(HASH_SIZE, "big"), 0)


def hash_of_key(key: bytes) -> int:
    """The content hash of a key; undoes `key_of_hash`."""
    mixed = int.from_bytes(key[:HASH_SIZE], "big")
    low = mixed >> _HIGH_BITS
    content_hash = ((mixed & _HIGH) ^ low) << _LOW_BITS | low
    return content_hash - 2 * _LIMIT if content_hash >= _LIMIT else content_hash


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

    def places(self, blocks: Iterable[int]) -> list[int]:
        """The same for each."""
        if self._first == 0 and self.ids.issuperset(blocks):
            return list(blocks)
        return [self.place(block) for block in blocks]

    def name(self, place: int) -> int:
        """The id of a block of the core."""
        return place + self._first if self._first is not None else self._sorted[place]

    def num_free(self) -> int:
        """Blocks without owner."""
        return self.backing.num_free(self.tier) if self._sorted else 0

    def take(self, count: int = 1) -> list[int] | None:
        """The next free blocks, with one owner each; None where there are too few."""
        taken = self.backing.take(count, self.tier) if self._sorted or not count else None
        if taken is None or isinstance(taken, Refused):
            return None
        return list(taken) if self._first == 0 else [self.name(place) for place in taken]

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
            self.backing.touch(self.places(blocks), self.tier)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each, in order."""
        if blocks:
            self.backing.release(self.places(blocks), self.tier)

    def ref_count(self, block: int) -> int:
        """Owners of a block."""
        return self.backing.ref_count(self.place(block), self.tier)

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
        found = self.backing.lookup(key, self.tier)
        return None if found is None else self.name(found)

    def publish(self, block: int, key: bytes) -> None:
        """Make a block findable."""
        self.backing.publish(self.place(block), key, self.tier)

    def rank(self, block: int, time: float | None = None, length: int | None = None) -> None:
        """Say when a block was used, and how many tokens its chain has."""
        self.backing.rank([self.place(block)], time, length, self.tier)

    def evictable(self) -> list[int]:
        """Blocks with a key and no owner, the first to be evicted first. Cost: O(free blocks)."""
        if not self._sorted:
            return []
        key_of, tier = self.backing.key_of, self.tier
        free = self.backing.free_blocks(tier)
        return [self.name(each) for each in free if key_of(each, tier) is not None]

    def evict(self, block: int) -> None:
        """Make the caller the owner of an evictable block, and forget its content."""
        self.backing.touch([self.place(block)], self.tier)
        self.backing.unpublish(self.place(block), self.tier)

    def copy(self, block: int) -> int | None:
        """Move one owner of a block to a copy of it; None where no block is free."""
        reason = "block {block} is not on the GPU: blocks are copied on write there only"
        require(self.tier == "device", reason, block=block)
        fresh = self.backing.copy(self.place(block))
        return None if isinstance(fresh, Refused) else self.name(fresh)

    def clear_index(self) -> None:
        """Forget every key."""
        if self._sorted:
            self.backing.clear_index(self.tier)
