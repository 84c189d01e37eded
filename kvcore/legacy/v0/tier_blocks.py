# SPDX-License-Identifier: Apache-2.0
"""The blocks of one tier under the ids and hashes that the V0 block manager uses for them.

An id is any int of a given set; its position in ascending order is the block's id in the core. A
content hash is an int of Python's `hash`; an int that needs more than 32 bytes has no key and no
block. Its key is the int as 32 bytes, signed and big-endian, mixed so that both ends of the key,
the parts that an index and events read, vary with the hash:

    low, high = the int's last 8 bytes, its first 24
    key       = low, high XOR low, a group of 0

so different ints have different keys. Source: S002-04, 16, 43, 54.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v0.errors import UnknownName, require
from kvcore.pool.priority_eviction import NEVER, NO_PRIORITY
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
    """Return the key of a content hash. Raises OverflowError if it needs more than 32 bytes."""
    sign = content_hash >> 63
    if -1 <= sign <= 0:  # every value of Python's hash: the same key in one step
        return _pack(content_hash, sign, sign, content_hash ^ sign)
    if not -_LIMIT <= content_hash < _LIMIT:
        raise OverflowError(f"a content hash of {content_hash.bit_length()} bits")
    low, high = content_hash & _LOW, content_hash >> _LOW_BITS & _HIGH
    return make_key((low << _HIGH_BITS | high ^ low).to_bytes(HASH_SIZE, "big"), 0)


def hash_of_key(key: bytes) -> int:
    """Return the content hash of a key; undoes `key_of_hash`."""
    mixed = int.from_bytes(key[:HASH_SIZE], "big")
    low = mixed >> _HIGH_BITS
    content_hash = ((mixed & _HIGH) ^ low) << _LOW_BITS | low
    return content_hash - 2 * _LIMIT if content_hash >= _LIMIT else content_hash


class KeyedHash(int):
    """A content hash that caches its key, for callers that need it repeatedly."""

    key: bytes


def keep_key(content_hash: int) -> KeyedHash:
    """Return the content hash with its key cached. Raises OverflowError."""
    kept = KeyedHash(content_hash)
    kept.key = key_of_hash(content_hash)
    return kept


class TierBlocks:
    """One tier of a backing, whose blocks have the caller's ids."""

    __slots__ = ("_names", "_places", "backing", "ids", "order", "tier")

    def __init__(self, backing: Backing, tier: Tier, ids: Iterable[int]) -> None:
        """ids: the caller's ids, in the order of first use."""
        self.backing = backing
        self.tier = tier
        self.order = tuple(ids)
        self.ids = frozenset(self.order)
        self._names = tuple(sorted(self.ids))
        self._places = {name: place for place, name in enumerate(self._names)}
        if self.order != self._names:
            backing.blocks.take(len(self.order), tier)
            backing.blocks.release(self.places(self.order[::-1]), tier)

    def __len__(self) -> int:
        return len(self._names)

    def place(self, block: int) -> int:
        """Return a block's id in the core. Raises UnknownName."""
        place = self._places.get(block)
        if place is None:
            known = f"there are {len(self)} blocks from {min(self.ids, default=None)} on"
            raise UnknownName(name="block", value=block, known=known, block=block)
        return place

    def places(self, blocks: Iterable[int]) -> list[int]:
        """Return the blocks' ids in the core. Raises UnknownName."""
        return [self.place(block) for block in blocks]

    def names(self, places: Iterable[int]) -> list[int]:
        """Return the caller's ids of blocks of the core."""
        return [self._names[place] for place in places]

    def num_free(self) -> int:
        """Return the number of blocks without an owner."""
        return self.backing.blocks.num_free(self.tier)

    def free_blocks(self) -> list[int]:
        """Return the blocks without an owner, next to leave first. Cost: O(free blocks)."""
        return self.names(self.backing.blocks.free_blocks(self.tier))

    def take(self, count: int) -> list[int] | None:
        """Take the next free blocks, with one owner each; None if there are too few."""
        taken = self.backing.blocks.take(count, self.tier)
        return None if isinstance(taken, Refused) else self.names(taken)

    def find_or_take(
        self, keys: Sequence[bytes | None], lengths: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]] | int:
        """Find the block of each key, or take and publish a new one, and add an owner to it.

        A key of None takes a new block without a key. Returns all blocks, the new ones, and those
        that had no owner, whose access time is reset. If too few blocks are free, returns how many
        are needed: one for each content without an owner, whatever is evicted meanwhile.
        """
        core: Any = self.backing.blocks
        tier = self.tier
        known = {key: core.lookup(key, tier) for key in dict.fromkeys(keys) if key}
        idle = sum(each is None or not core.ref_count(each, tier) for each in known.values())
        if (needed := idle + keys.count(None)) > core.num_free(tier):
            return needed
        blocks: list[int] = []
        taken: list[int] = []
        revived: list[int] = []
        for key, length in zip(keys, lengths, strict=True):
            block = None if key is None else core.lookup(key, tier)
            if block is None:
                (block,) = core.take(1, tier)
                taken.append(block)
                if key is not None:
                    core.publish(block, key, tier)
                    core.set_priority((block,), None, length, tier)
            else:
                if not core.ref_count(block, tier):
                    revived.append(block)
                    core.set_priority((block,), NEVER, None, tier)
                core.touch((block,), tier)
            blocks.append(block)
        return self.names(blocks), self.names(taken), self.names(revived)

    def take_this(self, block: int) -> None:
        """Take one given block that has no owner and no key."""
        ahead = self.free_blocks()[: self.free_blocks().index(block)]
        self.take(len(ahead) + 1)
        self.release(ahead[::-1])

    def touch(self, blocks: Sequence[int]) -> None:
        """Add an owner to each block; a free block must have a key."""
        self.backing.blocks.touch(self.places(blocks), self.tier)

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner from each block, in order."""
        self.backing.blocks.release(self.places(blocks), self.tier)

    def ref_count(self, block: int) -> int:
        """Return the owner count of a block."""
        return self.backing.blocks.ref_count(self.place(block), self.tier)

    def ref_counts(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the owner count of each block."""
        return self.backing.blocks.ref_counts(self.places(blocks), self.tier) if blocks else ()

    def owners_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the owner count of each key's block; None for a key without a block."""
        core, tier = self.backing.blocks, self.tier
        found = [core.lookup(key, tier) for key in keys]
        return [None if block is None else core.ref_count(block, tier) for block in found]

    def priority_of(self, block: int) -> tuple[float, int]:
        """Return the access time of a block and its chain length in tokens, as last set."""
        return self.backing.state().pool(self.tier).priorities.get(self.place(block), NO_PRIORITY)

    def is_evictable(self, block: int) -> bool:
        """Return whether a block has a key and no owner."""
        return not self.ref_count(block) and self.content_hash(block) is not None

    def content_hash(self, block: int) -> int | None:
        """Return the hash under which a block is found, or None."""
        key = self.backing.blocks.key_of(self.place(block), self.tier)
        return None if key is None else hash_of_key(key)

    def find(self, key: bytes) -> int | None:
        """Return the block of a key, or None."""
        found = self.backing.blocks.lookup(key, self.tier)
        return None if found is None else self._names[found]

    def find_prefix(self, content_hashes: Sequence[int]) -> list[int]:
        """Return the blocks of content hashes, up to the first hash without a block."""
        kept: Any = content_hashes
        try:
            keys = [each.key for each in kept]
        except AttributeError:  # plain ints
            keys = []
            for each in content_hashes:
                try:
                    keys.append(key_of_hash(each))
                except (TypeError, OverflowError):
                    break
        return self.names(self.backing.blocks.lookup_prefix(keys, self.tier)) if keys else []

    def publish(self, block: int, key: bytes, length: int) -> None:
        """Publish a block under a key. length: number of tokens up to its end."""
        place = self.place(block)
        self.backing.blocks.publish(place, key, self.tier)
        self.backing.blocks.set_priority([place], None, length, self.tier)

    def set_priority(
        self, blocks: Sequence[int], time: float | None = None, length: int | None = None
    ) -> None:
        """Set the access time of blocks and their chain length in tokens; None keeps a value."""
        self.backing.blocks.set_priority(self.places(blocks), time, length, self.tier)

    def evictable(self) -> list[int]:
        """Return the blocks with a key and no owner, next to evict first. Cost: O(free blocks)."""
        return [each for each in self.free_blocks() if self.is_evictable(each)]

    def evict(self, block: int) -> None:
        """Make the caller the owner of an evictable block, and forget its content."""
        self.touch([block])
        self.backing.blocks.unpublish(self.place(block), self.tier)
        self.set_priority([block], *NO_PRIORITY)

    def copy(self, block: int) -> int | None:
        """Copy a block and move one owner to the copy; returns it, or None if no block is free."""
        if self.tier != "device":
            reason = "block {block} is not on the GPU: blocks are copied on write there only"
            require(False, reason, block=block)
        fresh = self.backing.blocks.copy(self.place(block))
        return None if isinstance(fresh, Refused) else self._names[fresh]

    def clear_index(self) -> None:
        """Forget every key."""
        self.backing.blocks.clear_index(self.tier)
