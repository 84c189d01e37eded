# SPDX-License-Identifier: Apache-2.0
"""V0's allocator against its facts written down plainly, with lists and dictionaries.

The plain allocator does everything block by block, as the original does, and is restored if it runs
out of blocks. Ids, hits, refusals and the order in which free blocks would leave are compared after
each call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvcore.legacy.v0.interfaces import chain as chain_of
from kvcore.legacy.v0.prefix_caching_block import (
    Block,
    NoFreeBlocksError,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from tests.conftest import Backend
from tests.legacy.v0.small import ids

SIZE = 2
NUM_CALLS = 500
T = TypeVar("T")
U = TypeVar("U")


class Empty(Exception):
    """No block is free."""


class Plain:
    """The allocator, written as plainly and slowly as possible."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(num_blocks))
        self.owners = dict.fromkeys(range(num_blocks), 0)
        self.of_hash: dict[int, int] = {}
        self.kept: dict[int, tuple[float, int]] = {}
        self.times: dict[int, float] = {}

    def queue(self) -> list[int]:
        """Free blocks in the order in which they would leave."""
        return self.free + sorted(self.kept, key=self.sort_key)

    def sort_key(self, block: int) -> tuple[float, int, int]:
        time, length = self.kept[block]
        return (time, -length, block)

    def take(self) -> int:
        if self.free:
            block = self.free.pop(0)
        elif self.kept:
            block = min(self.kept, key=self.sort_key)
            del self.kept[block]
            self.of_hash = {key: its for key, its in self.of_hash.items() if its != block}
        else:
            raise Empty
        self.owners[block], self.times[block] = 1, -1.0
        return block

    def hit(self, content_hash: int) -> int | None:
        block = self.of_hash.get(content_hash)
        if block is not None:
            self.owners[block] += 1
            if block in self.kept:
                del self.kept[block]
                self.times[block] = -1.0
        return block

    def drop(self, block: int, content_hash: int | None, length: int) -> None:
        self.owners[block] -= 1
        if self.owners[block] == 0 and content_hash is not None:
            self.kept[block] = (self.times[block], length)
        elif self.owners[block] == 0:
            self.free.insert(0, block)

    def full(self, content_hash: int) -> int:
        block = self.hit(content_hash)
        if block is None:
            block = self.take()
            self.of_hash[content_hash] = block
        return block

    def fill(self, block: int, promoted: int | None) -> int:
        """Return the id of a block after tokens were added. promoted: its hash, if it is full."""
        if self.owners[block] > 1:
            self.owners[block] -= 1
            block = self.take()
        if promoted is None:
            return block
        found = self.of_hash.get(promoted)
        if found is None:
            self.of_hash[promoted] = block
            return block
        self.drop(block, None, 0)
        self.hit(promoted)
        return found

    def mark(self, block: int, time: float) -> None:
        if self.owners[block]:
            self.times[block] = time
        elif block in self.kept:
            self.kept[block] = (time, self.kept[block][1])

    def reset(self) -> None:
        if not any(self.owners.values()):
            for block in sorted(self.kept, key=self.sort_key):
                self.free.insert(0, block)
            self.kept, self.of_hash = {}, {}


class Walk:
    """A walk of the allocator and the plain one, with the same calls."""

    def __init__(self, seed: int, backend: Backend) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.randint(1, 8)
        self.allocator = PrefixCachingBlockAllocator(num_blocks, SIZE, backend=backend)
        self.plain = Plain(num_blocks)
        self.chains: list[list[Block]] = []
        self.num_refused = 0
        self.clock = 0.0

    def run(self) -> None:
        actions = [self.begin, self.grow, self.fill, self.fill, self.fork, self.drop, self.swap]
        for _ in range(NUM_CALLS):
            self.random.choice([*actions, self.mark, self.reset])()
            free = list(self.allocator.blocks.backing.free_blocks())
            assert free == self.plain.queue()
            owners = [self.allocator.refcounter.get(block) for block in self.plain.owners]
            assert owners == list(self.plain.owners.values())

    def attempt(self, mine: Callable[[], T], plain: Callable[[], U]) -> tuple[T, U] | None:
        """Make a call on both. Returns None if both refuse it."""
        before = copy.deepcopy(self.plain)
        try:
            expected = plain()
        except Empty:
            self.plain = before
            self.num_refused += 1
            with pytest.raises(NoFreeBlocksError):
                mine()
            return None
        return mine(), expected

    def begin(self) -> None:
        tokens = [[self.random.randrange(2)] * SIZE for _ in range(self.random.randint(1, 4))]
        hashes: list[int] = []
        for each in tokens:
            parent = hashes[-1] if hashes else None
            hashes.append(PrefixCachingBlock.hash_block_tokens(not hashes, parent, each))
        done = self.attempt(
            lambda: self.allocator.allocate_immutable_blocks(None, tokens),
            lambda: [self.plain.full(each) for each in hashes],
        )
        if done is not None:
            assert ids(done[0]) == done[1]
            self.chains.append(done[0])

    def grow(self) -> None:
        chain = self.random.choice([[], *self.chains])
        if chain and not chain[-1].is_full:
            return
        before = chain[-1] if chain else None
        done = self.attempt(
            lambda: self.allocator.allocate_mutable_block(before), lambda: self.plain.take()
        )
        if done is not None:
            assert done[0].block_id == done[1]
            chain.append(done[0])
            if len(chain) == 1:
                self.chains.append(chain)

    def fill(self) -> None:
        if not self.chains:
            return
        chain = self.random.choice(self.chains)
        last, room = chain[-1], chain[-1].num_empty_slots
        if not room:
            return
        tokens = [self.random.randrange(2) for _ in range(self.random.randint(1, room))]
        promoted = None
        if len(tokens) == room:
            parent = chain[-2].content_hash if len(chain) > 1 else None
            all_tokens = last.token_ids + tokens
            first = len(chain) == 1
            promoted = PrefixCachingBlock.hash_block_tokens(first, parent, all_tokens)
        held = int(last.block_id or 0)
        done = self.attempt(
            lambda: last.append_token_ids(tokens), lambda: self.plain.fill(held, promoted)
        )
        assert done is None or last.block_id == done[1]

    def fork(self) -> None:
        if not self.chains:
            return
        chain = self.random.choice(self.chains)
        self.chains.append(self.allocator.fork(chain[-1]))
        for block in chain:
            self.plain.owners[int(block.block_id or 0)] += 1

    def drop(self) -> None:
        if not self.chains:
            return
        chain = self.random.choice(self.chains)
        self.chains.remove(chain)
        for block in chain:
            self.plain.drop(int(block.block_id or 0), block.content_hash, total(block))
        self.allocator.free_all(chain)

    def swap(self) -> None:
        """Swap out, and in again if there is room: content that was kept is hit."""
        if not self.chains:
            return
        chain = self.random.choice(self.chains)
        for block in chain:
            self.plain.drop(int(block.block_id or 0), block.content_hash, total(block))
        self.allocator.swap_out(chain)
        hashes = [block.content_hash for block in chain]
        done = self.attempt(
            lambda: self.allocator.swap_in(chain),
            lambda: [
                self.plain.take() if each is None else self.plain.full(each) for each in hashes
            ],
        )
        if done is None:
            self.chains.remove(chain)
        else:
            assert ids(chain) == done[1]

    def mark(self) -> None:
        self.clock += self.random.choice([0.0, 1.0])
        block = self.random.randrange(len(self.plain.owners))
        if self.plain.owners[block] or block in self.plain.kept:
            self.allocator.mark_blocks_as_accessed([block], self.clock)
            self.plain.mark(block, self.clock)

    def reset(self) -> None:
        assert self.allocator.reset_prefix_cache() is not any(self.plain.owners.values())
        self.plain.reset()


def total(block: Block) -> int:
    """Count the tokens of a block's chain anew."""
    return sum(len(each.token_ids) for each in chain_of(block))


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_those_of_the_plain_allocator(backend: Backend, seed: int) -> None:
    walk = Walk(seed, backend)
    walk.run()
    assert walk.num_refused < NUM_CALLS / 2
