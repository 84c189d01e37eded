# SPDX-License-Identifier: Apache-2.0
"""The block pool under vLLM 0.8.5's V1 manager, as a view of the core's pool.

Block 0 is the null block: it replaces blocks that a window skips, its owners are not counted, and
it is never in the queue. A look-up of a hash returns the block that was published first; after its
eviction, the next one.

The map from hashes to blocks is the core's index and keeps no data of its own. A caller can write
to it: a block is stored under its own id, whatever key was used, and a free block keeps its
position in the queue. A block has at most one hash. Source: S001-82 to 84.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import compress
from types import MappingProxyType
from typing import Any

from kvcore.legacy.blocks import views
from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.v1_0_8 import block_hashes as hashes
from kvcore.legacy.v1_0_8 import errors
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, HashFunction
from kvcore.legacy.v1_0_8.kv_cache_utils import hash_more_tokens
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock, NullBlock
from kvcore.types.errors import AlreadyPublished, UnknownBlock, UnusedBlock
from kvcore.types.values import Refused


class BlockPool:
    """Blocks with owners, hashes and a free queue. num_gpu_blocks: includes the null block."""

    def __init__(
        self, num_gpu_blocks: int, enable_caching: bool, *, backend: BackendName = "python"
    ) -> None:
        """Raises WrongPoolSize, BackendMissing."""
        with errors.of_original_kind():
            self.backing = Backing(num_gpu_blocks, null_block=True, backend=backend)
        self.backend: BackendName = backend
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        kinds = [NullBlock, *[KVCacheBlock] * (num_gpu_blocks - 1)]
        calls = "get_new_blocks, touch and free_blocks"
        self.free_block_queue = views.PoolQueue(self.backing, kinds, calls)
        self.blocks = self.free_block_queue.blocks
        self.null_block = self.blocks[0]
        self.cached_block_hash_to_block = CachedBlocks(self)

    def get_cached_block(self, block_hash: BlockHashType) -> KVCacheBlock | None:
        """Return the block that a look-up of a hash finds, or None. Raises WrongArgument."""
        (key,) = hashes.keys_of([block_hash], self.backend)
        place = self.backing.blocks.lookup(key, "device")
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
        """Publish blocks that became full, and add their missing hashes to block_hashes.

        blocks: all blocks of the request, which belong to this pool. Raises ForeignBlock,
        AlreadyHashed, UnusedBlock, TokensMissing.
        """
        if num_cached_blocks == num_full_blocks:
            return
        full = blocks[num_cached_blocks:num_full_blocks]
        places = self.check_own(full)
        made = hash_more_tokens(hash_fn, block_size, request, block_hashes, num_full_blocks)
        records = [*block_hashes, *made][num_cached_blocks:num_full_blocks]
        with errors.of_original_kind():
            keys = hashes.keys_of(records, self.backend)
            self.backing.blocks.publish_all(places, keys, "device")
        for block, record in zip(full, records, strict=True):
            block.content = record
        block_hashes += made

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Remove a block's hash; returns whether it had one."""
        had = block.block_hash is not None
        block.reset_hash()
        return had

    def publish(
        self, blocks: Sequence[KVCacheBlock], records: Sequence[Any], keys: Sequence[bytes]
    ) -> None:
        """Publish blocks that have owners, each under one record. keys: those of the records.

        A block that has a hash keeps it; the null block gets none.
        """
        core, places = self.backing.blocks, [block.block_id for block in blocks]
        try:
            core.publish_all(places, keys, "device")
        except (AlreadyPublished, UnknownBlock):
            bare = [place != 0 and core.key_of(place, "device") is None for place in places]
            blocks, records = list(compress(blocks, bare)), list(compress(records, bare))
            core.publish_all(list(compress(places, bare)), list(compress(keys, bare)), "device")
        for block, record in zip(blocks, records, strict=False):  # a third faster than strict
            block.content = record

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take num_blocks free blocks, with one owner each; they lose their hashes.

        Raises InvalidCount, TooFewFreeBlocks.
        """
        taken = self.backing.blocks.take(num_blocks, "device")
        if isinstance(taken, Refused):
            counts = {"needed": taken.needed, "available": taken.available}
            raise errors.TooFewFreeBlocks(**counts, num_blocks=self.num_gpu_blocks)
        return [self.blocks[place] for place in taken]

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add an owner to each block; a block without an owner leaves the queue.

        Raises ForeignBlock, and UnusedBlock if a block has neither owner nor hash.
        """
        self.backing.blocks.touch(self.places(blocks), "device")

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take an owner from each block; those without another one join the queue in this order.

        Raises ForeignBlock, DoubleFree.
        """
        self.backing.blocks.release(self.places(ordered_blocks), "device")

    def reset_prefix_cache(self) -> bool:
        """Forget every hash and return True; if a block is in use, do nothing and return False."""
        if self.get_num_free_blocks() < self.num_gpu_blocks - 1:
            return False
        self.backing.blocks.clear_index("device")
        return True

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks in the queue."""
        return self.backing.blocks.num_free("device")

    def get_usage(self) -> float:
        """Return the share of all blocks that are not in the queue; the null block counts."""
        return 1.0 - self.get_num_free_blocks() / self.num_gpu_blocks

    def places(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """Return the ids of blocks of this pool, without the null block. Raises ForeignBlock."""
        return [place for place in self.check_own(list(blocks)) if place]

    def check_own(self, blocks: Sequence[Any]) -> list[int]:
        """Return the ids of blocks of this pool. Raises ForeignBlock."""
        for block in blocks:
            if getattr(block, "_queue", None) is not self.free_block_queue:
                raise errors.ForeignBlock(block=block, num_blocks=self.num_gpu_blocks)
        return [block.block_id for block in blocks]


class CachedBlocks(views.CachedBlocks[KVCacheBlock], MutableMapping[Any, Any]):
    """Maps each hash to its blocks, which are set together. Each query costs O(pool).

    The map of one hash is read-only, and empty for an unknown hash.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool.backing, pool.blocks)
        self._check_own = pool.check_own

    def __getitem__(self, block_hash: BlockHashType) -> Mapping[int, KVCacheBlock]:
        return MappingProxyType(self.listed().get(block_hash, {}))

    def __setitem__(self, block_hash: BlockHashType, blocks: Mapping[int, KVCacheBlock]) -> None:
        """Make these blocks the only ones of a hash.

        Raises WrongArgument, ForeignBlock, AlreadyHashed, and UnusedBlock for the null block.
        """
        found, given = self[block_hash], list(blocks.values())
        wanted = self._check_own(given)
        for block in given:
            if block.block_id == 0:
                raise UnusedBlock(block=0)
            if block.block_hash not in (None, hashes.read_record(block_hash)):
                raise errors.AlreadyHashed(block=block.block_id)
        for block_id in set(found).difference(wanted):
            found[block_id].reset_hash()
        for block in given:
            if block.block_hash is None:
                block.block_hash = block_hash

    def __delitem__(self, block_hash: BlockHashType) -> None:
        for block in self.listed()[block_hash].values():
            block.reset_hash()

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.listed()

    def get(self, block_hash: BlockHashType, default: Any = None) -> Any:
        """Return the blocks of a hash, or the default if it has none."""
        return self[block_hash] or default

    def clear(self) -> None:
        """Forget every hash."""
        self._pool.blocks.clear_index("device")
