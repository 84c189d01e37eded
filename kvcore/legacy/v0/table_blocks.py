# SPDX-License-Identifier: Apache-2.0
"""What a V0 table holds of its blocks: columns, and objects from the time that somebody looks.

Rules: calls work on ids, tokens and keys. Block objects come into being when they are asked for,
and are the same ones from then on: a call first reads what was done with them by hand, if anything
was, and tells those of which it changed something. Places that a window has passed are the first
ones; their objects keep their tokens, since later blocks of the chain follow them. Source: S002-36,
37, 51, 57, 66, 69.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcore.legacy.v0.block_interfaces import Block, BlockId, chain
from kvcore.legacy.v0.content_block import PrefixCachingBlock
from kvcore.legacy.v0.naive_block import NaiveBlock
from kvcore.legacy.v0.null_block import NullBlock
from kvcore.legacy.v0.tier_blocks import hash_of_key


class TableBlocks:
    """The blocks of a table, in order.

    allocator: of the device on which they are. keys: of the leading full blocks, where there are
    keys. found: places of blocks whose content was found. num_null: places that a window passed.
    is_given: whether the objects are a caller's, of any kind, or another table's as well.
    """

    __slots__ = (
        *("_known", "_num_by_hand", "allocator", "block_ids", "block_size", "extra_hashes"),
        *("found", "is_given", "keys", "null_block", "num_null", "objects", "token_ids"),
    )

    def __init__(self, allocator: Any, block_size: int) -> None:
        self.allocator = allocator
        self.block_size = block_size
        self.block_ids: list[BlockId] = []
        self.token_ids: list[int] = []
        self.keys: list[bytes] = []
        self.extra_hashes: list[int | None] = []
        self.found: set[int] = set()
        self.num_null = 0
        self.null_block: Block | None = None
        self.objects: list[Block] | None = None
        self.is_given = False
        self._known: list[Block] = []
        self._num_by_hand = -1

    def fork(self) -> TableBlocks:
        """The same blocks once more, without objects; nothing in it was found."""
        forked = TableBlocks(self.allocator, self.block_size)
        forked.block_ids = self.block_ids[:]
        forked.token_ids = self.token_ids[:]
        forked.keys = self.keys[:]
        forked.extra_hashes = self.extra_hashes[:]
        forked.num_null, forked.null_block = self.num_null, self.null_block
        return forked

    def real_ids(self) -> list[BlockId]:
        """The ids of the blocks that no window passed."""
        return self.block_ids[self.num_null :] if self.num_null else self.block_ids

    def contents(self) -> tuple[list[bytes | None], Sequence[int]]:
        """Of these blocks the keys, None where there is none, and the lengths of their chains."""
        num, first, size = len(self.block_ids), self.num_null, self.block_size
        keys: list[Any] = self.keys[first:]
        keys += [None] * (num - first - len(keys))
        return keys, range(size * (first + 1), size * num + 1, size)

    def look(self) -> list[Block]:
        """The objects, as a live list."""
        if self.objects is None:
            self.objects = []
            self.write()
        return self.objects

    def read(self, owner: Callable[[Block], Any]) -> None:
        """Learn what was done with objects by hand. Raises WrongCall where one has no owner.

        owner: whose allocator a block is.
        """
        objects = self.objects
        if not objects or not self._is_changed(objects):
            return
        num_null = sum(isinstance(block, NullBlock) for block in objects)
        null, real = objects[:num_null], objects[num_null:]
        allocator = owner(real[0]) if real else self.allocator
        self.block_ids[:] = [_null_id(block) for block in null] + allocator.check_held(real)
        self.allocator, self.num_null = allocator, num_null
        self.null_block = null[0] if null else None
        row = chain(real[-1]) if real else ()
        row, ahead = (row, 0) if len(row) == len(objects) else (real, num_null)
        self.token_ids[ahead * self.block_size :] = [
            token for block in row for token in block.token_ids
        ]
        self.extra_hashes[ahead:] = [block.extra_hash for block in row]
        if real and isinstance(real[-1], PrefixCachingBlock):
            keys: list[Any] = allocator.contents_of(row)[0]
            self.keys[ahead:] = keys[: keys.index(None)] if None in keys else keys
            self.found = {ahead + at for at, block in enumerate(row) if block.computed}
        self._know(objects)

    def write(self, first: int = 0, passed: Iterable[int] = ()) -> None:
        """Tell the objects, if there are any, what is so now, and make those that are missing.

        first: the place from which on something changed; passed: those before that a window passed.
        """
        objects = self.objects
        if objects is None:
            return
        size, before, told = self.block_size, None, -1
        for at in (*passed, *range(min(first, len(objects)), len(self.block_ids))):
            if told != at - 1:
                before = objects[at - 1]
            tokens = self.token_ids[at * size : (at + 1) * size]
            content_hash = hash_of_key(self.keys[at]) if at < len(self.keys) else None
            held = None if at < self.num_null else self.block_ids[at]
            known = (content_hash, at in self.found)
            block: Any = objects[at] if at < len(objects) else None
            if block is None:
                extra_hash = self.extra_hashes[at]
                block = self.allocator.make(before, tokens, held, extra_hash, *known)
                objects.append(block)
            elif not isinstance(block, NullBlock):
                block.follow(self.allocator, held, tokens, *known)
            if held is None:
                assert self.null_block is not None
                objects[at] = self.null_block
            before, told = block, at
        if passed:
            first = 0
        self._know(objects, first)

    def part(self) -> None:
        """Leave the objects, whose blocks were given back, without one."""
        if self.objects is None:
            return
        allocator = self.allocator
        num_by_hand = allocator.num_by_hand
        allocator.part_with(self.objects[self.num_null :])
        if not self.is_given:
            allocator.num_by_hand = num_by_hand  # nobody else's objects changed

    def _is_changed(self, objects: list[Block]) -> bool:
        """Whether something may have been done with objects, or with their list."""
        if self._num_by_hand != self.allocator.num_by_hand:
            return True
        return self.is_given or objects != self._known

    def _know(self, objects: list[Block], first: int = 0) -> None:
        """Note that these objects and their columns say the same. first: the first that changed."""
        self._num_by_hand = self.allocator.num_by_hand
        if objects and type(objects[-1]) not in (NaiveBlock, PrefixCachingBlock, NullBlock):
            self.is_given = True  # of a class that may not say what is done with it
        self._known[first:] = objects[first:]


def _null_id(block: Block) -> BlockId:
    assert block.block_id is not None
    return block.block_id
