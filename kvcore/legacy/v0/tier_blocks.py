# SPDX-License-Identifier: Apache-2.0
"""The blocks of one tier under the ids and hashes that the V0 block manager has for them.

An id is any int of a given set; its place among them in rising order is the block in the core. A
content hash is an int of Python's `hash`; an int that needs more than 32 bytes has no key and no
block. Its key is the int as 32 bytes, signed and big-endian, mixed so that both ends of the key are
digest, which is all that an index and events read:

    low, high = the int's last 8 bytes, its first 24
    key       = low, high XOR low, a group of 0

so no two ints have one key. Source: S002-04, 16, 43, 54.
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
    """The key of a content hash. Raises OverflowError if it needs more than 32 bytes."""
    sign = content_hash >> 63
    if -1 <= sign <= 0:  # as all hashes of Python: the same key in one step
        return _pack(content_hash, sign, sign, content_hash ^ sign)
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


class KeyedHash(int):
    """A content hash that keeps its key, for a caller that needs it repeatedly."""

    key: bytes


def keep_key(content_hash: int) -> KeyedHash:
    """The same content hash with its key. Raises OverflowError."""
    kept = KeyedHash(content_hash)
    kept.key = key_of_hash(content_hash)
    return kept


class TierBlocks:
    """One tier of a backing, its blocks named by ids of a caller."""

    __slots__ = ("_names", "_places", "backing", "ids", "order", "tier")

    def __init__(self, backing: Backing, tier: Tier, ids: Iterable[int]) -> None:
        """ids: in the order in which they are first taken."""
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
        """The block in the core. Raises UnknownName."""
        place = self._places.get(block)
        if place is None:
            known = f"there are {len(self)} blocks from {min(self.ids, default=None)} on"
            raise UnknownName(name="block", value=block, known=known, block=block)
        return place

    def places(self, blocks: Iterable[int]) -> list[int]:
        """The blocks in the core. Raises UnknownName."""
        return [self.place(block) for block in blocks]

    def names(self, places: Iterable[int]) -> list[int]:
        """The ids of blocks of the core."""
        return [self._names[place] for place in places]

    def num_free(self) -> int:
        """Blocks without owner."""
        return self.backing.blocks.num_free(self.tier)

    def free_blocks(self) -> list[int]:
        """Blocks without owner, the one that leaves next first. Cost: O(free blocks)."""
        return self.names(self.backing.blocks.free_blocks(self.tier))

    def take(self, count: int) -> list[int] | None:
        """The next free blocks, with one owner each; None if there are too few."""
        taken = self.backing.blocks.take(count, self.tier)
        return None if isinstance(taken, Refused) else self.names(taken)

    def find_or_take(
        self, keys: Sequence[bytes | None], lengths: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]] | int:
        """Give the block of each key an owner more: the one that answers for it, or a new one,
        which does so from then on; for None a new one without key. Tells how many blocks are needed
        if there are too few: one for each content that nobody owns, whatever is evicted on the way.

        Gives the blocks, those that are new, those that had no owner and forgot their time.
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
        """Give one certain block without owner and key an owner."""
        ahead = self.free_blocks()[: self.free_blocks().index(block)]
        self.take(len(ahead) + 1)
        self.release(ahead[::-1])

    def touch(self, blocks: Sequence[int]) -> None:
        """One owner more for each; a free one must have a key."""
        self.backing.blocks.touch(self.places(blocks), self.tier)

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each, in order."""
        self.backing.blocks.release(self.places(blocks), self.tier)

    def ref_count(self, block: int) -> int:
        """Owners of a block."""
        return self.backing.blocks.ref_count(self.place(block), self.tier)

    def ref_counts(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Owners of each block."""
        return self.backing.blocks.ref_counts(self.places(blocks), self.tier) if blocks else ()

    def owners_of(self, keys: Sequence[bytes]) -> list[int | None]:
        """How many own the block of each key, None if there is none."""
        core, tier = self.backing.blocks, self.tier
        found = [core.lookup(key, tier) for key in keys]
        return [None if block is None else core.ref_count(block, tier) for block in found]

    def priority_of(self, block: int) -> tuple[float, int]:
        """When a block was used, and how many tokens its chain has, as set last."""
        return self.backing.state().pool(self.tier).priorities.get(self.place(block), NO_PRIORITY)

    def is_evictable(self, block: int) -> bool:
        """Whether a block has a key and no owner."""
        return not self.ref_count(block) and self.content_hash(block) is not None

    def content_hash(self, block: int) -> int | None:
        """The hash under which a block is found."""
        key = self.backing.blocks.key_of(self.place(block), self.tier)
        return None if key is None else hash_of_key(key)

    def find(self, key: bytes) -> int | None:
        """The block of a key."""
        found = self.backing.blocks.lookup(key, self.tier)
        return None if found is None else self._names[found]

    def find_prefix(self, content_hashes: Sequence[int]) -> list[int]:
        """The blocks of content hashes up to the first that has none."""
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
        """Make a block findable. length: tokens of the chain that it ends."""
        place = self.place(block)
        self.backing.blocks.publish(place, key, self.tier)
        self.backing.blocks.set_priority([place], None, length, self.tier)

    def set_priority(
        self, blocks: Sequence[int], time: float | None = None, length: int | None = None
    ) -> None:
        """Set when blocks were used, and how many tokens their chain has."""
        self.backing.blocks.set_priority(self.places(blocks), time, length, self.tier)

    def evictable(self) -> list[int]:
        """Blocks with a key and no owner, the first to be evicted first. Cost: O(free blocks)."""
        return [each for each in self.free_blocks() if self.is_evictable(each)]

    def evict(self, block: int) -> None:
        """Make the caller the owner of an evictable block, and forget its content."""
        self.touch([block])
        self.backing.blocks.unpublish(self.place(block), self.tier)
        self.set_priority([block], *NO_PRIORITY)

    def copy(self, block: int) -> int | None:
        """Move one owner of a block to a copy of it; None if no block is free."""
        if self.tier != "device":
            reason = "block {block} is not on the GPU: blocks are copied on write there only"
            require(False, reason, block=block)
        fresh = self.backing.blocks.copy(self.place(block))
        return None if isinstance(fresh, Refused) else self._names[fresh]

    def clear_index(self) -> None:
        """Forget every key."""
        self.backing.blocks.clear_index(self.tier)
