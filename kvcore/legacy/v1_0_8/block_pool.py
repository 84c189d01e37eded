# SPDX-License-Identifier: Apache-2.0
"""The block pool under vLLM 0.8.5's V1 manager, as a view of the core's pool.

Block 0 is the null block: it stands for what a window skips, has no owners that count, and is never
in the queue. The block that was published first answers for a hash, after its eviction the next.
Source: S001-82 to 84.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.views import PoolQueue
from kvcore.legacy.v1_0_8 import block_hashes as hashes
from kvcore.legacy.v1_0_8 import errors
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, HashFunction
from kvcore.legacy.v1_0_8.cached_blocks import CachedBlocks
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock, NullBlock
from kvcore.types.arguments import read_count
from kvcore.types.errors import AlreadyPublished, InvalidConfig, UnknownBlock, UnusedBlock
from kvcore.types.values import Refused


class BlockPool:
    """Blocks with owners, hashes and a free queue. num_gpu_blocks: with the null block."""

    def __init__(
        self, num_gpu_blocks: int, enable_caching: bool, *, backend: BackendName = "python"
    ) -> None:
        """Raises WrongPoolSize, BackendMissing."""
        try:
            self.backing = Backing(num_gpu_blocks, null_block=True, backend=backend)
        except InvalidConfig as error:
            raise errors.WrongPoolSize(**error.fields) from None
        self.backend: BackendName = backend
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.blocks: list[KVCacheBlock] = []
        self.free_block_queue = PoolQueue(
            self.backing, self.blocks, "get_new_blocks, touch and free_blocks"
        )
        for place in range(num_gpu_blocks):
            kind = KVCacheBlock if place else NullBlock
            self.blocks.append(kind.in_pool(self.backing, place, self.free_block_queue))
        self.null_block = self.blocks[0]
        self.cached_block_hash_to_block = CachedBlocks(self)

    def get_cached_block(self, block_hash: BlockHashType) -> KVCacheBlock | None:
        """The block that answers for a hash. Raises WrongArgument."""
        place = self.backing.lookup(hashes.read_record(block_hash).core_key)
        return None if place is None else self.blocks[place]

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[KVCacheBlock],
        block_hashes: list[BlockHashType],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        hash_fn: HashFunction,
    ) -> None:
        """Make blocks that became full findable; hashes that are missing join the list.

        blocks: all of the request, of this pool. Raises ForeignBlock, AlreadyHashed, UnusedBlock,
        TokensMissing.
        """
        if num_cached_blocks == num_full_blocks:
            return
        full = blocks[num_cached_blocks:num_full_blocks]
        for place in self.places(full):
            if self.blocks[place].block_hash is not None:
                raise errors.AlreadyHashed(block=place)
            if self.backing.ref_count(place) == 0:
                raise UnusedBlock(block=place)
        made = hashes.hash_more_tokens(hash_fn, block_size, request, block_hashes, num_full_blocks)
        records = [*block_hashes, *made][num_cached_blocks:num_full_blocks]
        self.publish(full, records, hashes.keys_of(records, self.backend))
        block_hashes += made

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Make a block unfindable; whether it was findable."""
        had = block.block_hash is not None
        block.reset_hash()
        return had

    def publish(
        self,
        blocks: Sequence[KVCacheBlock],
        records: Sequence[BlockHashType],
        keys: Sequence[bytes],
    ) -> None:
        """Make blocks with owners findable by one record each. keys: of the records.

        Those that have a hash keep it, and the null block gets none.
        """
        places = [block.block_id for block in blocks]
        try:
            self.backing.blocks.publish_all(places, keys, "device")
        except (AlreadyPublished, UnknownBlock):
            bare = [place != 0 and self.backing.key_of(place) is None for place in places]
            blocks, records = list(compress(blocks, bare)), list(compress(records, bare))
            self.backing.publish_all(list(compress(places, bare)), list(compress(keys, bare)))
        for block, record in zip(blocks, records, strict=False):  # a third faster than strict
            block.content = record

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Give so many free blocks one owner each; they lose their hashes.

        Raises InvalidCount, TooFewFreeBlocks.
        """
        taken = self.backing.take(read_count("num_blocks", num_blocks))
        if isinstance(taken, Refused):
            asked, available = taken.needed, taken.available
            raise errors.TooFewFreeBlocks(
                asked=asked, available=available, num_blocks=self.num_gpu_blocks
            )
        return [self.blocks[place] for place in taken]

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add an owner to each; those without one leave the queue.

        Raises ForeignBlock, and UnusedBlock if one has neither owner nor hash.
        """
        self.backing.touch(self.places(blocks))

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take an owner from each; those left without join the queue in this order.

        Raises ForeignBlock, DoubleFree.
        """
        self.backing.release(self.places(ordered_blocks))

    def reset_prefix_cache(self) -> bool:
        """Forget every hash; False, and nothing happens, while any block is used."""
        if self.get_num_free_blocks() < self.num_gpu_blocks - 1:
            return False
        self.backing.clear_index()
        return True

    def get_num_free_blocks(self) -> int:
        """Blocks in the queue."""
        return self.backing.num_free()

    def get_usage(self) -> float:
        """Share of all blocks that are not in the queue: the null block counts as used."""
        return 1.0 - self.get_num_free_blocks() / self.num_gpu_blocks

    def places(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """The ids of blocks of this pool, without the null block. Raises ForeignBlock."""
        places = self.check_own(list(blocks))
        return [place for place in places if place] if 0 in places else places

    def check_own(self, blocks: Sequence[Any]) -> list[int]:
        """The ids of blocks of this pool. Raises ForeignBlock."""
        own = self.blocks
        with suppress(AttributeError, IndexError, TypeError):
            places = [block.block_id for block in blocks if own[block.block_id] is block]
            if len(places) == len(blocks):
                return places
        known = set(map(id, own))
        stranger = next(block for block in blocks if id(block) not in known)
        raise errors.ForeignBlock(block=repr(stranger), num_blocks=len(own))
