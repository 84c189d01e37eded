# SPDX-License-Identifier: Apache-2.0
"""The prefix-caching allocator of V0: blocks are found by content, and merged where they are equal.

Rules: a block without owner keeps its content until it is evicted, least recently accessed first,
then longest chain, then lowest id; blocks without content go before. What was promoted counts as
computed from the next `mark_blocks_as_computed` on. What the call takes is worked out before its
first change: each block of it that no owner holds under its hash takes one, whatever is evicted on
the way. Source: S002-04 to 50, X-02, X-03, X-13.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v0.block_interfaces import Block, BlockId, Device, PooledBlock
from kvcore.legacy.v0.block_tracker import (
    NEVER_ACCESSED,
    BlockTracker,
    CacheMetricData,
    ReadOnlyRefCounter,
)
from kvcore.legacy.v0.content_block import (
    NONE_HASH,
    ContentAllocator,
    PrefixCachingBlock,
    check_previous,
    hash_chain,
)
from kvcore.legacy.v0.errors import NoFreeBlocksError, WrongValue, require
from kvcore.legacy.v0.evictor import EvictionPolicy, LRUEvictor, make_evictor
from kvcore.legacy.v0.naive_block import NaiveBlock, NaiveBlockAllocator
from kvcore.legacy.v0.tier_allocator import check_no_device
from kvcore.legacy.v0.tier_blocks import TierBlocks, hash_of_key, key_of_hash, keys_of_hashes
from kvcore.legacy.v0.used_block import UsedBlock


class PrefixCachingBlockAllocator(ContentAllocator):
    """Blocks of one tier that sequences of the same content share."""

    _none_hash = NONE_HASH

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[BlockId] | None = None,
        eviction_policy: EvictionPolicy = EvictionPolicy.LRU,
        *,
        backend: BackendName = "python",
        blocks: TierBlocks | None = None,
    ) -> None:
        """Raises WrongCall unless there are num_blocks ids, WrongValue for an unknown policy."""
        self.eviction_policy = eviction_policy
        super().__init__(num_blocks, block_size, block_ids, backend=backend, blocks=blocks)

    def rebind(self, blocks: TierBlocks) -> None:
        """Work on other blocks of the same ids, none of which is used."""
        super().rebind(blocks)
        self.evictor: LRUEvictor = make_evictor(self.eviction_policy, blocks)
        self._hashless_allocator = HashlessAllocator(blocks, self._block_size)
        self._forget()

    @property
    def refcounter(self) -> ReadOnlyRefCounter:
        """How many own each block, to look at: owners that are no blocks would not be tracked."""
        return self._refcounter.as_readonly()

    def allocate_mutable_block(
        self,
        prev_block: Block | None,
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Block:
        """An empty block. Raises WrongCall, NoFreeBlocksError."""
        check_no_device(device)
        check_previous(prev_block)
        return self.make(prev_block, [], self.take_empty()[0], extra_hash)

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> list[Block]:
        """Full blocks, found or new, all or none. Raises WrongCall, NoFreeBlocksError."""
        check_no_device(device)
        check_previous(prev_block)
        hashes = self._hash_blocks(prev_block, block_token_ids, extra_hash)
        size, before = self._block_size, 0 if prev_block is None else prev_block.num_tokens_total
        num = len(hashes)
        lengths = range(before + size, before + size * num + 1, size)
        ids, new = self._find_or_take(list(map(key_of_hash, hashes)), lengths, f"{num} blocks")
        made: list[Block] = []
        for tokens, content_hash, block_id in zip(block_token_ids, hashes, ids, strict=True):
            is_hit = block_id not in new
            new.discard(block_id)  # where a content comes twice
            prev_block = self.make(prev_block, tokens, block_id, extra_hash, content_hash, is_hit)
            made.append(prev_block)
        return made

    def fill(
        self, token_ids: list[int], extra_hash: int | None
    ) -> tuple[list[BlockId], list[bytes], set[int]]:
        """Blocks of a sequence's first tokens, all or none; the keys of the full ones; the places
        of those that were found. Raises NoFreeBlocksError.
        """
        size, num = self._block_size, len(token_ids)
        keys = keys_of_hashes(hash_chain(token_ids, size, None, extra_hash))
        contents: list[Any] = [*keys, None] if num % size else keys
        lengths = range(size, size * len(contents) + 1, size)
        ids, new = self._find_or_take(contents, lengths, f"{len(contents)} blocks")
        if len(new) == len(ids):
            return ids, keys, set()
        return ids, keys, {at for at, block_id in enumerate(ids) if block_id not in new}

    def key_behind(self, keys: Sequence[bytes], token_ids: list[int], extra: int | None) -> bytes:
        """The key of a full block behind blocks of these keys."""
        parent = hash_of_key(keys[-1]) if keys else None
        is_first = parent is None
        return key_of_hash(PrefixCachingBlock.hash_block_tokens(is_first, parent, token_ids, extra))

    def contents_of(self, blocks: Sequence[Block]) -> tuple[list[bytes | None], list[int]]:
        """The keys of objects, None where there is none, and the lengths of their chains."""
        hashes = [block.content_hash for block in blocks]
        keys = [None if each is None else key_of_hash(each) for each in hashes]
        return keys, [block.num_tokens_total for block in blocks]

    def place_contents(
        self, keys: Sequence[bytes | None], lengths: Sequence[int], who: str
    ) -> tuple[list[BlockId], AbstractSet[BlockId]]:
        """A block for each content, all or none, and which of them have it in them.

        Raises NoFreeBlocksError.
        """
        ids, new = self._find_or_take(keys, lengths, who)
        return ids, self._computed.intersection(ids).difference(new)

    def is_block_cached(self, block: Block) -> bool:
        """Whether a block's content can be found. Raises WrongCall without content hash."""
        reason = "block {block} has no content hash: {num} of {size} tokens"
        num, size = len(block.token_ids), self._block_size
        require(block.content_hash is not None, reason, block=block.block_id, num=num, size=size)
        assert block.content_hash is not None
        return self._blocks.lookup(block.content_hash) is not None

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Make a full block findable, or give it the id of the block that is found.

        Raises WrongCall.
        """
        content_hash = block.content_hash
        if content_hash is None:
            reason = "block {block} has no content hash: {num} of {size} tokens"
            num, size = len(block.token_ids), self._block_size
            require(False, reason, block=block.block_id, num=num, size=size)
        assert content_hash is not None
        (own,) = self.check_held([block])
        found = self.close(own, key_of_hash(content_hash), block.num_tokens_total)
        if found != own:
            block.block_id = found
            block.computed = True
        return found

    def close(self, block_id: BlockId, key: bytes, length: int) -> BlockId:
        """Make a block findable at the end of a chain of so many tokens, or give its owner the one
        that is found, and is computed then if it had no owner.
        """
        found = self._blocks.find(key)
        if found is None:
            self._blocks.publish(block_id, key, length)
            self._touched_blocks.add(block_id)
            return block_id
        if found != block_id:
            self.give_back([block_id])
            if not self._blocks.ref_count(found):
                self._blocks.rank(found, NEVER_ACCESSED)
                self._revived([found])
            self.share([found])
        return found

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Say when blocks were used. Raises WrongValue where one is neither used nor evictable."""
        time = read_time(now)
        counts = self._blocks.ref_counts(block_ids)
        if 0 in counts:
            for block_id, count in zip(block_ids, counts, strict=True):
                if not count and not self._blocks.is_evictable(block_id):
                    reason = "Mark block as accessed which is not belonged to GPU: block {} is free"
                    raise WrongValue(reason=reason.format(block_id), block=block_id)
        self._blocks.access(block_ids, time)

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:  # noqa: ARG002 # S002-39
        """Count all that was promoted since the last call as computed, whatever is named."""
        self._computed |= self._touched_blocks
        self._touched_blocks.clear()

    def note_written(self, block_ids: Iterable[BlockId]) -> None:
        """Count used blocks as computed, since a copy filled them."""
        self._computed.update(block_ids)
        self._touched_blocks.difference_update(block_ids)

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Whether a used block was marked computed; a block without owner: whether it is kept."""
        if self._blocks.ref_count(block_id):
            return block_id in self._computed
        return self._blocks.is_evictable(block_id)

    def get_common_computed_block_ids(
        self, computed_seq_block_ids: list[list[BlockId]]
    ) -> list[BlockId]:
        """What these lists begin with alike, empty ones aside; one list is its own answer."""
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
        keys, _ = self.contents_of([block for block in blocks if block.is_full])
        known = [key for key in keys if key is not None]
        return len(keys) - len(known) + self.count_idle(known)

    def count_idle(self, keys: Sequence[bytes]) -> int:
        """How many of these contents have no owner here: each would take a block."""
        return sum(not owners for owners in self._blocks.owners_of(keys))

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """The hashes up to the first whose block is not there, or not computed yet."""
        found = self._blocks.find_prefix(block_hashes)
        if self._computed.issuperset(found):
            return block_hashes[: len(found)]
        for length, (block_id, count) in enumerate(
            zip(found, self._blocks.ref_counts(found), strict=True)
        ):
            if count and block_id not in self._computed:
                return block_hashes[:length]
        return block_hashes[: len(found)]

    def reset_prefix_cache(self) -> bool:
        """Forget all content, unless a block is used; whether that was done."""
        if self._blocks.num_free() < len(self._blocks):
            return False
        self._blocks.clear_index()
        self._forget()
        return True

    def get_prefix_cache_hit_rate(self) -> float:
        """Share of look-ups of full blocks that hit, since the start or the last reset."""
        return self.metric_data.get_hit_rate()

    @property
    def _block_tracker(self) -> dict[BlockId, BlockTracker]:
        """The record of each block's use."""
        return {each: self._tracker(each) for each in sorted(self._blocks.ids)}

    def _tracker(self, block_id: BlockId) -> BlockTracker:
        self._blocks.place(block_id)
        return UsedBlock(block_id, self._blocks, self._computed)

    @property
    def _cached_blocks(self) -> dict[int, BlockId]:
        """The block of each content, as tests of the original read it: by rising id, a copy."""
        hashes = {each: self._blocks.content_hash(each) for each in sorted(self._blocks.ids)}
        return {known: each for each, known in hashes.items() if known is not None}

    def _forget(self) -> None:
        self._touched_blocks: set[BlockId] = set()
        self._computed: set[BlockId] = set()  # of blocks without owner it says nothing
        self.metric_data = CacheMetricData()

    def _hash_blocks(
        self, prev_block: Block | None, block_token_ids: list[list[int]], extra_hash: int | None
    ) -> list[int]:
        """The content hashes of full blocks behind another. Raises WrongCall."""
        size, hash_block_tokens = self._block_size, PrefixCachingBlock.hash_block_tokens
        parent = None if prev_block is None else prev_block.content_hash
        is_first = prev_block is None
        hashes: list[int] = []
        for tokens in block_token_ids:
            num = len(tokens)
            if num != size:
                reason = "a full block has {size} tokens, {num} are given"
                require(False, reason, size=size, num=num)
            if parent is None and not is_first:
                reason = "{num} tokens cannot follow a block without content hash as a full block"
                require(False, reason, num=num)
            parent = hash_block_tokens(is_first, parent, tokens, extra_hash)
            hashes.append(parent)
            is_first = False
        return hashes

    def _find_or_take(
        self, keys: Sequence[bytes | None], lengths: Sequence[int], who: str
    ) -> tuple[list[BlockId], set[BlockId]]:
        """A block for each content, all or none, and which of them are new."""
        placed = self._blocks.find_or_take(keys, lengths)
        if isinstance(placed, int):
            raise self.shortage(placed, who)
        ids, taken, revived = placed
        self._taken(taken)
        self._touched_blocks.update(taken)
        num_keys, at = len(keys), -1
        for _ in range(keys.count(None)):
            at = keys.index(None, at + 1)
            self._touched_blocks.discard(ids[at])
            num_keys -= 1
        if revived:
            self._revived(revived)
        self.metric_data.query_all(num_keys, len(ids) - len(taken))
        return ids, set(taken)

    def _taken(self, block_ids: Sequence[BlockId]) -> None:
        self._computed.difference_update(block_ids)
        self._touched_blocks.difference_update(block_ids)

    def _revived(self, block_ids: Sequence[BlockId]) -> None:
        """Take note of kept blocks that have an owner again."""
        self._computed.update(block_ids)
        self._touched_blocks.difference_update(block_ids)

    def adopt(self, block: Block, block_id: BlockId) -> None:
        """Make an object one of this allocator's, which then copies and promotes it."""
        assert isinstance(block, NaiveBlock)
        block.block_id = block_id
        block.move_to(self)

    def _new_object(self) -> PooledBlock:
        return PrefixCachingBlock.__new__(PrefixCachingBlock)


class HashlessAllocator(NaiveBlockAllocator):
    """The blocks of a prefix-caching allocator that have no content, as a naive allocator."""

    def __init__(self, blocks: TierBlocks, block_size: int) -> None:
        super().__init__(NaiveBlock, len(blocks), block_size, blocks=blocks)

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Blocks without owner and content. Cost: O(free blocks)."""
        return super().get_num_free_blocks(device) - len(self._blocks.evictable())

    def take_empty(self, count: int = 1) -> list[BlockId]:
        """So many new blocks without content. Raises NoFreeBlocksError."""
        free = self.get_num_free_blocks()
        if count > free:
            who, total = "blocks without content", len(self._blocks)
            raise NoFreeBlocksError(who=who, needed=count, free=free, total=total)
        return super().take_empty(count)


def read_time(now: float) -> float:
    """A time as a number. Raises WrongValue where it is none, or not finite."""
    try:
        time = float(now)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not math.isfinite(time):
        raise WrongValue(reason=f"a time of access must be a finite number, not {now!r}")
    return time
