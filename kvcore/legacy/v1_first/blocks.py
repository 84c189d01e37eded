# SPDX-License-Identifier: Apache-2.0
"""Block objects of the first manager with prefix caching, its free queue and its map of hashes.

Rules: owners, the queue and who is found are the pool's, asked at the time of the question. What a
block has of its own is the text in which its tokens lie, one text for all blocks that a request was
given; so tokens and hashes are made when somebody looks. A block keeps its tokens until it is given
out again. Source: S004-01, 03, 09, 12, 15, 16. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, TypeAlias

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v1_0_8.errors import NotByHand
from kvcore.legacy.v1_first.errors import BlockInUse
from kvcore.legacy.v1_first.hashes import BlockHashType, hash_block_tokens

ShownHash: TypeAlias = BlockHashType | bytes


class Text:
    """Tokens of a request behind its hits, those that calls gave slots.

    first, end: position of the first one in the request, and of the one behind the last. before:
    the text of the last hit, and where in it that hit begins. has_hole: whether a token before the
    last got no slot, so that what is behind it can be no hit.
    """

    __slots__ = ("_hashes", "before", "block_size", "end", "first", "has_hole", "tokens")

    def __init__(
        self, block_size: int, first: int, before: tuple[Text, int] | None, tokens: list[int]
    ) -> None:
        self.block_size = block_size
        self.first = first
        self.end = first + len(tokens)
        self.has_hole = False
        self.before = before
        self.tokens = tokens
        self._hashes: list[BlockHashType] = []

    def reaches(self, start: int) -> bool:
        """Whether all tokens before a position got slots."""
        return start <= self.end and not self.has_hole

    def grow(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Hold a request's tokens between two positions."""
        if start > self.end:
            self.has_hole, self.end = True, start
        if end > self.end:
            self.tokens += tokens[self.end : end]
            self.end = end

    def hold(self, blocks: Sequence[KVCacheBlock], at: int | None = None) -> None:
        """Be the text of these blocks. at: place of the first of them; None: where it begins."""
        start = 0 if at is None else at * self.block_size - self.first
        for block in blocks:
            block.text, block.start = self, start
            start += self.block_size

    def hash_at(self, start: int) -> BlockHashType:
        """The hash of the block that begins here, which is full. Cost: O(blocks) the first time."""
        chain = [(self, start)]
        while (before := chain[-1][0].before) is not None:
            chain.append(before)
        parent: BlockHashType | None = None
        for text, place in reversed(chain):
            parent = text._hash_own(parent, place)
        assert parent is not None
        return parent

    def _hash_own(self, parent: BlockHashType | None, start: int) -> BlockHashType:
        size, hashes = self.block_size, self._hashes
        for at in range(len(hashes) * size, start + size, size):
            before = hashes[-1] if hashes else parent
            hashes.append(hash_block_tokens(before, self.tokens[at : at + size]))
        return hashes[start // size]


class KVCacheBlock:
    """One block: its number, and its owners, tokens and hash at the time of the question.

    text, start: in which its tokens lie, from which place on; None where nothing is cached.
    """

    __slots__ = ("_pool", "block_id", "start", "text")

    def __init__(self, block_id: int, pool: Pool) -> None:
        self.block_id = block_id
        self._pool = pool
        self.text: Text | None = None
        self.start = 0

    @property
    def ref_cnt(self) -> int:
        """Requests that have it in their table."""
        return self._pool.backing.ref_count(self.block_id)

    @property
    def token_ids(self) -> list[int] | tuple[int, ...]:
        """Its tokens, a tuple once it is full; none where nothing is cached."""
        text, start = self.text, self.start
        if text is None:
            return []
        tokens = text.tokens[start : start + text.block_size]
        return tuple(tokens) if len(tokens) == text.block_size else tokens

    @property
    def block_hash(self) -> ShownHash | None:
        """What it is found by; None unless it is full and cached.

        Of the original's kind, or the core's key where the manager was told how to hash.
        """
        key = self._pool.backing.key_of(self.block_id)
        if key is None or self.text is None or self._pool.shows_keys:
            return key
        return self.text.hash_at(self.start)

    @property
    def num_hashed_tokens(self) -> int:
        """Tokens of its request up to its end, 0 unless it is cached."""
        text = self.text
        if text is None or self._pool.backing.key_of(self.block_id) is None:
            return 0
        return text.first + self.start + text.block_size

    @property
    def prev_free_block(self) -> KVCacheBlock | None:
        """The block that leaves before it; None where it is first, or has an owner.

        Cost: O(free blocks).
        """
        return self._pool.free_block_queue.neighbours(self)[0]

    @property
    def next_free_block(self) -> KVCacheBlock | None:
        """The block that leaves behind it; None where it is last, or has an owner.

        Cost: O(free blocks).
        """
        return self._pool.free_block_queue.neighbours(self)[1]

    @property
    def place(self) -> tuple[Text, int] | None:
        """Where its tokens lie."""
        return None if self.text is None else (self.text, self.start)

    def reset(self) -> None:
        """Forget tokens and hash. Raises BlockInUse where it has an owner."""
        if self.ref_cnt:
            raise BlockInUse(block=self.block_id, num_owners=self.ref_cnt)
        self._pool.backing.unpublish(self.block_id)
        self.text = None

    def __repr__(self) -> str:
        return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


class Pool:
    """All blocks of a manager. shows_keys: whether a block's hash is the core's key."""

    def __init__(self, num_blocks: int, backing: Backing, *, shows_keys: bool) -> None:
        self.backing = backing
        self.shows_keys = shows_keys
        self.blocks = tuple(KVCacheBlock(number, self) for number in range(num_blocks))
        self.free_block_queue = FreeBlockQueue(self)


class FreeBlockQueue:
    """The blocks without owner, the next to be taken first; it moves with their owners alone."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
        return self._pool.backing.num_free()

    @property
    def free_list_head(self) -> KVCacheBlock | None:
        """The block that leaves next; None where there is none. Cost: O(free blocks)."""
        return next(iter(self.get_all_free_blocks()), None)

    @property
    def free_list_tail(self) -> KVCacheBlock | None:
        """The block that leaves last; None where there is none. Cost: O(free blocks)."""
        return next(reversed(self.get_all_free_blocks()), None)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them. Cost: O(free blocks)."""
        return [self._pool.blocks[number] for number in self._pool.backing.free_blocks()]

    def neighbours(self, block: KVCacheBlock) -> tuple[KVCacheBlock | None, KVCacheBlock | None]:
        """The blocks before and behind one; None for none, and where it has an owner."""
        if block.ref_cnt:
            return None, None
        order: list[KVCacheBlock | None] = [None, *self.get_all_free_blocks(), None]
        at = order.index(block)
        return order[at - 1], order[at + 1]

    def popleft(self) -> NoReturn:
        """Raises NotByHand."""
        raise NotByHand(block=None, calls="allocate_slots and append_slots")

    def remove(self, block: KVCacheBlock) -> NoReturn:
        """Raises NotByHand."""
        raise NotByHand(block=block.block_id, calls="allocate_slots and append_slots")

    def append(self, block: KVCacheBlock) -> NoReturn:
        """Raises NotByHand."""
        raise NotByHand(block=block.block_id, calls="free")


class CachedBlocks(Mapping[ShownHash, dict[int, KVCacheBlock]]):
    """Which blocks each hash is found by, the one that answers first. Cost: O(pool) a question."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __getitem__(self, block_hash: ShownHash) -> dict[int, KVCacheBlock]:
        return self._listed()[block_hash]

    def __iter__(self) -> Iterator[ShownHash]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._pool.backing.state().device.index)

    def __repr__(self) -> str:
        return repr(self._listed())

    def _listed(self) -> dict[ShownHash, dict[int, KVCacheBlock]]:
        index, blocks = self._pool.backing.state().device.index, self._pool.blocks
        listed: dict[ShownHash, dict[int, KVCacheBlock]] = {}
        for key, first in index.firsts.items():
            shown = blocks[first].block_hash
            assert shown is not None
            listed.setdefault(shown, {}).update((number, blocks[number]) for number in index[key])
        return listed
