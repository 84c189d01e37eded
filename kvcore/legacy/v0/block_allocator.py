# SPDX-License-Identifier: Apache-2.0
"""An allocator of V0 for one device: blocks for sequences that are chains of block objects.

It is the naive allocator and the base of the prefix-caching one. A call computes what it needs
before its first change, so a call that raises changes nothing. The core keeps owners, free blocks
and keys (`TierBlocks`). An allocator of two tiers gives both of its parts one backing (`rebind`).
Source: S002-04, 06, 08, 13 to 16, 24 to 29, 33 to 36, 42, 43, 50, 66, 68.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.named_enum import Device
from kvcore.legacy.v0 import errors
from kvcore.legacy.v0.block import Block, BlockId, chain, check_tokens
from kvcore.legacy.v0.common import BlockPool, CopyOnWriteTracker, RefCounter, ids_of
from kvcore.legacy.v0.errors import NotSupported, WrongValue, require
from kvcore.legacy.v0.tier_blocks import TierBlocks
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch
from kvcore.types.errors import DoubleFree

NO_HIT_RATE = -1
OBJECTS_PER_BLOCK = 4


class BlockAllocator:
    """The blocks of one device.

    caches: whether full blocks are found by their content. num_by_hand: number of changes to its
    block objects that did not go through a table.
    """

    NoFreeBlocksError = errors.NoFreeBlocksError
    caches = False
    num_by_hand = 0

    def __init__(
        self,
        create_block: Callable[..., Any],
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[BlockId] | None = None,
        block_pool: BlockPool | None = None,
        *,
        backend: BackendName = "python",
        blocks: TierBlocks | None = None,
    ) -> None:
        """create_block: makes a block object, for example `NaiveBlock`. block_pool: spare objects.

        block_ids: ids in the order of first use; by default from 0 on. blocks: those of another
        allocator to share. Raises WrongCall unless there are num_blocks ids, WrongValue,
        InvalidCount.
        """
        num_blocks = read_count("num_blocks", num_blocks)
        check_block_size(block_size)
        if blocks is None:
            backing = Backing(num_blocks, eviction="priority", backend=backend)
            ids = tuple(range(num_blocks) if block_ids is None else block_ids)
            reason = "{num_ids} different ids are given for {num_blocks} blocks"
            holds, num_ids = len(ids) == len(set(ids)) == num_blocks, len(set(ids))
            require(holds, reason, num_ids=num_ids, num_blocks=num_blocks)
            blocks = TierBlocks(backing, "device", ids)
        self._block_size = block_size
        self.backend = backend
        self.rebind(blocks)
        if block_pool is None:
            num = OBJECTS_PER_BLOCK * num_blocks
            block_pool = BlockPool(block_size, create_block, self, num)
        self._block_pool = block_pool

    def rebind(self, blocks: TierBlocks) -> None:
        """Use other blocks with the same ids, none of which may be in use."""
        self.blocks = blocks
        self._refcounter = RefCounter((), blocks=blocks)
        self._cow_tracker = CopyOnWriteTracker(self._refcounter.as_readonly())

    @property
    def refcounter(self) -> Any:
        """The owner counts of the blocks."""
        return self._refcounter

    @property
    def all_block_ids(self) -> frozenset[BlockId]:
        """The ids of all blocks."""
        return self.blocks.ids

    def take_batch(self) -> Batch:
        """Close and number the open batch; it holds the commands since the previous one."""
        return self.blocks.backing.take_batch()

    def allocate_mutable_block(
        self,
        prev_block: Block | None,
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Any:
        """Take a block and return an empty object for it. Raises WrongCall, NoFreeBlocksError."""
        self.check_chain(prev_block, [], device)
        return self.make(prev_block, [], self.take_empty()[0], extra_hash)

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Any:
        """Allocate a full block of these tokens. Raises WrongCall, NoFreeBlocksError."""
        return self.allocate_immutable_blocks(prev_block, [token_ids], extra_hash, device)[0]

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> list[Any]:
        """Allocate blocks of these tokens, all or none. Raises WrongCall, NoFreeBlocksError."""
        self.check_chain(prev_block, block_token_ids, device)
        return self.fill(prev_block, block_token_ids, extra_hash)

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Free a block and set its `block_id` to None.

        keep_block_object: do not reuse the object for another block. Raises WrongCall.
        """
        self.free_all([block], keep_block_object)

    def free_all(self, blocks: Sequence[Block], keep_block_object: bool = False) -> None:
        """Free blocks, in order, all or none. Raises WrongCall."""
        check_distinct(blocks)
        self.give_back(ids_of(blocks, "Freeing unallocated block is undefined"))
        self.part_with(blocks, keep_block_object)
        self.num_by_hand += 1

    def fork(self, last_block: Block) -> list[Block]:
        """Return another chain over the same blocks, with one more owner each. Raises WrongCall."""
        blocks = chain(last_block)
        self.check_held(blocks)
        return self.fork_blocks(blocks)

    def fork_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """Fork a list of blocks that have owners; the first may have predecessors."""
        self.blocks.touch(ids_of(blocks))
        forked: list[Block] = []
        before = blocks[0].prev_block if blocks else None
        for block in blocks:
            extra, content_hash = block.extra_hash, block.content_hash
            before = self.make(before, block.token_ids, block.block_id, extra, content_hash)
            forked.append(before)
        return forked

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Return the number of blocks without an owner, with or without content."""
        check_no_device(device)
        return self.blocks.num_free()

    def get_num_total_blocks(self) -> int:
        """Return the number of all blocks."""
        return len(self.blocks)

    def get_physical_block_id(self, absolute_id: BlockId) -> int:
        """Return the position of an id among all ids in ascending order. Raises UnknownName."""
        return self.blocks.place(absolute_id)

    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """Move this owner of a shared block to a copy; returns the block's id after that.

        Raises WrongCall, NoFreeBlocksError.
        """
        source = block.block_id
        if source is None:
            (source,) = ids_of([block])
        target = self.own(source)
        if target != source:
            block.block_id = target
        return target

    def own(self, block_id: BlockId) -> BlockId:
        """Return the block that an owner may write to: the block itself, or a copy if it is shared.

        Raises WrongCall, NoFreeBlocksError.
        """
        owners = self.blocks.ref_count(block_id)
        if owners == 1:
            return block_id
        if not owners:
            self.check_owned([block_id])
        fresh = self.blocks.copy(block_id)
        if fresh is None:
            raise self.shortage(1, f"a copy of block {block_id}")
        self._taken([fresh])
        self._cow_tracker.record_cow(block_id, fresh)
        return fresh

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Return (source, target) of each copy since the last call, in order."""
        return self._cow_tracker.clear_cows()

    def swap_out(self, blocks: Sequence[Block]) -> None:
        """Free blocks but keep their objects. Raises WrongCall."""
        check_distinct(blocks)
        self.give_back(ids_of(blocks))
        self.part_with(blocks, keep_block_object=True)
        self.num_by_hand += 1

    def swap_in(self, blocks: Sequence[Block]) -> None:
        """Find or take blocks for objects that have none. Raises WrongCall, NoFreeBlocksError."""
        for block in blocks:
            reason = "block {block} is still held: swap it out first"
            require(block.block_id is None, reason, block=block.block_id)
        check_distinct(blocks)
        ids, _ = self.place_contents(blocks, f"swap in of {len(blocks)} blocks")
        self.adopt(blocks, ids)
        self.num_by_hand += 1

    def adopt(self, blocks: Sequence[Block], block_ids: Sequence[BlockId]) -> None:
        """Bind objects to ids of this allocator, which then copies and promotes them."""
        for block, block_id in zip(blocks, block_ids, strict=True):
            block.block_id, block._allocator = block_id, self

    def check_chain(
        self,
        prev_block: Block | None,  # noqa: ARG002 # there are no hashes to follow
        block_token_ids: Sequence[list[int]],
        device: Device | None,
    ) -> None:
        """Raise WrongCall unless blocks of these tokens can follow prev_block."""
        check_no_device(device)
        for tokens in block_token_ids:
            check_tokens(tokens, self._block_size, None)

    def fill(
        self,
        prev_block: Block | None,
        chunks: Sequence[list[int]],
        extra_hash: int | None,
    ) -> list[Block]:
        """Allocate blocks of these tokens, all or none; the last may be partly full.

        Raises NoFreeBlocksError.
        """
        made: list[Block] = []
        for tokens, block_id in zip(chunks, self.take_empty(len(chunks)), strict=True):
            prev_block = self.make(prev_block, tokens, block_id, extra_hash)
            made.append(prev_block)
        return made

    def place_contents(
        self, blocks: Sequence[Block], who: str
    ) -> tuple[list[BlockId], AbstractSet[BlockId]]:
        """Find or take a block for the content of each object, all or none.

        Returns the ids, and those of blocks that already contain the content.
        Raises NoFreeBlocksError.
        """
        return self.take_empty(len(blocks), who), frozenset()

    def take_empty(self, count: int = 1, who: str = "") -> list[BlockId]:
        """Take free blocks and return their ids. Raises NoFreeBlocksError."""
        taken = self.blocks.take(count)
        if taken is None:
            raise self.shortage(count, who or ("a block" if count == 1 else f"{count} blocks"))
        self._taken(taken)
        return taken

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """Take an owner from each block, in order, all or none. Raises WrongCall, UnknownName."""
        try:
            self.blocks.release(block_ids)
        except DoubleFree:
            self.check_owned(block_ids)
            raise

    def part_with(self, blocks: Sequence[Block], keep_block_object: bool = False) -> None:
        """Set the id of objects whose blocks were freed to None, and collect spare objects."""
        for block in blocks:
            block.block_id = None
            if not keep_block_object and hasattr(block, "home"):
                block.home.append(block)

    def check_held(self, blocks: Sequence[Block]) -> list[BlockId]:
        """Return the ids of blocks, after checking that each has an owner per occurrence.

        Raises WrongCall, UnknownName.
        """
        check_distinct(blocks)
        ids = ids_of(blocks)
        self.check_owned(ids)
        return ids

    def check_owned(self, block_ids: Sequence[BlockId]) -> None:
        """Raise WrongCall unless each block has one owner per occurrence. Raises UnknownName."""
        releases = Counter(block_ids)
        counts = self.blocks.ref_counts([*releases])
        for (block_id, times), count in zip(releases.items(), counts, strict=True):
            if count < times:
                reason = "block {block} has {count} owners, the call releases {requested}"
                require(False, reason, block=block_id, count=count, requested=times)

    def shortage(self, needed: int, who: str) -> errors.NoFreeBlocksError:
        """Return the error that says how many blocks are needed."""
        free, total = self.blocks.num_free(), len(self.blocks)
        return errors.NoFreeBlocksError(who=who, needed=needed, free=free, total=total)

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Return how many blocks the full ones among these objects would take here."""
        return len({id(block) for block in blocks if block.is_full})

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Raise NotSupported."""
        raise NotSupported(reason=f"block {block.block_id} is of a naive allocator: no promotion")

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Do nothing: no block is evicted."""

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Do nothing: there are no hits."""

    def note_written(self, block_ids: Iterable[BlockId]) -> None:
        """Do nothing: there are no hits."""

    def get_common_computed_block_ids(
        self,
        computed_seq_block_ids: list[list[BlockId]],  # noqa: ARG002 # there are no hits
    ) -> list[BlockId]:
        """Return an empty list: there are no hits."""
        return []

    def find_cached_blocks_prefix(
        self,
        block_hashes: list[int],  # noqa: ARG002 # there are no hits
    ) -> list[int]:
        """Return an empty list: there are no hits."""
        return []

    def get_prefix_cache_hit_rate(self) -> float:
        """Return -1: there are no look-ups."""
        return NO_HIT_RATE

    def reset_prefix_cache(self) -> bool:
        """Return True: there is nothing to forget."""
        return True

    def make(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_id: BlockId | None,
        extra_hash: int | None = None,
        content_hash: int | None = None,
    ) -> Any:
        """Return a block object, which may be a reused spare one."""
        pool, size = self._block_pool, self._block_size
        block = pool.spare.pop() if pool.spare else pool.take()
        block.__init__(prev_block, token_ids, size, self, block_id, extra_hash=extra_hash)
        block._content_hash = content_hash
        return block

    def _taken(self, block_ids: Sequence[BlockId]) -> None:
        """Do nothing; a subclass forgets what it knew of blocks that were taken."""


def check_no_device(device: Device | None) -> None:
    """Raise WrongCall if a device is given to an allocator of one device."""
    if device is not None:
        require(False, "this allocator has one device: do not pass {device}", device=device)


def check_distinct(blocks: Sequence[Block]) -> None:
    """Raise WrongCall if an object occurs twice."""
    if len(blocks) > 1 and len({*map(id, blocks)}) < len(blocks):
        times = Counter(map(id, blocks))
        twice = next(block for block in blocks if times[id(block)] > 1)
        reason = "an object of block {block} with {num} tokens is given {times} times"
        num, block_id = len(twice.token_ids), twice.block_id
        require(False, reason, block=block_id, num=num, times=times[id(twice)])


def check_block_size(block_size: int) -> None:
    """Raise WrongValue unless block_size is an integer of at least 1."""
    if not isinstance(block_size, int) or block_size < 1:
        raise WrongValue(reason=f"block_size is {block_size!r}, must be an integer from 1 on")
