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
from collections.abc import Set as AbstractSet
from operator import ge
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.v0.block_interfaces import (
    Block,
    BlockAllocator,
    BlockId,
    Device,
    PooledBlock,
    chain,
)
from kvcore.legacy.v0.block_tracker import (
    CopyOnWriteTracker,
    ObjectPool,
    ReadOnlyRefCounter,
    RefCounter,
)
from kvcore.legacy.v0.errors import NoFreeBlocksError, WrongValue, require
from kvcore.legacy.v0.tier_blocks import TierBlocks
from kvcore.types.arguments import read_count
from kvcore.types.commands import Batch
from kvcore.types.errors import DoubleFree

OBJECTS_PER_BLOCK = 4


class TierAllocator(BlockAllocator):
    """Blocks of one tier, for sequences that are chains of block objects.

    caches: whether full blocks are found by their content. num_by_hand: how often something was
    done with its objects other than by their table.
    """

    caches = False
    num_by_hand = 0

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

        blocks: of another allocator to share. Raises WrongCall unless there are num_blocks ids,
        InvalidCount.
        """
        num_blocks = read_count("num_blocks", num_blocks)
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
        self.give_back(self.ids_of(blocks, "Freeing unallocated block is undefined"))
        self.part_with(blocks, keep_block_object)

    def fork(self, last_block: Block) -> list[Block]:
        """Another chain over the same blocks, an owner more for each. Raises WrongCall."""
        return self.fork_blocks(chain(last_block))

    def fork_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """The same for blocks that follow each other, of which the first may follow others."""
        ids = self.check_held(blocks)
        self.share(ids)
        forked: list[Block] = []
        before = blocks[0].prev_block
        for block, block_id in zip(blocks, ids, strict=True):
            extra, content_hash = block.extra_hash, block.content_hash
            before = self.make(before, block.token_ids, block_id, extra, content_hash)
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
        if source is None:
            (source,) = self.ids_of([block])
        target = self.own(source)
        if target != source:
            block.block_id = target
        return target

    def clear_copy_on_writes(self) -> list[tuple[BlockId, BlockId]]:
        """Source and target of each copy since the last call, in order."""
        return self._cow_tracker.clear_cows()

    def swap_out(self, blocks: Sequence[Block]) -> None:
        """Give blocks back and keep their objects. Raises WrongCall."""
        self.give_back(self.ids_of(blocks))
        self.part_with(blocks, keep_block_object=True)

    def swap_in(self, blocks: Sequence[Block]) -> None:
        """Find or take blocks for objects that have none. Raises WrongCall, NoFreeBlocksError."""
        for block in blocks:
            reason = "block {block} is still held: swap it out first"
            require(block.block_id is None, reason, block=block.block_id)
        check_distinct(blocks)
        keys, lengths = self.contents_of(blocks)
        ids, _ = self.place_contents(keys, lengths, f"swap in of {len(blocks)} blocks")
        for block, block_id in zip(blocks, ids, strict=True):
            self.adopt(block, block_id)

    @abstractmethod
    def fill(
        self, token_ids: list[int], extra_hash: int | None
    ) -> tuple[list[BlockId], list[bytes], set[int]]:
        """Blocks of a sequence's first tokens, all or none; the keys of those that have one; the
        places of those that were found. Raises WrongCall, NoFreeBlocksError.
        """

    @abstractmethod
    def key_behind(self, keys: Sequence[bytes], token_ids: list[int], extra: int | None) -> bytes:
        """The key of a full block behind blocks of these keys."""

    @abstractmethod
    def close(self, block_id: BlockId, key: bytes, length: int) -> BlockId:
        """Make a block findable at the end of a chain of so many tokens, or give its owner the one
        that is found.
        """

    @abstractmethod
    def contents_of(self, blocks: Sequence[Block]) -> tuple[list[bytes | None], list[int]]:
        """The keys of objects, None where there is none, and the lengths of their chains."""

    @abstractmethod
    def place_contents(
        self, keys: Sequence[bytes | None], lengths: Sequence[int], who: str
    ) -> tuple[list[BlockId], AbstractSet[BlockId]]:
        """A block for each content, all or none, and which of them have it in them.

        Raises NoFreeBlocksError.
        """

    @abstractmethod
    def count_idle(self, keys: Sequence[bytes]) -> int:
        """How many of these contents have no owner here."""

    @abstractmethod
    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """How many blocks full ones would take here."""

    @abstractmethod
    def adopt(self, block: Block, block_id: BlockId) -> None:
        """Make an object one of this allocator's, which then copies and promotes it."""

    def take_empty(self, count: int = 1) -> list[BlockId]:
        """So many new blocks. Raises NoFreeBlocksError."""
        taken = self._blocks.take(count)
        if taken is None:
            raise self.shortage(count, "a block" if count == 1 else f"{count} blocks")
        self._taken(taken)
        return taken

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Add an owner to each of these, which have some."""
        self._blocks.touch(block_ids)

    def own(self, block_id: BlockId) -> BlockId:
        """Where an owner of a block may write: there, or in a copy where there are others.

        Raises WrongCall, NoFreeBlocksError.
        """
        owners = self._blocks.ref_count(block_id)
        if owners == 1:
            return block_id
        if not owners:
            self.check_owned([block_id])
        fresh = self._blocks.copy(block_id)
        if fresh is None:
            raise self.shortage(1, f"a copy of block {block_id}")
        self._taken([fresh])
        self._cow_tracker.record_cow(block_id, fresh)
        return fresh

    def give_back(self, block_ids: Sequence[BlockId]) -> None:
        """Take an owner from each block, in order, all or none. Raises WrongCall, UnknownName."""
        try:
            self._blocks.release(block_ids)
        except DoubleFree:
            self.check_owned(block_ids)
            raise

    def part_with(self, blocks: Sequence[Block], keep_block_object: bool = False) -> None:
        """Leave objects whose blocks were given back without one."""
        for block in blocks:
            block.block_id = None
            if not keep_block_object:
                self._block_pool.put(block)

    def ids_of(
        self, blocks: Sequence[Block], complaint: str = "the block is not allocated"
    ) -> list[BlockId]:
        """The ids of blocks. Raises WrongCall where one has none, or is named twice."""
        ids: list[Any] = [block.block_id for block in blocks]
        check_distinct(blocks)
        if None in ids:
            num = len(blocks[ids.index(None)].token_ids)
            reason = "{complaint}: it has no id, and {num} tokens"
            require(False, reason, complaint=complaint, num=num)
        return ids

    def check_held(
        self, blocks: Sequence[Block], complaint: str = "the block is not allocated"
    ) -> list[BlockId]:
        """The ids of blocks, each held as often as it is named. Raises WrongCall, UnknownName."""
        ids = self.ids_of(blocks, complaint)
        self.check_owned(ids)
        return ids

    def check_owned(self, block_ids: Sequence[BlockId]) -> None:
        """Raise WrongCall unless each block has as many owners as it is named, or UnknownName."""
        if len(set(block_ids)) == len(block_ids) and all(self._blocks.ref_counts(block_ids)):
            return
        asked = Counter(block_ids)
        counts = self._blocks.ref_counts([*asked])
        if all(map(ge, counts, asked.values())):
            return
        for (block_id, times), count in zip(asked.items(), counts, strict=True):
            reason = "block {block} has {count} owners, {asked} are asked for"
            require(count >= times, reason, block=block_id, count=count, asked=times)

    def shortage(self, needed: int, who: str) -> NoFreeBlocksError:
        """The error that says how many blocks were needed."""
        free, total = self._blocks.num_free(), len(self._blocks)
        return NoFreeBlocksError(who=who, needed=needed, free=free, total=total)

    @abstractmethod
    def _new_object(self) -> PooledBlock:
        """A block object that is not filled yet."""

    def _taken(self, block_ids: Sequence[BlockId]) -> None:
        """Take note of blocks that were taken."""

    def make(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_id: BlockId | None,
        extra_hash: int | None = None,
        content_hash: int | None = None,
        computed: bool = False,
    ) -> Block:
        """A block object, which may have been another one before."""
        block = self._block_pool.get()
        size = self._block_size
        block.begin(prev_block, token_ids, size, self, block_id, extra_hash, content_hash, computed)
        return block


def check_no_device(device: Device | None) -> None:
    """Raise WrongCall where a device is named to an allocator of one."""
    if device is not None:
        require(False, "this allocator has one device, {device} is named", device=device)


def check_tokens(token_ids: Sequence[int], num_empty_slots: int, block_id: BlockId | None) -> None:
    """Raise WrongCall where tokens do not fit."""
    reason = "block {block} has {slots} empty slots, {num} tokens are given"
    num = len(token_ids)
    require(num <= num_empty_slots, reason, block=block_id, slots=num_empty_slots, num=num)


def check_distinct(blocks: Sequence[Block]) -> None:
    """Raise WrongCall where one object is named twice."""
    if len(blocks) > 1 and len({*map(id, blocks)}) < len(blocks):
        times = Counter(map(id, blocks))
        twice = next(block for block in blocks if times[id(block)] > 1)
        reason = "one object of block {block} and {num} tokens is named {times} times"
        num, block_id = len(twice.token_ids), twice.block_id
        require(False, reason, block=block_id, num=num, times=times[id(twice)])


def check_block_size(block_size: int) -> None:
    """Raise WrongValue unless a block has room for a token."""
    if not isinstance(block_size, int) or block_size < 1:
        raise WrongValue(reason=f"block_size is {block_size!r}, must be an integer from 1 on")
