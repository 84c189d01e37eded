# SPDX-License-Identifier: Apache-2.0
"""Block objects of the first manager with prefix caching, its free queue and its map of hashes.

The pool keeps the owners, the queue and the index, and each access reads them. A block refers to
the text that holds its tokens, one text for all blocks that a request was given; tokens and hashes
are computed when they are read. A block keeps its tokens until it is allocated again. Source:
S004-01, 03, 09, 12, 15, 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from kvcore.legacy.blocks import views
from kvcore.legacy.v1_first.errors import BlockInUse
from kvcore.legacy.v1_first.hashes import BlockHashType, hash_block_tokens

ShownHash: TypeAlias = BlockHashType | bytes


@attrs.define(eq=False)
class Tail:
    """The tokens of a request after its hits, up to the last one that was given a slot.

    first, end: positions in the request of the first token, and of the one after the last. before:
    the text of the last hit, and the offset in it at which that hit begins. shows_keys: whether the
    core's keys are the hashes of its blocks. has_hole: whether a token before the last got no slot,
    so that nothing after it can be a hit.
    """

    block_size: int
    first: int
    before: tuple[Tail, int] | None
    tokens: list[int]
    shows_keys: bool
    end: int
    has_hole: bool = False
    _hashes: list[BlockHashType] = attrs.Factory(list)

    def reaches(self, start: int) -> bool:
        """Return whether all tokens before a position got slots."""
        return start <= self.end and not self.has_hole

    def grow(self, tokens: Sequence[int], start: int, end: int) -> None:
        """Add a request's tokens between two positions."""
        if start > self.end:
            self.has_hole, self.end = True, start
        if end > self.end:
            self.tokens += tokens[self.end : end]
            self.end = end

    def hold(self, blocks: Sequence[KVCacheBlock], at: int | None = None) -> None:
        """Make this the text of some blocks. at: index of the first block; None: the beginning."""
        start = 0 if at is None else at * self.block_size - self.first
        for block in blocks:
            block.content = (self, start)
            start += self.block_size

    def hash_at(self, start: int) -> BlockHashType:
        """Return the hash of the full block at an offset. The first call costs O(blocks)."""
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


class KVCacheBlock(views.BlockView):
    """One block: its id, and its current owners, tokens and hash.

    content: the text that holds its tokens and their offset in it; None if nothing is cached.
    """

    __slots__ = ()
    content: tuple[Tail, int] | None

    @property
    def token_ids(self) -> list[int] | tuple[int, ...]:
        """Its tokens, as a tuple once it is full; empty if nothing is cached."""
        if self.content is None:
            return []
        text, start = self.content
        tokens = text.tokens[start : start + text.block_size]
        return tuple(tokens) if len(tokens) == text.block_size else tokens

    @property
    def block_hash(self) -> ShownHash | None:
        """The hash under which it is found; None unless it is full and cached.

        The original's kind of hash, or the core's key if the manager was given a hashing.
        """
        key = self._pool.blocks.key_of(self.block_id, "device")
        if key is None or self.content is None:
            return key
        text, start = self.content
        return key if text.shows_keys else text.hash_at(start)

    @property
    def num_hashed_tokens(self) -> int:
        """The number of its request's tokens up to its end; 0 unless it is cached."""
        if self.content is None or self._pool.blocks.key_of(self.block_id, "device") is None:
            return 0
        text, start = self.content
        return text.first + start + text.block_size

    def reset(self) -> None:
        """Forget tokens and hash. Raises BlockInUse if it has an owner."""
        if self.ref_cnt:
            raise BlockInUse(block=self.block_id, num_owners=self.ref_cnt)
        self._pool.blocks.unpublish(self.block_id, "device")
        self.content = None

    def __repr__(self) -> str:
        return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


class FreeBlockQueue(views.LinkedQueue[KVCacheBlock]):
    """A queue of blocks that belong to no pool; the head leaves first."""

    kind = KVCacheBlock


CachedBlocks = views.CachedBlocks[KVCacheBlock]
