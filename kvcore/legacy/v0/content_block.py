# SPDX-License-Identifier: Apache-2.0
"""The block of a prefix-caching allocator: tokens, and a hash of all tokens up to its end.

Rules: a block has a hash once it is full and the block before has one; it keeps it. A full block is
promoted: another block of the same content may take its place, so its id may change. The hash is
Python's own, with its value: hash((is_first, previous, *tokens, extra)), where the first block's
previous is hash('None'). Source: S002-51 to 58, X-12.
"""

from __future__ import annotations

from kvcore.legacy.v0.block_interfaces import Block, BlockId
from kvcore.legacy.v0.block_tracker import NEVER_ACCESSED
from kvcore.legacy.v0.errors import require
from kvcore.legacy.v0.naive_block import NaiveBlock
from kvcore.legacy.v0.tier_allocator import TierAllocator, check_tokens

NONE_HASH = hash("None")


class ContentAllocator(TierAllocator):
    """Allocators that blocks with a hash may belong to."""

    caches = True


class PrefixCachingBlock(NaiveBlock):
    """Tokens of one physical block, and their hash."""

    _none_hash = NONE_HASH
    last_accessed: float = NEVER_ACCESSED

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: TierAllocator,
        block_id: BlockId | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> None:
        """Raises WrongCall for another kind of block or allocator, or too many tokens."""
        if not isinstance(allocator, ContentAllocator):
            kind = type(allocator).__name__
            require(False, "a {kind} caches no prefixes", kind=kind)
        check_previous(prev_block)
        self.begin(
            *(prev_block, token_ids, block_size, allocator, block_id),
            extra_hash=extra_hash,
            computed=computed,
        )

    def begin(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: TierAllocator,
        block_id: BlockId | None,
        extra_hash: int | None = None,
        content_hash: int | None = None,
        computed: bool = False,
    ) -> None:
        """Be a new block, whatever this object was before. Raises WrongCall."""
        super().begin(prev_block, token_ids, block_size, allocator, block_id)
        self._extra_hash = extra_hash
        self._content_hash = content_hash
        self._computed = computed
        self.last_accessed = NEVER_ACCESSED
        before = 0 if prev_block is None else prev_block.num_tokens_total
        self._num_tokens_total = before + len(token_ids)

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Add tokens; a block that is full then is promoted, which may change its id.

        Raises WrongCall, NoFreeBlocksError.
        """
        if self._computed or self.content_hash is not None:
            state = "is computed" if self._computed else "has a content hash"
            reason = "block {block} {state}: {num} tokens cannot be added"
            require(False, reason, block=self._block_id, state=state, num=len(token_ids))
        if not token_ids:
            return
        num_tokens, content_hash = len(self._token_ids) + len(token_ids), None
        if num_tokens > self._block_size:
            check_tokens(token_ids, self.num_empty_slots, self._block_id)
        if num_tokens == self._block_size:
            content_hash = self._hash_of([*self._token_ids, *token_ids])
        super().append_token_ids(token_ids)
        self._count_total()
        self._content_hash = content_hash
        if content_hash is not None and self._block_id is not None:
            self._block_id = self._allocator.promote_to_immutable_block(self)

    def follow(
        self,
        allocator: TierAllocator,
        block_id: BlockId | None,
        token_ids: list[int],
        content_hash: int | None,
        computed: bool,
    ) -> None:
        """Be what a table says of this block, which may have more tokens than before."""
        super().follow(allocator, block_id, token_ids, content_hash, computed)
        self._count_total()
        self._content_hash = content_hash
        self._computed = computed

    @property
    def content_hash(self) -> int | None:
        """The hash of all tokens up to its end; None until it is full and follows a hash."""
        if self._content_hash is None and len(self._token_ids) == self._block_size:
            self._content_hash = self._hash_of(self._token_ids)
        return self._content_hash

    @property
    def extra_hash(self) -> int | None:
        """What else its content hangs on, an adapter for one."""
        return self._extra_hash

    @property
    def num_tokens_total(self) -> int:
        """Tokens of the sequence up to its end."""
        return self._num_tokens_total

    @property
    def computed(self) -> bool:
        """Whether it was found computed."""
        return self._computed

    @computed.setter
    def computed(self, value: bool) -> None:
        self._computed = value
        self._say_changed()

    @classmethod
    def hash_block_tokens(
        cls,
        is_first_block: bool,
        prev_block_hash: int | None,
        cur_block_token_ids: list[int],
        extra_hash: int | None = None,
    ) -> int:
        """The hash of a full block behind a block of that hash."""
        if is_first_block and prev_block_hash is None:
            prev_block_hash = NONE_HASH
        return hash((is_first_block, prev_block_hash, *cur_block_token_ids, extra_hash))

    def _hash_of(self, token_ids: list[int]) -> int | None:
        before = None if self._prev_block is None else self._prev_block.content_hash
        if self._prev_block is not None and before in (None, NONE_HASH):
            return None
        return self.hash_block_tokens(self._prev_block is None, before, token_ids, self._extra_hash)

    def _count_total(self) -> None:
        before = 0 if self._prev_block is None else self._prev_block.num_tokens_total
        self._num_tokens_total = before + len(self._token_ids)


def hash_chain(
    token_ids: list[int], block_size: int, parent: int | None, extra_hash: int | None
) -> list[int]:
    """The hashes of the full blocks of tokens behind a block of that hash, None for no block."""
    hashes: list[int] = []
    is_first, extra = parent is None, (extra_hash,)
    before = NONE_HASH if parent is None else parent
    full_blocks = zip(*[iter(token_ids)] * block_size, strict=False)
    for tokens in full_blocks:
        before = hash((is_first, before) + tokens + extra)  # noqa: RUF005 # faster than unpacked
        hashes.append(before)
        is_first = False
    return hashes


def check_previous(prev_block: Block | None) -> None:
    """Raise WrongCall unless a block can stand before one with a hash."""
    if prev_block is not None and not isinstance(prev_block, PrefixCachingBlock):
        kind = type(prev_block).__name__
        require(False, "a {kind} cannot stand before a block with a content hash", kind=kind)
