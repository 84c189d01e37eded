# SPDX-License-Identifier: Apache-2.0
"""Seed 001's block objects and the free queue that links them, as views of the core's.

Rules: a block asks the core's pool for its owners and its key at the time of the question; it keeps
no more than the record that its key stands for. A block of a manager is a place in the manager's
pool; a block made by itself is a pool of one block. The queue is the core's free queue; a block is
in one queue at most. A call that raises has changed nothing. Source: S001-06 to S001-20. Twin:
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.queue import BackingQueue
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, read_record
from kvcore.legacy.v1_0_8.errors import (
    AlreadyHashed,
    AlreadyInQueue,
    LinksBelongToQueue,
    NoFreeBlocks,
    NotInQueue,
)
from kvcore.types.arguments import read_count
from kvcore.types.errors import KvcoreError, WrongArgument


class KVCacheBlock:
    """A block: its id, and live its owners, its hash and its neighbours in the free queue.

    Compares by what it shows; neighbours count by their ids.
    """

    __slots__ = ("_backend", "_place", "_pool", "_queue", "_record", "_slot", "block_id")

    def __init__(
        self,
        block_id: int,
        ref_cnt: int = 0,
        _block_hash: BlockHashType | None = None,
        prev_free_block: KVCacheBlock | None = None,
        next_free_block: KVCacheBlock | None = None,
        *,
        backend: BackendName = "python",
    ) -> None:
        """Raises InvalidCount, LinksBelongToQueue, BackendMissing."""
        if prev_free_block is not None or next_free_block is not None:
            raise LinksBelongToQueue(block=block_id)
        count = read_count("ref_cnt", ref_cnt)
        self.block_id = block_id
        self._backend = backend
        self._pool: Backing | None = None
        self._place = 0
        self._record: BlockHashType | None = None
        self._queue: Any = None
        self._slot = 0
        for _ in range(count):
            self.incr_ref()
        if _block_hash is not None:
            self.block_hash = _block_hash

    @classmethod
    def in_pool(cls, pool: Backing, place: int, queue: Any) -> KVCacheBlock:
        """The view of a place in a pool, whose free queue knows its neighbours."""
        block = cls(place)
        block._pool, block._place, block._queue = pool, place, queue
        return block

    @property
    def ref_cnt(self) -> int:
        """Owners of the block."""
        return 0 if self._pool is None else self._pool.ref_count(self._place)

    def incr_ref(self) -> None:
        """Add an owner.

        Raises UnusedBlock in a pool of others where it has neither owner nor hash: such a block is
        taken from the pool's queue.
        """
        with self._changed() as pool:
            if self._is_alone() and not pool.ref_count(self._place) and self.block_hash is None:
                pool.take(1)
            else:
                pool.touch([self._place])

    def decr_ref(self) -> None:
        """Take an owner. Raises DoubleFree without one."""
        with self._changed() as pool:
            pool.release([self._place])

    @property
    def block_hash(self) -> BlockHashType | None:
        """The record by which the block is found; None where it is not."""
        if self._record is None or self._pool is None:
            return None
        key = self._pool.key_of(self._place)
        return self._record if key == read_record(self._record).core_key else None

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashType) -> None:
        """Raises AlreadyHashed, WrongArgument; UnusedBlock without owner in a pool of others."""
        if self.block_hash is not None:
            raise AlreadyHashed(block=self.block_id)
        self.publish(block_hash)

    @property
    def _block_hash(self) -> BlockHashType | None:
        """The same, by the name that the original keeps it under."""
        return self.block_hash

    def reset_hash(self) -> None:
        """Forget the hash, if there is one."""
        if self.block_hash is not None:
            with self._changed() as pool:
                pool.unpublish(self._place)

    def publish(self, record: BlockHashType) -> None:
        """Make the block findable by a record. Raises as the core's does."""
        key = read_record(record).core_key
        with self._changed() as pool:
            unowned = self._is_alone() and not pool.ref_count(self._place)
            if unowned:
                pool.take(1)
            pool.publish(self._place, key)
            if unowned:
                pool.release([self._place])
        self._record = record

    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        """The block before it in its free queue; None where it is first, or in none."""
        return None if self._queue is None else self._queue.neighbours(self)[0]

    @property
    def next_free_block(self) -> KVCacheBlock | None:
        """The block behind it in its free queue; None where it is last, or in none."""
        return None if self._queue is None else self._queue.neighbours(self)[1]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, KVCacheBlock) and self._shown() == other._shown()

    __hash__ = None  # type: ignore[assignment] # as the original, it compares by what changes

    def __repr__(self) -> str:
        block_id, ref_cnt, block_hash, before, after = self._shown()
        return (
            f"KVCacheBlock(block_id={block_id}, ref_cnt={ref_cnt}, _block_hash={block_hash}, "
            f"prev_free_block={before}, next_free_block={after})"
        )

    def _shown(self) -> tuple[Any, ...]:
        before, after = self.prev_free_block, self.next_free_block
        return (
            *(self.block_id, self.ref_cnt, self.block_hash),
            None if before is None else before.block_id,
            None if after is None else after.block_id,
        )

    @contextmanager
    def _changed(self) -> Iterator[Backing]:
        """Its pool, for a change. Errors name the block; a pool of its own keeps no commands."""
        if self._pool is None:
            self._pool = Backing(1, backend=self._backend)
        try:
            yield self._pool
        except KvcoreError as error:
            if "block" not in error.fields:
                raise
            raise type(error)(**{**error.fields, "block": self.block_id}) from None
        finally:
            if self._is_alone():
                self._pool.take_batch()

    def _is_alone(self) -> bool:
        """Whether its pool is its own."""
        return self._queue is None or isinstance(self._queue, FreeKVCacheBlockQueue)


class FreeKVCacheBlockQueue:
    """Blocks in the order in which they leave, the one at the head first.

    blocks: at the beginning, in this order; none is allowed. They may join again, and others too.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], *, backend: BackendName = "python") -> None:
        """Raises WrongArgument, AlreadyInQueue, BackendMissing."""
        given = list(blocks)
        seen: set[int] = set()
        for block in given:
            _check_outside(block)
            if id(block) in seen:
                raise AlreadyInQueue(block=block.block_id)
            seen.add(id(block))
        self._backend: BackendName = backend
        self._links = BackingQueue(len(given), backend=backend)
        self._members: list[KVCacheBlock | None] = [*given]
        self._num_slots = len(given)
        for slot, block in enumerate(given):
            _leave(block)
            block._queue, block._slot = self, slot

    def __repr__(self) -> str:
        ids = [block.block_id for block in self.get_all_free_blocks()]
        return f"FreeKVCacheBlockQueue({ids})"

    @property
    def num_free_blocks(self) -> int:
        """Blocks in the queue."""
        return len(self._links)

    @property
    def free_list_head(self) -> KVCacheBlock | None:
        """The block that leaves next; None where the queue is empty."""
        return self._member(self._links.front())

    @property
    def free_list_tail(self) -> KVCacheBlock | None:
        """The block that leaves last; None where the queue is empty."""
        return self._member(self._links.back())

    def popleft(self) -> KVCacheBlock:
        """Take out the block at the head. Raises NoFreeBlocks."""
        block = self._member(self._links.popleft())
        if block is None:
            raise NoFreeBlocks
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, from wherever it is. Raises WrongArgument, NotInQueue."""
        _check_block(block)
        if block._queue is not self or block._slot not in self._links:
            raise NotInQueue(block=block.block_id)
        self._links.remove(block._slot)

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the tail. Raises WrongArgument, AlreadyInQueue."""
        _check_outside(block)
        if block._queue is not self:
            slot = self._new_slot()
            _leave(block)
            block._queue, block._slot = self, slot
            self._members.append(block)
        self._links.append(block._slot)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The blocks from head to tail. Cost: O(blocks)."""
        found = (self._members[slot] for slot in self._links.blocks())
        return [block for block in found if block is not None]

    def holds(self, block: KVCacheBlock) -> bool:
        """Whether a block of this queue is in it at the moment."""
        return block._slot in self._links

    def neighbours(self, block: KVCacheBlock) -> tuple[KVCacheBlock | None, KVCacheBlock | None]:
        """The blocks before and behind one."""
        before, after = self._links.neighbours(block._slot)
        return self._member(before), self._member(after)

    def leave(self, block: KVCacheBlock) -> None:
        """Forget a block that is not in the queue."""
        self._members[block._slot] = None

    def _member(self, slot: int | None) -> KVCacheBlock | None:
        return None if slot is None else self._members[slot]

    def _new_slot(self) -> int:
        """A slot for a block that is new here; links grow to twice what the members need."""
        if len(self._members) == self._num_slots:
            order = self.get_all_free_blocks()
            kept = [block for block in self._members if block is not None]
            for slot, block in enumerate(kept):
                block._slot = slot
            self._num_slots = 2 * len(kept) + 1
            slots = [block._slot for block in order]
            self._links = BackingQueue(self._num_slots, slots, backend=self._backend)
            self._members = [*kept]
        return len(self._members)


def _leave(block: KVCacheBlock) -> None:
    if block._queue is not None:
        block._queue.leave(block)


def _check_block(block: Any) -> None:
    if not isinstance(block, KVCacheBlock):
        raise WrongArgument(name="block", expected="a KVCacheBlock", value=repr(block))


def _check_outside(block: Any) -> None:
    """Raise unless a block can join a queue."""
    _check_block(block)
    if block._queue is not None and block._queue.holds(block):
        raise AlreadyInQueue(block=block.block_id)
