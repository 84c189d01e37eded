# SPDX-License-Identifier: Apache-2.0
"""Shared parts of V0's allocators: owner counts, copies, hit rates, object pools and block lists.

Only the core counts owners; `RefCounter` reads them. A pool keeps spare Python objects,
not blocks: a spare object does not mean that a block is free. An object returns to the pool that
made it, whichever allocator holds it. A list of ids that was handed out is live until the list of
blocks is updated or reset. Source: S002-05, 34, 49, 66, 73.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvcore.legacy.blocks.blocks import BackendName, Backing
from kvcore.legacy.v0.block import Block, BlockId, chain
from kvcore.legacy.v0.errors import WrongCall, WrongValue, require
from kvcore.legacy.v0.tier_blocks import TierBlocks

HIT_RATE_BATCH = 1000
RefCount = int
get_all_blocks_recursively = chain


class ReadOnlyRefCounter:
    """A read-only view of the owner counts."""

    def __init__(self, refcounter: RefCounter) -> None:
        self._refcounter = refcounter

    def incr(self, block_id: BlockId) -> RefCount:
        """Raise WrongValue."""
        raise WrongValue(reason=f"a read-only view cannot add an owner to block {block_id}")

    def decr(self, block_id: BlockId) -> RefCount:
        """Raise WrongValue."""
        raise WrongValue(reason=f"a read-only view cannot take an owner from block {block_id}")

    def get(self, block_id: BlockId) -> RefCount:
        """Return the owner count of a block. Raises WrongCall for an unknown block."""
        return self._refcounter.get(block_id)


class RefCounter:
    """The owner counts of blocks: a view of the core, or a pool of its own without commands."""

    def __init__(
        self,
        all_block_indices: Iterable[BlockId],
        *,
        blocks: TierBlocks | None = None,
        backend: BackendName = "python",
    ) -> None:
        """blocks: those of an allocator; None: make new ones with these ids."""
        self._is_alone = blocks is None
        if blocks is None:
            ids = tuple(dict.fromkeys(all_block_indices))
            backing = Backing(len(ids), eviction="priority", backend=backend)
            blocks = TierBlocks(backing, "device", ids)
        self._blocks = blocks

    def incr(self, block_id: BlockId) -> RefCount:
        """Add an owner and return the new count. Raises WrongCall for an unknown block."""
        count, blocks = self.get(block_id), self._blocks
        if count or blocks.is_evictable(block_id):
            blocks.touch([block_id])
        else:
            blocks.take_this(block_id)
        self._forget_commands()
        return count + 1

    def decr(self, block_id: BlockId) -> RefCount:
        """Take an owner and return the new count. Raises WrongCall for an unknown or free block."""
        count = self.get(block_id)
        require(count > 0, "block {block} has {count} owners", block=block_id, count=count)
        self._blocks.release([block_id])
        self._forget_commands()
        return count - 1

    def get(self, block_id: BlockId) -> RefCount:
        """Return the owner count of a block. Raises WrongCall for an unknown block."""
        ids = self._blocks.ids
        require(
            block_id in ids, "block {block} is not known, {num} are", block=block_id, num=len(ids)
        )
        return self._blocks.ref_count(block_id)

    @property
    def _refcounts(self) -> dict[BlockId, RefCount]:
        """A copy of all owner counts, by ascending id; tests of the original read it."""
        return {each: self._blocks.ref_count(each) for each in sorted(self._blocks.ids)}

    def as_readonly(self) -> ReadOnlyRefCounter:
        """Return a read-only view."""
        return ReadOnlyRefCounter(self)

    def _forget_commands(self) -> None:
        if self._is_alone:
            self._blocks.backing.take_batch()


RefCounterProtocol = RefCounter | ReadOnlyRefCounter


class CopyOnWriteTracker:
    """Records copies until they are read."""

    def __init__(self, refcounter: RefCounterProtocol) -> None:
        self._refcounter = refcounter
        self._copies: list[tuple[BlockId, BlockId]] = []

    def is_appendable(self, block: Block) -> bool:
        """Return whether the block can be appended to without a copy."""
        return block.block_id is None or self._refcounter.get(block.block_id) <= 1

    def record_cow(self, src_block_id: BlockId | None, trg_block_id: BlockId | None) -> None:
        """Record a copy. Raises WrongCall if a block is None."""
        if src_block_id is None or trg_block_id is None:
            pair = f"{src_block_id} to {trg_block_id}"
            raise WrongCall(reason=f"a copy needs two blocks, not {pair}")
        self._copies.append((src_block_id, trg_block_id))

    def clear_cows(self) -> list[tuple[BlockId, BlockId]]:
        """Return (source, target) of each copy, in order, and forget them."""
        copies, self._copies = self._copies, []
        return copies


@attrs.define
class CacheMetricData:
    """The share of look-ups that hit, over full batches of `block_size` and the current one."""

    num_completed_blocks: int = 0
    completed_block_cache_hit_rate: float = 0.0
    num_incompleted_block_queries: int = 0
    num_incompleted_block_hit: int = 0
    block_size: int = HIT_RATE_BATCH

    def query(self, hit: bool) -> None:
        """Count a look-up."""
        self.query_all(1, int(hit))

    def query_all(self, num: int, num_hits: int) -> None:
        """Count num look-ups, the first num_hits of which hit."""
        self.num_incompleted_block_queries += num
        self.num_incompleted_block_hit += num_hits
        while self.num_incompleted_block_queries >= self.block_size:
            hits = min(self.num_incompleted_block_hit, self.block_size)
            self.num_incompleted_block_queries -= self.block_size
            self.num_incompleted_block_hit -= hits
            sum_of_rates = self.completed_block_cache_hit_rate * self.num_completed_blocks
            self.num_completed_blocks += 1
            rate = (sum_of_rates + hits / self.block_size) / self.num_completed_blocks
            self.completed_block_cache_hit_rate = rate

    def get_hit_rate(self) -> float:
        """Return hits divided by look-ups, over all batches; 0.0 without look-ups."""
        completed = self.num_completed_blocks * self.block_size
        hits = self.completed_block_cache_hit_rate * completed + self.num_incompleted_block_hit
        queries = completed + self.num_incompleted_block_queries
        return hits / queries if queries else 0.0


class BlockPool:
    """A pool of spare block objects of any class, reused last in, first out."""

    def __init__(
        self, block_size: int, create_block: Callable[..., Any], allocator: Any, pool_size: int
    ) -> None:
        """create_block: called with the fields of a block by name. Raises WrongCall."""
        require(pool_size >= 0, "a pool of {num} blocks", num=pool_size)
        self._block_size = block_size
        self._create_block = create_block
        self._allocator = allocator
        self.pool_size = 0
        self.spare: list[Any] = []
        self._add(pool_size)

    def increase_pool(self) -> None:
        """Make as many new objects as there are."""
        self._add(max(self.pool_size, 1))

    def init_block(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        physical_block_id: BlockId | None,
        extra_hash: int | None = None,
    ) -> Any:
        """Return a spare object, initialised for a block."""
        block = self.take()
        fields = (prev_block, token_ids, block_size, self._allocator, physical_block_id)
        block.__init__(*fields, extra_hash=extra_hash)
        return block

    def take(self) -> Any:
        """Return a spare object without initialising it."""
        if not self.spare:
            self.increase_pool()
        return self.spare.pop()

    def free_block(self, block: Block) -> None:
        """Return an object to the pool."""
        self.spare.append(block)

    def _add(self, num: int) -> None:
        first, self.pool_size = self.pool_size, self.pool_size + num
        made = []
        for pool_id in range(first, self.pool_size):
            block = self._create_block(
                prev_block=None,
                token_ids=[],
                block_size=self._block_size,
                allocator=self._allocator,
                block_id=None,
                extra_hash=None,
            )
            block.pool_id, block.home = pool_id, self.spare
            made.append(block)
        self.spare[:0] = made[::-1]


class BlockList:
    """A list of blocks with a parallel list of their ids."""

    def __init__(self, blocks: list[Block]) -> None:
        self.update(blocks)

    def update(self, blocks: list[Block]) -> None:
        """Replace the blocks; id lists that were handed out stay unchanged. Raises WrongCall."""
        self._block_ids = ids_of(blocks)
        self._blocks = blocks

    def append_token_ids(self, block_index: int, token_ids: list[int]) -> None:
        """Append tokens to a block, whose id may change."""
        self._blocks[block_index].append_token_ids(token_ids)
        self[block_index] = self._blocks[block_index]

    def append(self, new_block: Block) -> None:
        """Append a block. Raises WrongCall."""
        self._block_ids += ids_of([new_block])
        self._blocks.append(new_block)

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, block_index: int) -> Block:
        return self._blocks[block_index]

    def __setitem__(self, block_index: int, new_block: Block) -> None:
        (self._block_ids[block_index],) = ids_of([new_block])
        self._blocks[block_index] = new_block

    def reset(self) -> None:
        """Make the list empty; lists that were handed out stay unchanged."""
        self.update([])

    def ids(self) -> list[BlockId]:
        """Return the ids of the blocks, as a live list."""
        return self._block_ids

    def list(self) -> list[Block]:
        """Return the blocks, as a live list."""
        return self._blocks


def ids_of(blocks: Iterable[Block], complaint: str = "the block is not allocated") -> list[BlockId]:
    """Return the ids of blocks. Raises WrongCall if one has none."""
    ids: list[Any] = [block.block_id for block in blocks]
    if None in ids:
        num = next(len(block.token_ids) for block in blocks if block.block_id is None)
        reason = "{complaint}: it has no id, and {num} tokens"
        require(False, reason, complaint=complaint, num=num)
    return ids
