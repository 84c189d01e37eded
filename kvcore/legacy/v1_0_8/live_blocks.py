# SPDX-License-Identifier: Apache-2.0
"""The block objects of vLLM 0.8.5's V1, and a free queue of blocks that belong to no pool.

A block stores only the record of its key. A call that raises changes nothing.
Source: S001-06 to S001-20.
"""

from __future__ import annotations

from typing import Any

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.blocks.views import BlockView, LinkedQueue
from kvcore.legacy.v1_0_8 import errors
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, keys_of, read_record
from kvcore.types.arguments import read_count
from kvcore.types.errors import KvcoreError, UnusedBlock


class KVCacheBlock(BlockView):
    """A block: its id, and its current owners, hash and neighbours in the free queue.

    Blocks compare by these values, neighbours by their ids.
    """

    __slots__ = ()

    content: BlockHashType | None

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
        """pool, queue: those of the block's manager. Raises InvalidCount, BackendMissing."""
        super().__init__(block_id, pool, queue, backend=backend)
        for _ in range(read_count("ref_cnt", ref_cnt)):
            self.incr_ref()
        if _block_hash is not None:
            self.block_hash = _block_hash

    def incr_ref(self) -> None:
        """Add an owner.

        In the pool of a manager, raises UnusedBlock if the block has neither owner nor hash: such
        a block must be taken from the pool's queue.
        """
        if self._is_alone() and not self.ref_cnt and self.block_hash is None:
            self._change("take", 1)
        else:
            self._change("touch", [self._place])

    def decr_ref(self) -> None:
        """Take an owner. Raises DoubleFree if it has none."""
        self._change("release", [self._place])

    @property
    def block_hash(self) -> BlockHashType | None:
        """The record under which the block is found, or None."""
        record = self.content
        key = record and self._pool.blocks.key_of(self._place, "device")
        return record if key and keys_of([record]) == [key] else None

    @block_hash.setter
    def block_hash(self, block_hash: BlockHashType) -> None:
        """Publish the block; a free block keeps its position in the queue.

        For a free block this costs O(pool) and two commands per free block: the core publishes only
        owned blocks, and a freed block joins at the end, so all free blocks leave the queue and
        join it in the old order. Raises AlreadyHashed, WrongArgument, UnusedBlock for the null
        block.
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

    __hash__ = None  # type: ignore[assignment] # as in the original: it compares by mutable values

    def __repr__(self) -> str:
        names = ("block_id", "ref_cnt", "_block_hash", "prev_free_block", "next_free_block")
        shown = map("{}={}".format, names, self._shown())
        return f"KVCacheBlock({', '.join(shown)})"

    def _shown(self) -> tuple[Any, ...]:
        around = [each and each.block_id for each in (self.prev_free_block, self.next_free_block)]
        return self.block_id, self.ref_cnt, self.block_hash, *around

    def _change(self, call: str, *arguments: Any) -> None:
        """Call a transition of its pool. Errors name the block; its own pool keeps no commands."""
        try:
            getattr(self._pool.blocks, call)(*arguments, "device")
        except KvcoreError as error:
            raise type(error)(**{**error.fields, "block": self.block_id}) from None
        finally:
            if self._is_alone():
                self._pool.take_batch()


class NullBlock(KVCacheBlock):
    """Stands for a block that no query sees. Its owners are not counted."""

    __slots__ = ()

    @property
    def ref_cnt(self) -> int:
        """Always 0."""
        return 0

    def incr_ref(self) -> None:
        """Do nothing."""

    decr_ref = incr_ref


class FreeKVCacheBlockQueue(LinkedQueue[KVCacheBlock]):
    """A queue of blocks that belong to no pool; the head leaves first."""

    kind = KVCacheBlock
