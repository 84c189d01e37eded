# SPDX-License-Identifier: Apache-2.0
"""What the naive and the prefix-caching allocator of V0 share: objects, fork, copies, swap.

Rules: a call works out what it needs before its first change, so that one which raises leaves all
as it was. Owners, free blocks and keys are the core's (`TierBlocks`). An allocator of two tiers
gives both of its parts one backing (`rebind`). Source: S002-04, 06, 13, 15, 24 to 29, 33 to 36, 43,
50.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence

from kvcore.commands import Batch
from kvcore.legacy.backing import BackendName, Backing
from kvcore.legacy.block_errors import NoFreeBlocksError, WrongValue, require
from kvcore.legacy.block_tracker import (
    CopyOnWriteTracker,
    ObjectPool,
    ReadOnlyRefCounter,
    RefCounter,
)
from kvcore.legacy.interfaces import Block, BlockAllocator, BlockId, Device, PooledBlock, chain
from kvcore.legacy.tier_blocks import TierBlocks

OBJECTS_PER_BLOCK = 4


class TierAllocator(BlockAllocator):
    """Blocks of one tier, for sequences that are chains of block objects."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[BlockId] | None = None,
        *,
        backend: BackendName = "python",
        blocks: TierBlocks | None = None,
    ) -> None:
        """block_ids: in the order in which they are first taken, from 0 on unless given.

        blocks: of another allocator to share. Raises WrongCall unless there are num_blocks ids.
        """
        if blocks is None:
            ids = tuple(range(num_blocks) if block_ids is None else block_ids)
            reason = "{num_ids} different ids are given for {num_blocks} blocks"
            num_ids = len(set(ids)) if len(set(ids)) == len(ids) else -1
            require(num_ids == num_blocks, reason, num_ids=len(set(ids)), num_blocks=num_blocks)
            backing = Backing(num_blocks, eviction="ranked", backend=backend)
            blocks = TierBlocks(backing, "device", ids)
            self._order = ids
        else:
            self._order = tuple(sorted(blocks.ids))
        check_block_size(block_size)
        self._block_size = block_size
        self._backend = backend
        self._block_pool = ObjectPool(self._new_object, OBJECTS_PER_BLOCK * num_blocks)
        self.rebind(blocks)

    def rebind(self, blocks: TierBlocks) -> None:
        """Work on other blocks of the same ids, none of which is used."""
        self._blocks = blocks
        self._refcounter = RefCounter((), blocks=blocks)
        self._cow_tracker = CopyOnWriteTracker(self._refcounter.as_readonly())

    @property
    def blocks(self) -> TierBlocks:
        """The blocks in the core."""
        return self._blocks

    @property
    def order(self) -> tuple[BlockId, ...]:
        """The ids in the order in which they are first taken."""
        return self._order

    @property
    def backend(self) -> BackendName:
        """Which of the two implementations is beneath."""
        return self._backend

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def refcounter(self) -> RefCounter | ReadOnlyRefCounter:
        """How many own each block."""
        return self._refcounter

    @property
    def all_block_ids(self) -> frozenset[BlockId]:
        """Every id."""
        return self._blocks.ids

    def take_batch(self) -> Batch:
        """Close and number the open batch: the commands since the last one."""
        return self._blocks.backing.take_batch()

    def allocate_immutable_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Block:
        """A block of these tokens. Raises WrongCall, NoFreeBlocksError."""
        return self.allocate_immutable_blocks(prev_block, [token_ids], extra_hash, device)[0]

    def free(self, block: Block, keep_block_object: bool = False) -> None:
        """Give a block back; its `block_id` is None then.

        keep_block_object: the object itself is not used for another block. Raises WrongCall.
        """
        self.free_all([block], keep_block_object)

    def free_all(self, blocks: Sequence[Block], keep_block_object: bool = False) -> None:
        """Give blocks back, in order, all or none. Raises WrongCall."""
        self.check_held(blocks, "Freeing unallocated block is undefined")
        self.drop_all(blocks)
        if not keep_block_object:
            for block in blocks:
                self._block_pool.put(block)

    def fork(self, last_block: Block) -> list[Block]:
        """Another chain over the same blocks, an owner more for each. Raises WrongCall."""
        return self.fork_blocks(chain(last_block))

    def fork_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """The same for blocks that follow each other, of which the first may follow others."""
        ids = self.check_held(blocks)
        self._blocks.touch(ids)
        forked: list[Block] = []
        before = blocks[0].prev_block
        for block, block_id in zip(blocks, ids, strict=True):
            extra, content_hash = block.extra_hash, block.content_hash
            before = self._make(before, block.token_ids, block_id, extra, content_hash)
            forked.append(before)
        return forked

    def get_num_free_blocks(self, device: Device | None = None) -> int:
        """Blocks without owner, with content or without."""
        check_no_device(device)
        return self._blocks.num_free()

    def get_num_total_blocks(self) -> int:
        """All blocks."""
        return len(self._blocks)

    def get_physical_block_id(self, absolute_id: BlockId) -> int:
        """The place of an id among all, in rising order. Raises WrongValue."""
        return self._blocks.place(absolute_id)

    def cow_block_if_not_appendable(self, block: Block) -> BlockId:
        """Move this owner of a block to a copy where there are others; the id that it has then.

        Raises WrongCall, NoFreeBlocksError.
        """
        source = block.block_id
        if source is None or not (owners := self._blocks.ref_count(source)):
            (source,) = self.check_held([block])
        if owners == 1:
            return source
        fresh = self._blocks.copy(source)
        if fresh is None:
            raise self.shortage(1, f"a copy of block {source}")
        self._taken([fresh])
        self._cow_tracker.record_cow(source, fresh)
        block.block_id = fresh
        return fresh

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Source and target of each copy since the last call, in order."""
        return self._cow_tracker.clear_cows()

    def swap_out(self, blocks: Sequence[Block]) -> None:
        """Give blocks back and keep their objects. Raises WrongCall."""
        self.check_held(blocks)
        self.drop_all(blocks)

    def swap_in(self, blocks: Sequence[Block]) -> None:
        """Find or take blocks for objects that have none. Raises WrongCall, NoFreeBlocksError."""
        for block in blocks:
            reason = "block {block} is still held: swap it out first"
            require(block.block_id is None, reason, block=block.block_id)
        for block, (block_id, _) in zip(blocks, self.place_blocks(blocks), strict=True):
            self.adopt(block, block_id)

    @abstractmethod
    def allocate_chunks(
        self,
        prev_block: Block | None,
        chunks: Sequence[list[int]],
        extra_hash: int | None = None,
    ) -> list[Block]:
        """Blocks of these tokens, all or none; the last one may be part full.

        Raises WrongCall, NoFreeBlocksError.
        """

    @abstractmethod
    def place_blocks(self, blocks: Sequence[Block]) -> list[tuple[BlockId, bool]]:
        """A block for each of these objects, all or none, and whether its content is there.

        Does not change the objects. Raises WrongCall, NoFreeBlocksError.
        """

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """How many blocks full ones would take here."""

    def check_held(
        self, blocks: Sequence[Block], complaint: str = "the block is not allocated"
    ) -> list[BlockId]:
        """The ids of blocks, each held as often as it is named. Raises WrongCall, UnknownName."""
        ids = [block.block_id for block in blocks]
        if None in ids:
            reason, num = (
                "{complaint}: it has no id, and {num} tokens",
                len(blocks[ids.index(None)].token_ids),
            )
            require(False, reason, complaint=complaint, num=num)
        known = [block_id for block_id in ids if block_id is not None]
        asked = Counter(known) if len(set(known)) < len(known) else dict.fromkeys(known, 1)
        for block_id, times in asked.items():
            count = self._blocks.ref_count(block_id)
            if count < times:
                reason = "block {block} has {count} owners, {asked} are asked for"
                require(False, reason, block=block_id, count=count, asked=times)
        return known

    @abstractmethod
    def adopt(self, block: Block, block_id: BlockId) -> None:
        """Make an object one of this allocator's, which then copies and promotes it."""

    def drop_all(self, blocks: Sequence[Block]) -> None:
        """Take one owner from each of these, which were checked, in order."""
        ids = [block.block_id for block in blocks if block.block_id is not None]
        self._leave(blocks, ids)
        self._blocks.release(ids)
        for block in blocks:
            block.block_id = None

    def shortage(self, needed: int, who: str) -> NoFreeBlocksError:
        """The error that says how many blocks were needed."""
        free, total = self._blocks.num_free(), len(self._blocks)
        return NoFreeBlocksError(who=who, needed=needed, free=free, total=total)

    def check_fits(self, needed: int, who: str) -> None:
        """Raise NoFreeBlocksError where fewer blocks are free."""
        if needed > self._blocks.num_free():
            raise self.shortage(needed, who)

    @abstractmethod
    def _new_object(self) -> PooledBlock:
        """A block object that is not filled yet."""

    def _leave(self, blocks: Sequence[Block], ids: Sequence[BlockId]) -> None:
        """Take note of owners that are about to leave."""

    def _taken(self, block_ids: Sequence[BlockId]) -> None:
        """Take note of blocks that were taken."""

    def _take(self, count: int = 1) -> list[BlockId]:
        """So many new blocks. Raises NoFreeBlocksError."""
        taken = self._blocks.take(count)
        if taken is None:
            raise self.shortage(count, "a block" if count == 1 else f"{count} blocks")
        self._taken(taken)
        return taken

    def _make(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_id: BlockId | None,
        extra_hash: int | None = None,
        content_hash: int | None = None,
        computed: bool = False,
    ) -> Block:
        block = self._block_pool.get()
        known = (extra_hash, content_hash, computed)
        block.begin(prev_block, token_ids, self._block_size, self, block_id, *known)
        return block


def check_no_device(device: Device | None) -> None:
    """Raise WrongCall where a device is named to an allocator of one."""
    require(device is None, "this allocator has one device, {device} is named", device=device)


def check_tokens(token_ids: Sequence[int], num_empty_slots: int, block_id: BlockId | None) -> None:
    """Raise WrongCall where tokens do not fit."""
    reason = "block {block} has {slots} empty slots, {num} tokens are given"
    num = len(token_ids)
    require(num <= num_empty_slots, reason, block=block_id, slots=num_empty_slots, num=num)


def check_block_size(block_size: int) -> None:
    """Raise WrongValue unless a block has room for a token."""
    if not isinstance(block_size, int) or block_size < 1:
        raise WrongValue(reason=f"block_size is {block_size!r}, must be an integer from 1 on")
