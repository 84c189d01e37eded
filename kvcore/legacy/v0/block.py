# SPDX-License-Identifier: Apache-2.0
"""Block objects of V0: the tokens of one physical block, for every kind of allocator.

A shared block is copied before it is written. In a prefix-caching allocator a full block is
promoted: another block of the same content may replace it, so its id may change.

Invariants: a block gets a content hash once it is full and the previous block has one, and keeps
it. The hash is Python's own, with the same value: hash((is_first, previous, *tokens, extra)); for
the first block, previous is hash('None'). The null block is never written, moved or freed.
Source: S002-05, 51 to 58, 66, 69, 70, X-12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from kvcore.legacy.v0.errors import NotSupported, WrongValue, require

BlockId = int
NONE_HASH = hash("None")
NEVER_ACCESSED = -1


class Block:
    """The tokens of one physical block, and its place in a sequence.

    home: the list of spare objects of the pool that made this one.
    """

    __slots__ = (
        *("_allocator", "_content_hash", "_cow_target", "_place", "block_id", "block_size"),
        *("extra_hash", "home", "pool_id", "prev_block", "token_ids"),
    )
    Factory = Callable[..., Any]
    last_accessed: float
    computed: bool
    _none_hash = NONE_HASH

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: Any,
        block_id: BlockId | None = None,
        _cow_target: Block | None = None,
        extra_hash: int | None = None,  # noqa: ARG002 # not used by a naive block
    ) -> None:
        """_cow_target: the block to copy on a write if it is shared; None: this one.

        Raises WrongCall for too many tokens.
        """
        if len(token_ids) > block_size:
            check_tokens(token_ids, block_size, block_id)
        self.prev_block = prev_block
        self.token_ids = token_ids[:]
        self.block_size = block_size
        self._allocator = allocator
        self.block_id = block_id
        self._cow_target = _cow_target
        self.extra_hash: int | None = None
        self._content_hash: int | None = None
        self._place: int = 0 if prev_block is None else prev_block._place + 1

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Append tokens, to a copy if the block is shared. Raises WrongCall, NoFreeBlocksError."""
        check_tokens(token_ids, self.num_empty_slots, self.block_id)
        if not token_ids:
            return
        if self.block_id is not None:
            copied = self._cow_target or self
            self.block_id = self._allocator.cow_block_if_not_appendable(copied)
            self._allocator.num_by_hand += 1
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens that fit, to a block that is not shared."""
        self.token_ids.extend(token_ids)

    @property
    def num_empty_slots(self) -> int:
        """The number of tokens that still fit."""
        return self.block_size - len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether the block has no empty slot."""
        return len(self.token_ids) == self.block_size

    @property
    def content_hash(self) -> int | None:
        """The hash of all tokens up to its end; None if it has none."""
        return self._content_hash

    @property
    def num_tokens_total(self) -> int:
        """The number of tokens of the sequence up to the end of this block."""
        num, block = 0, self
        while len(block.token_ids) < block.block_size:
            num += len(block.token_ids)
            if block.prev_block is None:
                return num
            block = block.prev_block
        return num + (block._place + 1) * block.block_size


def _unknown(what: str) -> Any:
    """Return a property that raises NotSupported, for what a kind of block does not record."""

    def refuse(block: Block, value: object = None) -> None:
        detail = "" if value is None else f": {value}"
        raise NotSupported(reason=f"block {block.block_id} does not record {what}{detail}")

    return property(refuse, refuse)


class NaiveBlock(Block):
    """A block without a content hash."""

    __slots__ = ()
    num_tokens_total = _unknown("how many tokens its sequence has")
    computed = _unknown("whether it is computed")
    last_accessed = _unknown("when it was used")


class PrefixCachingBlock(Block):
    """A block that is found by its content hash once it is full."""

    __slots__ = ("computed", "last_accessed")

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: list[int],
        block_size: int,
        allocator: Any,
        block_id: BlockId | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> None:
        """Raises WrongCall for a wrong kind of block or allocator, or too many tokens."""
        if not getattr(allocator, "caches", False):
            kind = type(allocator).__name__
            require(False, "a {kind} caches no prefixes", kind=kind)
        check_previous(prev_block)
        super().__init__(prev_block, token_ids, block_size, allocator, block_id)
        self.extra_hash = extra_hash
        self.computed = computed
        self.last_accessed = NEVER_ACCESSED

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Append tokens; a block that becomes full is promoted, which may change its id.

        Raises WrongCall, NoFreeBlocksError.
        """
        if self.computed or self.content_hash is not None:
            state = "is computed" if self.computed else "has a content hash"
            reason = "block {block} {state}: {num} tokens cannot be added"
            require(False, reason, block=self.block_id, state=state, num=len(token_ids))
        hash(tuple(token_ids))  # Unhashable tokens raise here, before anything changes.
        super().append_token_ids(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens that fit; a block that becomes full is promoted."""
        self.token_ids.extend(token_ids)
        if self.block_id is not None and self.content_hash is not None:
            self._allocator.promote(self)

    @property
    def content_hash(self) -> int | None:
        """The hash of all tokens up to its end.

        None until the block is full and the previous block has a hash.
        """
        if self._content_hash is None and len(self.token_ids) == self.block_size:
            before = self.prev_block
            parent = None if before is None else before.content_hash
            if before is None or parent not in (None, NONE_HASH):
                self._content_hash = self.hash_block_tokens(
                    before is None, parent, self.token_ids, self.extra_hash
                )
        return self._content_hash

    @classmethod
    def hash_block_tokens(
        cls,
        is_first_block: bool,
        prev_block_hash: int | None,
        cur_block_token_ids: Sequence[int],
        extra_hash: int | None = None,
    ) -> int:
        """Return the hash of a full block that follows a block with prev_block_hash."""
        if is_first_block and prev_block_hash is None:
            prev_block_hash = NONE_HASH
        return hash((is_first_block, prev_block_hash, *cur_block_token_ids, extra_hash))


class NullBlock(Block):
    """Stands in a table for blocks that a sliding window has passed; cannot change."""

    __slots__ = ("_proxy",)

    def __init__(self, proxy: Block) -> None:
        """proxy: the block that serves as the null block."""
        self._proxy = proxy
        super().__init__(None, [], proxy.block_size, None, proxy.block_id)

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Raise WrongValue."""
        reason = f"the null block {self.block_id} takes no tokens, {len(token_ids)} are given"
        raise WrongValue(reason=reason, block=self.block_id)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the proxy.

        Raises WrongValue for another block id, NotSupported for what the block does not record.
        """
        if name == "block_id" and value != self._proxy.block_id:
            reason = f"the null block {self._proxy.block_id} cannot become block {value}"
            raise WrongValue(reason=reason, block=self._proxy.block_id)
        super().__setattr__(name, value)

    num_tokens_total = _unknown("how many tokens its sequence has")
    computed = property(
        attrgetter("_proxy.computed"), lambda self, value: setattr(self._proxy, "computed", value)
    )
    last_accessed = property(
        attrgetter("_proxy.last_accessed"),
        lambda self, value: setattr(self._proxy, "last_accessed", value),
    )


def chain(last_block: Block) -> list[Block]:
    """Return a block and all its predecessors, first to last."""
    blocks = [last_block]
    while (block := blocks[-1].prev_block) is not None:
        blocks.append(block)
    return blocks[::-1]


def check_tokens(token_ids: Sequence[int], num_empty_slots: int, block_id: BlockId | None) -> None:
    """Raise WrongCall unless tokens fit."""
    if len(token_ids) > num_empty_slots:
        reason = "block {block} has {slots} empty slots, {num} tokens are given"
        require(False, reason, block=block_id, slots=num_empty_slots, num=len(token_ids))


def check_previous(prev_block: Block | None) -> None:
    """Raise WrongCall unless a block can precede a block with a content hash."""
    if prev_block is not None and not isinstance(prev_block, PrefixCachingBlock):
        kind = type(prev_block).__name__
        require(False, "a {kind} cannot precede a block with a content hash", kind=kind)


def hash_chain(
    chunks: Iterable[Sequence[int]], parent: int | None, extra_hash: int | None
) -> list[int]:
    """Return the hashes of full blocks of tokens. parent: hash of the previous block, or None."""
    hashes: list[int] = []
    is_first, before = parent is None, NONE_HASH if parent is None else parent
    for tokens in chunks:
        before = hash((is_first, before, *tokens, extra_hash))
        hashes.append(before)
        is_first = False
    return hashes
