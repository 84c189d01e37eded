# SPDX-License-Identifier: Apache-2.0
"""The block objects of vLLM 0.8.5's V1, and the free queue that links those of no pool.

A block keeps no more than the record that its key stands for. A block that is made by itself is a
pool of one block. Such blocks can be linked to a queue, each to one at most; the queue of a manager
is the core's (`PoolQueue`). A call that raises changes nothing. Source: S001-06 to S001-20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.views import BlockQueue, BlockView, PoolQueue
from kvcore.legacy.v1_0_8 import errors
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, keys_of, read_record
from kvcore.types.arguments import check_kind, read_count
from kvcore.types.errors import KvcoreError, UnusedBlock


class KVCacheBlock(BlockView):
    """A block: its id, and its owners, its hash and its neighbours in the free queue as they are.

    Compares by what it shows; neighbours count by their ids.
    """

    __slots__ = ("_after", "_before")

    content: BlockHashType | None
    _before: KVCacheBlock
    _after: KVCacheBlock

    def __init__(
        self,
        block_id: int,
        ref_cnt: int = 0,
        _block_hash: BlockHashType | None = None,
        *,
        backend: BackendName = "python",
        pool: Backing | None = None,
        queue: Any = None,
    ) -> None:
        """pool, queue: of a manager, if it is in one. Raises InvalidCount, BackendMissing."""
        place = 0 if pool is None else block_id
        super().__init__(block_id, pool or Backing(1, backend=backend), place, queue)
        for _ in range(read_count("ref_cnt", ref_cnt)):
            self.incr_ref()
        if _block_hash is not None:
            self.block_hash = _block_hash

    def incr_ref(self) -> None:
        """Add an owner.

        Raises UnusedBlock in the pool of a manager if it has neither owner nor hash: such a block
        is taken from the pool's queue.
        """
        if self._is_alone() and not self.ref_cnt and self.block_hash is None:
            self._change("take", 1)
        else:
            self._change("touch", [self._place])

    def decr_ref(self) -> None:
        """Take an owner. Raises DoubleFree without one."""
        self._change("release", [self._place])

    @property
    def block_hash(self) -> BlockHashType | None:
        """The record by which the block is found; None if it is not found."""
        record = self.content
        key = record and self._pool.blocks.key_of(self._place, "device")
        return record if key and keys_of([record]) == [key] else None

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashType) -> None:
        """Make the block findable; a free one keeps its place in the queue.

        Cost of a free one: O(pool), and two commands per free block: the core publishes owned
        blocks alone, and a block that is given back joins at the end, so all free blocks leave and
        join in the old order. Raises AlreadyHashed, WrongArgument, UnusedBlock for the null block.
        """
        if self.block_hash is not None:
            raise errors.AlreadyHashed(block=self.block_id)
        core, (key,) = self._pool.blocks, keys_of([block_hash])
        order = () if self.ref_cnt else core.free_blocks("device")
        if self._place not in order and not self.ref_cnt:
            raise UnusedBlock(block=self.block_id)
        kept = [place for place in order if core.key_of(place, "device") is not None]
        core.touch(kept, "device")
        core.take(len(order) - len(kept), "device")
        self._change("publish", self._place, key)
        self._change("release", order)
        self.content = read_record(block_hash)

    _block_hash = block_hash

    def reset_hash(self) -> None:
        """Forget the hash, if there is one."""
        if self.block_hash is not None:
            self._change("unpublish", self._place)

    def __eq__(self, other: object) -> bool:
        shown = other._shown() if isinstance(other, KVCacheBlock) else None
        return self is other or self._shown() == shown

    __hash__ = None  # type: ignore[assignment] # as the original, it compares by what changes

    def __repr__(self) -> str:
        names = ("block_id", "ref_cnt", "_block_hash", "prev_free_block", "next_free_block")
        shown = map("{}={}".format, names, self._shown())
        return f"KVCacheBlock({', '.join(shown)})"

    def _shown(self) -> tuple[Any, ...]:
        around = [each and each.block_id for each in (self.prev_free_block, self.next_free_block)]
        return self.block_id, self.ref_cnt, self.block_hash, *around

    def _change(self, call: str, *arguments: Any) -> None:
        """Make a change in its pool. Errors name the block; a pool of its own keeps no commands."""
        try:
            getattr(self._pool.blocks, call)(*arguments, "device")
        except KvcoreError as error:
            raise type(error)(**{**error.fields, "block": self.block_id}) from None
        finally:
            if self._is_alone():
                self._pool.take_batch()

    def _is_alone(self) -> bool:
        """Whether its pool is its own."""
        return not isinstance(self._queue, PoolQueue)


class NullBlock(KVCacheBlock):
    """Stands for a block that no query sees. Owners come and go without being counted."""

    __slots__ = ()

    @property
    def ref_cnt(self) -> int:
        """Always 0."""
        return 0

    def incr_ref(self) -> None:
        """Nothing."""

    decr_ref = incr_ref


class FreeKVCacheBlockQueue(BlockQueue[KVCacheBlock]):
    """Blocks of no pool in the order in which they leave, linked to each other in a ring.

    blocks: at the beginning, in this order; none is allowed. They may join again, and others too.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raises WrongArgument, AlreadyInQueue."""
        self.num_free_blocks = 0
        self._end = KVCacheBlock.__new__(KVCacheBlock)
        self._end._before = self._end._after = self._end
        try:
            for block in blocks:
                self.append(block)
        except KvcoreError:
            while self.num_free_blocks:
                self.popleft()
            raise

    def popleft(self) -> KVCacheBlock:
        """Take out the block at the head. Raises NoFreeBlocks."""
        block = self._end._after
        if block is self._end:
            raise errors.NoFreeBlocks
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, from wherever it is. Raises WrongArgument, NotInQueue."""
        check_kind("block", block, KVCacheBlock)
        if block._queue is not self:
            raise errors.NotInQueue(block=block.block_id)
        block._before._after, block._after._before = block._after, block._before
        block._queue = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the tail. Raises WrongArgument, AlreadyInQueue."""
        check_kind("block", block, KVCacheBlock)
        if block._queue is not None:
            raise errors.AlreadyInQueue(block=block.block_id)
        block._queue, block._before, block._after = self, self._end._before, self._end
        self._end._before._after = self._end._before = block
        self.num_free_blocks += 1

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The blocks from head to tail. Cost: O(blocks)."""
        found = [self._end]
        while (block := found[-1]._after) is not self._end:
            found.append(block)
        return found[1:]

    def neighbours(self, block: KVCacheBlock | None) -> tuple[Any, Any]:
        """The blocks before and behind one of this queue."""
        end = self._end
        before, after = (block or end)._before, (block or end)._after
        return None if before is end else before, None if after is end else after
