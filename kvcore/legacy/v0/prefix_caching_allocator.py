# SPDX-License-Identifier: Apache-2.0
"""The prefix-caching allocator of V0: blocks are found by content, and merged if they are equal.

A block without owner keeps its content until it is evicted, least recently accessed first, then
longest chain, then lowest id; blocks without content go before. What was promoted counts as
computed from the next `mark_blocks_as_computed` on. What a call takes is worked out before its
first change: each block of it that no owner holds under its hash takes one, whatever is evicted on
the way. Source: S002-01 to 50, X-02, X-03, X-13.
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
    """How one physical block is used inside a prefix-caching allocator."""

    active: bool = False
    computed: bool = False
    last_accessed: float = NEVER_ACCESSED

    def reset(self) -> None:
        """Forget access and computation."""
        self.computed, self.last_accessed = False, NEVER_ACCESSED

    def enable(self) -> None:
        """Begin to track. Raises WrongCall if that was begun."""
        require(not self.active, "the block is tracked already")
        self.active = True
        self.reset()

    def disable(self) -> None:
        """End to track. Raises WrongCall if that was not begun."""
        require(self.active, "the block is not tracked")
        self.active = False
        self.reset()


class UsedBlock(BlockTracker):
    """How one physical block is used now: a view, which the core alone changes.

    A block is active while it has owners; when it was accessed is part of its priority.
    """

    __slots__ = ("_block_id", "_blocks", "_computed")

    def __init__(
        self, block_id: BlockId, blocks: TierBlocks, computed: AbstractSet[BlockId]
    ) -> None:
        """computed: ids of the used blocks whose tokens have been computed."""
        self._block_id, self._blocks, self._computed = block_id, blocks, computed

    def _refuse(self) -> None:
        """Raises WrongCall."""
        require(False, "use of block {block} is the core's to change", block=self._block_id)

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
        """Work on other blocks of the same ids, none of which is used."""
        super().rebind(blocks)
        self.evictor = make_evictor(self.eviction_policy, blocks)
        self._hashless_allocator = HashlessAllocator(blocks, self._block_size)
        self._forget()

    @property
    def refcounter(self) -> ReadOnlyRefCounter:
        """How many own each block, to look at: owners that are no blocks would not be tracked."""
        return self._refcounter.as_readonly()

    def check_chain(
        self,
        prev_block: Block | None,
        block_token_ids: Sequence[list[int]],
        device: Device | None,
    ) -> None:
        """Raise WrongCall unless full blocks of these tokens can follow a block."""
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
        """Blocks of these tokens, found or new, of which the last may be part full, all or none.

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
            new.discard(block_id)  # a content that comes twice is found the second time
            made.append(prev_block)
        return made

    def place_contents(
        self, blocks: Sequence[Block], who: str
    ) -> tuple[list[BlockId], AbstractSet[BlockId]]:
        """A block for the content of each object, all or none, and which of them have it in them.

        Raises NoFreeBlocksError.
        """
        hashes = [block.content_hash for block in blocks]
        ids, new = self._find_or_take(hashes, [block.num_tokens_total for block in blocks], who)
        return ids, self._computed.intersection(ids).difference(new)

    def is_block_cached(self, block: Block) -> bool:
        """Whether a block's content can be found. Raises WrongCall without content hash."""
        return self.blocks.find(key_of_hash(self._hash_of(block))) is not None

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Make a full block findable, or give it the id of the block that is found.

        Raises WrongCall.
        """
        self._hash_of(block)
        self.check_held([block])
        return self.promote(block)

    def promote(self, block: Block) -> BlockId:
        """The same for a full block that has an owner."""
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
        """Say when blocks were used. Raises WrongValue if one is neither used nor evictable."""
        time = read_time(now)
        for block_id, count in zip(block_ids, self.blocks.ref_counts(block_ids), strict=True):
            if not count and not self.blocks.is_evictable(block_id):
                reason = f"Mark block as accessed which is not belonged to GPU: block {block_id}"
                raise WrongValue(reason=f"{reason} is free", block=block_id)
        self.blocks.set_priority(block_ids, time)

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:  # noqa: ARG002 # S002-39
        """Count all that was promoted since the last call as computed, whatever is named."""
        self._computed |= self._touched_blocks
        self._touched_blocks.clear()

    def note_written(self, block_ids: Iterable[BlockId]) -> None:
        """Count used blocks as computed, since a copy filled them, or since they were kept."""
        self._computed.update(block_ids)
        self._touched_blocks.difference_update(block_ids)

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Whether a used block was marked computed; a block without owner: whether it is kept."""
        if self.blocks.ref_count(block_id):
            return block_id in self._computed
        return self.blocks.is_evictable(block_id)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """The common prefix of these lists, empty ones aside; one list is its own answer."""
        if len(computed_seq_block_ids) == 1:
            return computed_seq_block_ids[0]
        lists = [each for each in computed_seq_block_ids if each]
        common = min(lists, key=len, default=[])
        for length, ids in enumerate(zip(*lists, strict=False)):
            if len(set(ids)) > 1:
                return common[:length]
        return common[:]

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Full blocks among them whose content has no owner here: each would take a block."""
        hashes = [block.content_hash for block in blocks if block.is_full]
        known = [key_of_hash(each) for each in hashes if each is not None]
        return len(hashes) - len(known) + self.count_idle(known)

    def count_idle(self, keys: Sequence[bytes]) -> int:
        """How many of these contents have no owner here: each would take a block."""
        return sum(not owners for owners in self.blocks.owners_of(keys)) if keys else 0

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """The hashes up to the first whose block is not there, or not computed yet."""
        found = self.blocks.find_prefix(block_hashes)
        if not self._computed.issuperset(found):
            counts = self.blocks.ref_counts(found)
            for length, (block_id, count) in enumerate(zip(found, counts, strict=True)):
                if count and block_id not in self._computed:
                    return block_hashes[:length]
        return block_hashes[: len(found)]

    def reset_prefix_cache(self) -> bool:
        """Forget all content, unless a block is used; whether that was done."""
        if self.blocks.num_free() < len(self.blocks):
            return False
        self.blocks.clear_index()
        self._forget()
        return True

    def get_prefix_cache_hit_rate(self) -> float:
        """Share of look-ups of full blocks that hit, since the start or the last reset."""
        return self.metric_data.get_hit_rate()

    @property
    def _block_tracker(self) -> dict[BlockId, BlockTracker]:
        """The record of each block's use."""
        return {each: self._tracker(each) for each in sorted(self.blocks.ids)}

    def _tracker(self, block_id: BlockId) -> BlockTracker:
        self.blocks.place(block_id)
        return UsedBlock(block_id, self.blocks, self._computed)

    @property
    def _cached_blocks(self) -> dict[int, BlockId]:
        """The block of each content, as tests of the original read it: by rising id, a copy."""
        hashes = {each: self.blocks.content_hash(each) for each in sorted(self.blocks.ids)}
        return {known: each for each, known in hashes.items() if known is not None}

    def _forget(self) -> None:
        self._touched_blocks: set[BlockId] = set()
        self._computed: set[BlockId] = set()  # of blocks without owner it says nothing
        self.metric_data = CacheMetricData()

    def _hash_of(self, block: Block) -> int:
        """The content hash of a block. Raises WrongCall without one."""
        if block.content_hash is None:
            reason = "block {block} has no content hash: {num} of {size} tokens"
            num, size = len(block.token_ids), self._block_size
            require(False, reason, block=block.block_id, num=num, size=size)
        return block.content_hash or 0

    def _find_or_take(
        self, hashes: Sequence[int | None], lengths: Sequence[int], who: str
    ) -> tuple[list[BlockId], set[BlockId]]:
        """A block for each content, all or none, and which of them are new."""
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
    """A time as a number. Raises WrongValue if it is none, or not finite."""
    try:
        time = float(now)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not math.isfinite(time):
        raise WrongValue(reason=f"a time of access must be a finite number, not {now!r}")
    return time
