# SPDX-License-Identifier: Apache-2.0
"""The prefix-caching allocator of V0: blocks are found by content, and equal blocks are merged.

A block without an owner keeps its content until it is evicted: least recently accessed first, then
longest chain, then lowest id; blocks without content leave before all of these. Promoted blocks
count as computed from the next `mark_blocks_as_computed` on. A call computes how many blocks it
takes before its first change: one for each content that no owner holds, whatever is evicted
meanwhile. Source: S002-01 to 50, X-02, X-03, X-13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0.block import (
    NEVER_ACCESSED,
    NONE_HASH,
    Block,
    BlockId,
    PrefixCachingBlock,
    check_previous,
    hash_chain,
)
from kvcore.legacy.v0.block_allocator import BlockAllocator
from kvcore.legacy.v0.common import CacheMetricData, ReadOnlyRefCounter, ids_of
from kvcore.legacy.v0.errors import WrongValue, require
from kvcore.legacy.v0.evictor import EvictionPolicy, make_evictor
from kvcore.legacy.v0.naive_block import HashlessAllocator
from kvcore.legacy.v0.tier_blocks import TierBlocks, key_of_hash


@attrs.define(weakref_slot=False)
class BlockTracker:
    """The use of one physical block inside a prefix-caching allocator."""

    active: bool = False
    computed: bool = False
    last_accessed: float = NEVER_ACCESSED

    def reset(self) -> None:
        """Forget the access time and that it was computed."""
        self.computed, self.last_accessed = False, NEVER_ACCESSED

    def enable(self) -> None:
        """Start tracking. Raises WrongCall if the block is tracked already."""
        require(not self.active, "the block is tracked already")
        self.active = True
        self.reset()

    def disable(self) -> None:
        """Stop tracking. Raises WrongCall if the block is not tracked."""
        require(self.active, "the block is not tracked")
        self.active = False
        self.reset()


class UsedBlock(BlockTracker):
    """A live view of one physical block's use, which only the core changes.

    A block is active while it has owners; its access time is part of its priority.
    """

    __slots__ = ("_block_id", "_blocks", "_computed")

    def __init__(
        self, block_id: BlockId, blocks: TierBlocks, computed: AbstractSet[BlockId]
    ) -> None:
        """computed: ids of the used blocks whose tokens have been computed."""
        self._block_id, self._blocks, self._computed = block_id, blocks, computed

    def _refuse(self) -> None:
        """Raise WrongCall."""
        require(False, "only the core changes the use of block {block}", block=self._block_id)

    def _is_active(self) -> bool:
        return self._blocks.ref_count(self._block_id) > 0

    def _last_accessed(self) -> float:
        return self._blocks.priority_of(self._block_id)[0] if self.active else NEVER_ACCESSED

    active: Any = property(_is_active)
    computed: Any = property(lambda self: self.active and self._block_id in self._computed)
    last_accessed: Any = property(_last_accessed)
    reset = enable = disable = _refuse


class PrefixCachingBlockAllocator(BlockAllocator):
    """Blocks of one tier that sequences of the same content share."""

    caches = True
    _none_hash = NONE_HASH

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[BlockId] | None = None,
        eviction_policy: EvictionPolicy = EvictionPolicy.LRU,
        *,
        backend: BackendName = "python",
    ) -> None:
        """Raises WrongCall unless there are num_blocks ids, WrongValue for an unknown policy."""
        self.eviction_policy = eviction_policy
        super().__init__(PrefixCachingBlock, num_blocks, block_size, block_ids, backend=backend)

    def rebind(self, blocks: TierBlocks) -> None:
        """Use other blocks with the same ids, none of which may be in use."""
        super().rebind(blocks)
        self.evictor = make_evictor(self.eviction_policy, blocks)
        self._hashless_allocator = HashlessAllocator(blocks, self._block_size)
        self._forget()

    @property
    def refcounter(self) -> ReadOnlyRefCounter:
        """A read-only view of the owner counts; owners that are not blocks would not be tracked."""
        return self._refcounter.as_readonly()

    def check_chain(
        self,
        prev_block: Block | None,
        block_token_ids: Sequence[list[int]],
        device: Device | None,
    ) -> None:
        """Raise WrongCall unless full blocks of these tokens can follow prev_block."""
        super().check_chain(prev_block, (), device)
        check_previous(prev_block)
        for tokens in block_token_ids:
            if (num := len(tokens)) != self._block_size:
                reason = "a full block has {size} tokens, {num} are given"
                require(False, reason, size=self._block_size, num=num)
            if prev_block is not None and prev_block.content_hash is None:
                reason = "{num} tokens cannot follow a block without content hash as a full block"
                require(False, reason, num=num)

    def fill(
        self,
        prev_block: Block | None,
        chunks: Sequence[list[int]],
        extra_hash: int | None,
    ) -> list[Block]:
        """Find or take blocks of these tokens, all or none; the last may be partly full.

        Raises NoFreeBlocksError.
        """
        num, size = len(chunks), self._block_size
        parent, before = None, 0
        if prev_block is not None:
            parent, before = prev_block.content_hash, prev_block.num_tokens_total
        num_full = num - (num > 0 and len(chunks[-1]) < size)
        hashes: list[int | None] = [*hash_chain(chunks[:num_full], parent, extra_hash)]
        hashes += [None] * (num - num_full)
        lengths = range(before + size, before + size * num + 1, size)
        ids, new = self._find_or_take(hashes, lengths, f"{num} blocks")
        made: list[Block] = []
        for tokens, content_hash, block_id in zip(chunks, hashes, ids, strict=True):
            prev_block = self.make(prev_block, tokens, block_id, extra_hash, content_hash)
            if block_id not in new:
                prev_block.computed = True
            new.discard(block_id)  # repeated content is found the second time
            made.append(prev_block)
        return made

    def place_contents(
        self, blocks: Sequence[Block], who: str
    ) -> tuple[list[BlockId], AbstractSet[BlockId]]:
        """Find or take a block for the content of each object, all or none.

        Returns the ids, and those of blocks that already contain the content.
        Raises NoFreeBlocksError.
        """
        hashes = [block.content_hash for block in blocks]
        ids, new = self._find_or_take(hashes, [block.num_tokens_total for block in blocks], who)
        return ids, self._computed.intersection(ids).difference(new)

    def is_block_cached(self, block: Block) -> bool:
        """Return whether a block's content is cached. Raises WrongCall without a content hash."""
        return self.blocks.find(key_of_hash(self._hash_of(block))) is not None

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Publish a full block, or give it the id of the block that has its content.

        Raises WrongCall.
        """
        self._hash_of(block)
        self.check_held([block])
        return self.promote(block)

    def promote(self, block: Block) -> BlockId:
        """Promote a full block that has an owner, and return its id after that."""
        (own,), key = ids_of([block]), key_of_hash(self._hash_of(block))
        found = self.blocks.find(key)
        if found is None:
            self.blocks.publish(own, key, block.num_tokens_total)
            self._touched_blocks.add(own)
            return own
        if found != own:
            self.give_back([own])
            if not self.blocks.ref_count(found):
                self.blocks.set_priority([found], NEVER_ACCESSED)
                self.note_written([found])
            self.blocks.touch([found])
            block.block_id, block.computed = found, True
        return found

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Record the access time of blocks. Raises WrongValue if one has no owner or content."""
        time = read_time(now)
        for block_id, count in zip(block_ids, self.blocks.ref_counts(block_ids), strict=True):
            if not count and not self.blocks.is_evictable(block_id):
                reason = f"Mark block as accessed which is not belonged to GPU: block {block_id}"
                raise WrongValue(reason=f"{reason} is free", block=block_id)
        self.blocks.set_priority(block_ids, time)

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:  # noqa: ARG002 # S002-39
        """Mark all blocks promoted since the last call as computed; ignores block_ids."""
        self._computed |= self._touched_blocks
        self._touched_blocks.clear()

    def note_written(self, block_ids: Iterable[BlockId]) -> None:
        """Mark used blocks as computed, since a copy filled them or they kept their content."""
        self._computed.update(block_ids)
        self._touched_blocks.difference_update(block_ids)

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Return whether a used block is marked computed, or an unused one keeps its content."""
        if self.blocks.ref_count(block_id):
            return block_id in self._computed
        return self.blocks.is_evictable(block_id)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """Return the common prefix of the lists that are not empty; a single list as it is."""
        if len(computed_seq_block_ids) == 1:
            return computed_seq_block_ids[0]
        lists = [each for each in computed_seq_block_ids if each]
        common = min(lists, key=len, default=[])
        for length, ids in enumerate(zip(*lists, strict=False)):
            if len(set(ids)) > 1:
                return common[:length]
        return common[:]

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Return how many full blocks have content without an owner here: each takes a block."""
        hashes = [block.content_hash for block in blocks if block.is_full]
        known = [key_of_hash(each) for each in hashes if each is not None]
        return len(hashes) - len(known) + self.count_idle(known)

    def count_idle(self, keys: Sequence[bytes]) -> int:
        """Return how many of these contents have no owner here: each takes a block."""
        return sum(not owners for owners in self.blocks.owners_of(keys)) if keys else 0

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """Return the hashes up to the first whose block is missing or not computed yet."""
        found = self.blocks.find_prefix(block_hashes)
        if not self._computed.issuperset(found):
            counts = self.blocks.ref_counts(found)
            for length, (block_id, count) in enumerate(zip(found, counts, strict=True)):
                if count and block_id not in self._computed:
                    return block_hashes[:length]
        return block_hashes[: len(found)]

    def reset_prefix_cache(self) -> bool:
        """Forget all content and return True; if a block is in use, do nothing and return False."""
        if self.blocks.num_free() < len(self.blocks):
            return False
        self.blocks.clear_index()
        self._forget()
        return True

    def get_prefix_cache_hit_rate(self) -> float:
        """Return the share of full-block look-ups that hit since the start or last reset."""
        return self.metric_data.get_hit_rate()

    @property
    def _block_tracker(self) -> dict[BlockId, BlockTracker]:
        """The use of each block, by ascending id."""
        return {each: self._tracker(each) for each in sorted(self.blocks.ids)}

    def _tracker(self, block_id: BlockId) -> BlockTracker:
        self.blocks.place(block_id)
        return UsedBlock(block_id, self.blocks, self._computed)

    @property
    def _cached_blocks(self) -> dict[int, BlockId]:
        """A copy of content hash -> block, by ascending id; tests of the original read it."""
        hashes = {each: self.blocks.content_hash(each) for each in sorted(self.blocks.ids)}
        return {known: each for each, known in hashes.items() if known is not None}

    def _forget(self) -> None:
        self._touched_blocks: set[BlockId] = set()
        self._computed: set[BlockId] = set()  # undefined for blocks without an owner
        self.metric_data = CacheMetricData()

    def _hash_of(self, block: Block) -> int:
        """Return the content hash of a block. Raises WrongCall if it has none."""
        if block.content_hash is None:
            reason = "block {block} has no content hash: {num} of {size} tokens"
            num, size = len(block.token_ids), self._block_size
            require(False, reason, block=block.block_id, num=num, size=size)
        return block.content_hash or 0

    def _find_or_take(
        self, hashes: Sequence[int | None], lengths: Sequence[int], who: str
    ) -> tuple[list[BlockId], set[BlockId]]:
        """Find or take a block for each content, all or none; returns all ids, and the new ones."""
        keys = [None if each is None else key_of_hash(each) for each in hashes]
        placed = self.blocks.find_or_take(keys, lengths)
        if isinstance(placed, int):
            raise self.shortage(placed, who)
        ids, taken, revived = placed
        self._taken(taken)
        is_new = set(taken)
        hashed = [block_id for block_id, key in zip(ids, keys, strict=True) if key is not None]
        self._touched_blocks.update(is_new.intersection(hashed))
        self.note_written(revived)
        self.metric_data.query_all(len(hashed), len(ids) - len(taken))
        return ids, is_new

    def _taken(self, block_ids: Sequence[BlockId]) -> None:
        self._computed.difference_update(block_ids)
        self._touched_blocks.difference_update(block_ids)


def read_time(now: float) -> float:
    """Return a time as a float. Raises WrongValue if it is not a finite number."""
    try:
        time = float(now)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not math.isfinite(time):
        raise WrongValue(reason=f"a time of access must be a finite number, not {now!r}")
    return time
