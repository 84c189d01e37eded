# SPDX-License-Identifier: Apache-2.0
"""Prefixes that an engine declares for prompts to share, as the first block manager has them.

A prefix is whole blocks. It has block ids once a manager has given it blocks, and an engine sets
`computed`. A pool has one prefix per tokens and adapter. Source: S003-12, 13, 26, 33.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvcore.legacy.v0_3.errors import WrongPrefix
from kvcore.types.arguments import read_count

if TYPE_CHECKING:
    from kvcore.legacy.v0_3.block_allocator import PhysicalTokenBlock


class Prefix:
    """Whole blocks of tokens with which several prompts begin.

    hash: of its tokens; two prefixes are not equal for all that. computed: set by the engine once a
    forward pass wrote the blocks. Raises WrongPrefix.
    """

    def __init__(self, token_ids: Sequence[int], block_size: int) -> None:
        self.token_ids = tuple(token_ids)
        self.block_size = read_count("block_size", block_size, 1)
        self.length = len(self.token_ids)
        self.hash = hash(self.token_ids)
        if self.length % block_size:
            raise WrongPrefix(num_tokens=self.length, block_size=block_size)
        self.block_table: list[PhysicalTokenBlock] | None = None
        self.computed = False

    def __hash__(self) -> int:
        return self.hash

    def __repr__(self) -> str:
        blocks = None if self.block_table is None else self.get_block_numbers()
        return f"Prefix(length={self.length}, blocks={blocks}, computed={self.computed})"

    @property
    def allocated(self) -> bool:
        """Whether it has blocks."""
        return self.block_table is not None

    def get_num_blocks(self) -> int:
        """Blocks that its tokens fill."""
        return self.length // self.block_size

    def get_block_numbers(self) -> list[int]:
        """Numbers of its blocks, none before it is allocated."""
        return [block.block_number for block in self.block_table or ()]

    def get_length(self) -> int:
        """Its tokens."""
        return self.length

    def set_block_table(self, block_table: Iterable[PhysicalTokenBlock]) -> None:
        """Give it blocks: a manager calls this."""
        self.block_table = list(block_table)


class PrefixPool:
    """The prefixes of an engine: of equal tokens under one adapter there is one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = read_count("block_size", block_size, 1)
        self.prefixes: dict[tuple[tuple[int, ...], int], Prefix] = {}

    def add_or_get_prefix(self, token_ids: Sequence[int], lora_int_id: int = 0) -> Prefix | None:
        """The prefix of these tokens, cut to whole blocks; None if no block is full.

        lora_int_id: of the adapter under which they are computed, 0 without one; what was computed
        under another is none of its own.
        """
        length = len(token_ids) // self.block_size * self.block_size
        if not length:
            return None
        key = tuple(token_ids[:length]), lora_int_id
        if key not in self.prefixes:
            self.prefixes[key] = Prefix(key[0], self.block_size)
        return self.prefixes[key]
