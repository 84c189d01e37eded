# SPDX-License-Identifier: Apache-2.0
"""nano-vllm's six calls over plain lists: an oracle that is written from the rules alone.

A content is a prefix of tokens as it is, without a hash. All of its blocks are listed, the one that
was published first in front, and each leaves the list when it gets a new owner.
"""

from __future__ import annotations

from tests.engines.nano_vllm.sequences import Sequence


class ListedBlocks:
    """Owners and content of each block, and the free ones in the order in which they are taken."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.owners = [0] * num_blocks
        self.content: list[tuple[int, ...] | None] = [None] * num_blocks
        self.copies: dict[tuple[int, ...], list[int]] = {}
        self.free = list(range(num_blocks))

    def cached(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest findable prefix that leaves a token to compute."""
        found: list[int] = []
        for end in range(self.block_size, len(seq.token_ids), self.block_size):
            copies = self.copies.get(tuple(seq.token_ids[:end]))
            if not copies:
                break
            found.append(copies[0])
        return found

    def can_allocate(self, seq: Sequence) -> int:
        """Count the cached blocks, or return -1; a cached block without owner takes a free one."""
        found = self.cached(seq)
        used = sum(self.owners[block] > 0 for block in found)
        return -1 if seq.num_blocks - used > len(self.free) else len(found)

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Take the cached blocks first, so that no new one is taken from them."""
        assert seq.block_table == []
        for block in self.cached(seq)[:num_cached_blocks]:
            if self.owners[block] == 0:
                self.free.remove(block)
            self.owners[block] += 1
            seq.block_table.append(block)
        while len(seq.block_table) < seq.num_blocks:
            seq.block_table.append(self.take())
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def take(self) -> int:
        """Take the block that has been free for longest; its content is lost."""
        block = self.free.pop(0)
        content = self.content[block]
        if content is not None:
            self.copies[content].remove(block)
            self.content[block] = None
        self.owners[block] = 1
        return block

    def deallocate(self, seq: Sequence) -> None:
        """Release a sequence's blocks, tail first, so that a prefix outlives what follows it."""
        while seq.block_table:
            block = seq.block_table.pop()
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free.append(block)
        seq.num_cached_tokens = 0

    def can_append(self, seq: Sequence) -> bool:
        """Tell whether the last token has a slot or can get one."""
        return seq.num_blocks == len(seq.block_table) or bool(self.free)

    def may_append(self, seq: Sequence) -> None:
        """Add a block if the last token has no slot."""
        if seq.num_blocks > len(seq.block_table):
            seq.block_table.append(self.take())

    def hash_blocks(self, seq: Sequence) -> None:
        """List the blocks that are computed to their end by now."""
        num_computed = seq.num_cached_tokens + seq.num_scheduled_tokens
        for place in range(num_computed // self.block_size):
            block = seq.block_table[place]
            if self.content[block] is None:
                content = tuple(seq.token_ids[: (place + 1) * self.block_size])
                self.content[block] = content
                self.copies.setdefault(content, []).append(block)
