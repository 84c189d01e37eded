# SPDX-License-Identifier: Apache-2.0
"""Blocks without content hashes, and their allocator: V0 without prefix caching.

Rules: a block that others hold too is copied before it is written. There are no hits, and nothing
is promoted. Source: S002-06, 16, 24, 26, 33, 42, 50, 66, 68, 71.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v0.block_interfaces import Block, BlockAllocator, BlockId, Device, PooledBlock
from kvcore.legacy.v0.block_objects import BlockPool
from kvcore.legacy.v0.block_tracker import CopyOnWriteTracker, RefCounter
from kvcore.legacy.v0.errors import NotSupported
from kvcore.legacy.v0.tier_allocator import (
    OBJECTS_PER_BLOCK,
    TierAllocator,
    check_no_device,
    check_tokens,
)
from kvcore.legacy.v0.tier_blocks import TierBlocks

__all__ = [
    "Block",
    "BlockAllocator",
    "BlockId",
    "BlockPool",
    "CopyOnWriteTracker",
    "Device",
    "NaiveBlock",
    "NaiveBlockAllocator",
    "RefCounter",
]

NO_HIT_RATE = -1


class NaiveBlock(PooledBlock):
    """Tokens of one physical block."""

    _cow_target: Block | None = None

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: TierAllocator,
        block_id: BlockId | None = None,
        _cow_target: Block | None = None,
        extra_hash: int | None = None,  # noqa: ARG002 # the original takes it and has no use for it
    ) -> None:
        """_cow_target: the block that is copied where others hold it, if it is not this one."""
        if _cow_target is not None:
            self._cow_target = _cow_target
        self.begin(prev_block, token_ids, block_size, allocator, block_id)

    def begin(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: TierAllocator,
        block_id: BlockId | None,
        extra_hash: int | None = None,  # noqa: ARG002 # a naive block has no use for it
        content_hash: int | None = None,  # noqa: ARG002 # there are no hashes
        computed: bool = False,  # noqa: ARG002 # nothing is hit
    ) -> None:
        """Be a new block, whatever this object was before. Raises WrongCall."""
        if len(token_ids) > block_size:
            check_tokens(token_ids, block_size, block_id)
        self._prev_block = prev_block
        self._token_ids = token_ids[:]
        self._block_size = block_size
        self._allocator = allocator
        self._block_id = block_id

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens, to a copy where others hold it. Raises WrongCall, NoFreeBlocksError."""
        if len(token_ids) + len(self._token_ids) > self._block_size:
            check_tokens(token_ids, self.num_empty_slots, self._block_id)
        if not token_ids:
            return
        if self._block_id is not None:
            copied = self._cow_target
            self._block_id = self._allocator.cow_block_if_not_appendable(
                self if copied is None else copied
            )
        self._token_ids.extend(token_ids)
        self._say_changed()

    def move_to(self, allocator: TierAllocator) -> None:
        """Belong to another allocator."""
        self._allocator = allocator

    def follow(
        self,
        allocator: TierAllocator,
        block_id: BlockId | None,
        token_ids: list[int],
        content_hash: int | None,  # noqa: ARG002 # a naive block has no use for it
        computed: bool,  # noqa: ARG002 # nothing is hit
    ) -> None:
        """Be what a table says of this block, which may have more tokens than before."""
        self._allocator = allocator
        self._block_id = block_id
        self._token_ids += token_ids[len(self._token_ids) :]

    @property
    def block_id(self) -> BlockId | None:
        """The physical block."""
        return self._block_id

    @block_id.setter
    def block_id(self, value: BlockId | None) -> None:
        self._block_id = value
        self._say_changed()

    def _say_changed(self) -> None:
        """Let a table that has this object look at it again."""
        if isinstance(self._allocator, TierAllocator):
            self._allocator.num_by_hand += 1

    @property
    def block_size(self) -> int:
        """Tokens that a block has room for."""
        return self._block_size

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        return self._token_ids

    @property
    def num_empty_slots(self) -> int:
        """Tokens that still fit."""
        return self._block_size - len(self._token_ids)

    @property
    def is_full(self) -> bool:
        """Whether no token fits any more."""
        return len(self._token_ids) == self._block_size

    @property
    def prev_block(self) -> Block | None:
        """The block before."""
        return self._prev_block

    @property
    def content_hash(self) -> int | None:
        """None: there are no hashes."""
        return None

    @property
    def extra_hash(self) -> int | None:
        """None: there are no hashes."""
        return None

    @property
    def num_tokens_total(self) -> int:
        """Raises NotSupported."""
        raise NotSupported(reason=f"block {self._block_id} does not count its sequence's tokens")

    @property
    def computed(self) -> bool:
        """Raises NotSupported."""
        raise NotSupported(reason=f"block {self._block_id} does not know whether it is computed")

    @computed.setter
    def computed(self, value: bool) -> None:
        reason = f"block {self._block_id} cannot note that it is computed: {value}"
        raise NotSupported(reason=reason)

    @property
    def last_accessed(self) -> float:
        """Raises NotSupported."""
        raise NotSupported(reason=f"block {self._block_id} does not know when it was used")

    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None:
        reason = f"block {self._block_id} cannot note when it was used: {last_accessed_ts}"
        raise NotSupported(reason=reason)


class NaiveBlockAllocator(TierAllocator):
    """Blocks for sequences that share nothing but what was forked."""

    def __init__(
        self,
        create_block: Callable[..., Block],
        num_blocks: int,
        block_size: int,
        block_ids: Iterable[BlockId] | None = None,
        block_pool: BlockPool | None = None,
        *,
        backend: BackendName = "python",
        blocks: TierBlocks | None = None,
    ) -> None:
        """create_block: makes an object, `NaiveBlock` for one. block_pool: has objects made ahead.

        The others are as those of `TierAllocator`. Raises WrongCall, WrongValue.
        """
        super().__init__(num_blocks, block_size, block_ids, backend=backend, blocks=blocks)
        if block_pool is None and create_block is not NaiveBlock:
            block_pool = BlockPool(block_size, create_block, self, OBJECTS_PER_BLOCK * num_blocks)
        if block_pool is not None:
            self._block_pool: Any = block_pool
            self.make = self._make_in_pool  # type: ignore[method-assign] # one call less for others

    def allocate_mutable_block(
        self,
        prev_block: Block | None,
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> Block:
        """An empty block. Raises NoFreeBlocksError."""
        check_no_device(device)
        return self.make(prev_block, [], self.take_empty()[0], extra_hash)

    def allocate_immutable_blocks(
        self,
        prev_block: Block | None,
        block_token_ids: list[list[int]],
        extra_hash: int | None = None,
        device: Device | None = None,
    ) -> list[Block]:
        """Blocks of these tokens, all or none. Raises WrongCall, NoFreeBlocksError."""
        check_no_device(device)
        for tokens in block_token_ids:
            if len(tokens) > self._block_size:
                check_tokens(tokens, self._block_size, None)
        made: list[Block] = []
        ids = self.take_empty(len(block_token_ids))
        for tokens, block_id in zip(block_token_ids, ids, strict=True):
            prev_block = self.make(prev_block, tokens, block_id, extra_hash)
            made.append(prev_block)
        return made

    def fill(
        self,
        token_ids: list[int],
        extra_hash: int | None,  # noqa: ARG002 # nothing is hashed
    ) -> tuple[list[BlockId], list[bytes], set[int]]:
        """New blocks of a sequence's first tokens, all or none. Raises NoFreeBlocksError."""
        return self.take_empty(-(-len(token_ids) // self._block_size)), [], set()

    def key_behind(self, keys: Sequence[bytes], token_ids: list[int], extra: int | None) -> bytes:
        """Raises NotSupported."""
        reason = f"{len(token_ids)} tokens behind {len(keys)} blocks have no key: {extra}"
        raise NotSupported(reason=reason)

    def close(self, block_id: BlockId, key: bytes, length: int) -> BlockId:
        """Raises NotSupported."""
        reason = f"block {block_id} of {length} tokens is not promoted: it has no use for {key!r}"
        raise NotSupported(reason=reason)

    def contents_of(self, blocks: Sequence[Block]) -> tuple[list[bytes | None], list[int]]:
        """No keys."""
        return [None] * len(blocks), [0] * len(blocks)

    def place_contents(
        self,
        keys: Sequence[bytes | None],
        lengths: Sequence[int],  # noqa: ARG002 # nothing is evicted
        who: str,
    ) -> tuple[list[BlockId], AbstractSet[BlockId]]:
        """A new block for each, all or none. Raises NoFreeBlocksError."""
        taken = self._blocks.take(len(keys))
        if taken is None:
            raise self.shortage(len(keys), who)
        return taken, frozenset()

    def count_idle(self, keys: Sequence[bytes]) -> int:
        """All of them."""
        return len(keys)

    def get_num_full_blocks_touched(self, blocks: Sequence[Block]) -> int:
        """Full blocks among them, each object once."""
        return len({id(block) for block in blocks if block.is_full})

    def free_block_id(self, block_id: BlockId) -> None:
        """Take an owner from a block, whatever object has its id. Raises WrongCall."""
        self.give_back([block_id])

    def promote_to_immutable_block(self, block: Block) -> BlockId:
        """Raises NotSupported."""
        raise NotSupported(reason=f"block {block.block_id} is of a naive allocator: no promotion")

    def mark_blocks_as_accessed(self, block_ids: list[BlockId], now: float) -> None:
        """Does nothing: no block is evicted."""

    def mark_blocks_as_computed(self, block_ids: list[BlockId]) -> None:
        """Does nothing: no block is hit."""

    def note_written(self, block_ids: Iterable[BlockId]) -> None:
        """Does nothing: no block is hit."""

    def get_common_computed_block_ids(
        self,
        computed_seq_block_ids: list[list[BlockId]],  # noqa: ARG002 # nothing is hit
    ) -> list[BlockId]:
        """None."""
        return []

    def find_cached_blocks_prefix(
        self,
        block_hashes: list[int],  # noqa: ARG002 # nothing is hit
    ) -> list[int]:
        """None."""
        return []

    def get_prefix_cache_hit_rate(self) -> float:
        """-1: there are no look-ups."""
        return NO_HIT_RATE

    def reset_prefix_cache(self) -> bool:
        """True: there is nothing to forget."""
        return True

    def adopt(self, block: Block, block_id: BlockId) -> None:
        """Make an object one of this allocator's, which then copies and promotes it."""
        assert isinstance(block, NaiveBlock)
        block.block_id = block_id
        block.move_to(self)

    @property
    def _free_block_indices(self) -> tuple[BlockId, ...]:
        """Ids without owner and content, the next one first, as tests of the original read them."""
        blocks = self._blocks
        free = blocks.names(blocks.backing.free_blocks(blocks.tier)) if len(blocks) else []
        return tuple(each for each in free if not blocks.has_key(each))

    def _make_in_pool(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_id: BlockId | None,
        extra_hash: int | None = None,
        content_hash: int | None = None,  # noqa: ARG002 # a naive block has no use for it
        computed: bool = False,  # noqa: ARG002 # nothing is hit
    ) -> Block:
        pool: BlockPool = self._block_pool
        made = pool.init_block(prev_block, token_ids, self._block_size, block_id, extra_hash)
        if isinstance(made, NaiveBlock):
            made.move_to(self)  # it may have been another allocator's in between
        return made

    def _new_object(self) -> PooledBlock:
        return NaiveBlock.__new__(NaiveBlock)
