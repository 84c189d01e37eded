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

from kvcore.legacy.backing import BackendName
from kvcore.legacy.block_errors import NoFreeBlocksError, WrongValue, require
from kvcore.legacy.block_tracker import BlockTracker, CacheMetricData, ReadOnlyRefCounter
from kvcore.legacy.content_block import ContentAllocator, PrefixCachingBlock, check_previous
from kvcore.legacy.evictor import EvictionPolicy, LRUEvictor, make_evictor
from kvcore.legacy.interfaces import Block, BlockId, Device, PooledBlock
from kvcore.legacy.naive_block import NaiveBlock, NaiveBlockAllocator
from kvcore.legacy.tier_allocator import check_no_device, check_tokens
from kvcore.legacy.tier_blocks import TierBlocks, key_of_hash

Placed = tuple[BlockId, bool, bool]
"""A block for a content, whether it was found, and whether the content is in it."""


class PrefixCachingBlockAllocator(ContentAllocator):
    """Blocks of one tier that sequences of the same content share."""

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
        self._hashless_allocator = HashlessAllocator(len(blocks), self._block_size, blocks=blocks)
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
        return self._make(prev_block, [], self._take()[0], extra_hash)

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> list[Block]:
        """Full blocks, found or new, all or none. Raises WrongCall, NoFreeBlocksError."""
        check_no_device(device)
        size = self._block_size
        for num in map(len, block_token_ids):
            if num != size:
                reason = "a full block has {size} tokens, {num} are given"
                require(False, reason, size=size, num=num)
        return self.allocate_chunks(prev_block, block_token_ids, extra_hash)

    def allocate_chunks(
        self,
        prev_block: Block | None,
        chunks: Sequence[list[int]],
        extra_hash: int | None = None,
    ) -> list[Block]:
        """Full blocks, found or new, and a last one that may be part full; all or none.

        Raises WrongCall, NoFreeBlocksError.
        """
        check_previous(prev_block)
        hashes = self._hash_chunks(prev_block, chunks, extra_hash)
        placed = self._find_or_take(hashes, f"{len(chunks)} blocks")
        made: list[Block] = []
        for chunk, content_hash, (block_id, is_hit, _) in zip(chunks, hashes, placed, strict=True):
            known = (extra_hash, content_hash, is_hit)
            prev_block = self._make(prev_block, chunk, block_id, *known)
            made.append(prev_block)
        return made

    def place_blocks(self, blocks: Sequence[Block]) -> list[tuple[BlockId, bool]]:
        """A block for each object, found or new, all or none, and whether its content is there.

        Raises WrongCall, NoFreeBlocksError.
        """
        hashes = [block.content_hash for block in blocks]
        placed = self._find_or_take(hashes, f"swap in of {len(blocks)} blocks")
        return [(block_id, is_there) for block_id, _, is_there in placed]

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
        found = self._blocks.lookup(content_hash)
        if found is None:
            self._blocks.publish(own, key_of_hash(content_hash))
            self._touched_blocks.add(own)
            return own
        if found != own:
            self.drop_all([block])
            self._hit([found])
            block.block_id = found
            block.computed = True
        return found

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Say when blocks were used. Raises WrongValue where one is neither used nor evictable."""
        time = read_time(now)
        for block_id in block_ids:
            if not self._tracker(block_id).active and not self._blocks.is_evictable(block_id):
                reason = "Mark block as accessed which is not belonged to GPU: block {} is free"
                raise WrongValue(reason=reason.format(block_id), block=block_id)
        for block_id in block_ids:
            if self._tracker(block_id).active:
                self._tracker(block_id).last_accessed = time
            else:
                self._blocks.rank(block_id, time)

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:  # noqa: ARG002 # S002-39
        """Count all that was promoted since the last call as computed, whatever is named."""
        for block_id in self._touched_blocks:
            if self._tracker(block_id).active:
                self._tracker(block_id).computed = True
        self._touched_blocks.clear()

    def note_written(self, block_ids: Iterable[BlockId]) -> None:
        """Count used blocks as computed, since a copy filled them."""
        for block_id in block_ids:
            self._tracker(block_id).computed = True
            self._touched_blocks.discard(block_id)

    def block_is_computed(self, block_id: BlockId) -> bool:
        """Whether a used block was marked computed; a block without owner: whether it is kept."""
        if self._tracker(block_id).active:
            return self._tracker(block_id).computed
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
        full = [block.content_hash for block in blocks if block.is_full]
        return sum(each is None or not self._is_owned(each) for each in full)

    def find_cached_blocks_prefix(self, block_hashes: list[int]) -> list[int]:
        """The hashes up to the first whose block is not there, or not computed yet."""
        for length, content_hash in enumerate(block_hashes):
            found = self._blocks.lookup(content_hash)
            if found is None or not self.block_is_computed(found):
                return block_hashes[:length]
        return block_hashes[:]

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

    def _forget(self) -> None:
        self._touched_blocks: set[BlockId] = set()
        self._block_tracker = {each: BlockTracker() for each in sorted(self._blocks.ids)}
        self.metric_data = CacheMetricData()

    def _tracker(self, block_id: BlockId) -> BlockTracker:
        self._blocks.place(block_id)
        return self._block_tracker[block_id]

    def _is_owned(self, content_hash: int) -> bool:
        found = self._blocks.lookup(content_hash)
        return found is not None and self._blocks.ref_count(found) > 0

    def _hash_chunks(
        self, prev_block: Block | None, chunks: Sequence[list[int]], extra_hash: int | None
    ) -> list[int | None]:
        """The content hash of each full chunk, None for a part-full one. Raises WrongCall."""
        hashes: list[int | None] = []
        parent = None if prev_block is None else prev_block.content_hash
        for chunk in chunks:
            if len(chunk) != self._block_size:
                check_tokens(chunk, self._block_size, None)
                hashes.append(None)
                continue
            is_first = prev_block is None and not hashes
            if parent is None and not is_first:
                reason = "{num} tokens cannot follow a block without content hash as a full block"
                require(False, reason, num=len(chunk))
            parent = PrefixCachingBlock.hash_block_tokens(is_first, parent, chunk, extra_hash)
            hashes.append(parent)
        return hashes

    def _find_or_take(self, hashes: Sequence[int | None], who: str) -> list[Placed]:
        """A block for each content, all or none, as if they were asked for one by one.

        What a free block holds may be evicted by those before it, and is looked up again then.
        """
        keys = [None if each is None else key_of_hash(each) for each in hashes]
        found = [self._blocks.find(key) for key in keys]
        free = {each for each in found if each is not None and not self._blocks.ref_count(each)}
        missing = [key for key, block in zip(keys, found, strict=True) if block is None]
        contents = {each for each in missing if each is not None}
        self.check_fits(len(free) + len(contents) + missing.count(None), who)
        first = found.index(None) if None in found else len(found)
        placed = self._hit([block for block in found[:first] if block is not None])
        new: set[bytes | None] = set()
        while len(placed) < len(keys):
            at = len(placed)
            block = self._blocks.find(keys[at])
            if block is not None:
                placed += self._hit([block])
                continue
            end = at
            while end < len(keys) and (end == at or found[end] is None):
                if keys[end] is not None:
                    if keys[end] in new:
                        break
                    new.add(keys[end])
                end += 1
            placed += self._publish_new(keys[at:end])
        for content_hash, (_, is_hit, _) in zip(hashes, placed, strict=True):
            if content_hash is not None:
                self.metric_data.query(is_hit)
        return placed

    def _publish_new(self, keys: Sequence[bytes | None]) -> list[Placed]:
        """New blocks that have these keys from now on."""
        taken = self._take(len(keys))
        for block_id, key in zip(taken, keys, strict=True):
            if key is not None:
                self._blocks.publish(block_id, key)
                self._touched_blocks.add(block_id)
        return [(block_id, False, False) for block_id in taken]

    def _hit(self, block_ids: Sequence[BlockId]) -> list[Placed]:
        """One owner more for blocks that were found."""
        placed = [(each, True, self.block_is_computed(each)) for each in block_ids]
        self._blocks.touch(block_ids)
        for block_id in block_ids:
            tracker = self._block_tracker[block_id]
            if not tracker.active:
                self._taken([block_id])
                tracker.computed = True
        return placed

    def _taken(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._block_tracker[block_id].enable()
        self._touched_blocks.difference_update(block_ids)

    def _leave(self, blocks: Sequence[Block], ids: Sequence[BlockId]) -> None:
        left: dict[BlockId, int] = {}
        for block, block_id in zip(blocks, ids, strict=True):
            count = left[block_id] if block_id in left else self._blocks.ref_count(block_id)
            left[block_id] = count - 1
            if count == 1:
                tracker = self._block_tracker[block_id]
                if block.content_hash is not None:
                    length = block.num_tokens_total
                    self._blocks.rank(block_id, tracker.last_accessed, length)
                tracker.disable()

    def adopt(self, block: Block, block_id: BlockId) -> None:
        """Make an object one of this allocator's, which then copies and promotes it."""
        assert isinstance(block, NaiveBlock)
        block.block_id = block_id
        block.move_to(self)

    def _new_object(self) -> PooledBlock:
        return PrefixCachingBlock.__new__(PrefixCachingBlock)


class HashlessAllocator(NaiveBlockAllocator):
    """The blocks of a prefix-caching allocator that have no content, as a naive allocator."""

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Blocks without owner and content. Cost: O(free blocks)."""
        return super().get_num_free_blocks(device) - len(self._blocks.evictable())

    def _take(self, count: int = 1) -> list[BlockId]:
        free = self.get_num_free_blocks()
        if count > free:
            who, total = "blocks without content", len(self._blocks)
            raise NoFreeBlocksError(who=who, needed=count, free=free, total=total)
        return super()._take(count)


def read_time(now: float) -> float:
    """A time as a number. Raises WrongValue where it is none, or not finite."""
    try:
        time = float(now)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not math.isfinite(time):
        raise WrongValue(reason=f"a time of access must be a finite number, not {now!r}")
    return time
