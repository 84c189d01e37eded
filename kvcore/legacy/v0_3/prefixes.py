# SPDX-License-Identifier: Apache-2.0
"""Prefixes that an engine declares for prompts to share, as in the first block manager.

A prefix consists of whole blocks. A manager gives it blocks; the engine sets `computed`. A pool has
one prefix per pair of tokens and adapter. Source: S003-12, 13, 26, 33.
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

    hash: the hash of its tokens; prefixes still compare by identity. computed: set by the engine
    once a forward pass has written the blocks. Raises WrongPrefix.
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
        """Whether a manager has given it blocks."""
        return self.block_table is not None

    def get_num_blocks(self) -> int:
        """Return the number of blocks that its tokens fill."""
        return self.length // self.block_size

    def get_block_numbers(self) -> list[int]:
        """Return its block numbers; empty before it is allocated."""
        return [block.block_number for block in self.block_table or ()]

    def get_length(self) -> int:
        """Return its number of tokens."""
        return self.length

    def set_block_table(self, block_table: Iterable[PhysicalTokenBlock]) -> None:
        """Set its blocks; called by a manager."""
        self.block_table = list(block_table)


class PrefixPool:
    """The prefixes of an engine, one per pair of tokens and adapter."""

    def __init__(self, block_size: int) -> None:
        self.block_size = read_count("block_size", block_size, 1)
        self.prefixes: dict[tuple[tuple[int, ...], int], Prefix] = {}

    def add_or_get_prefix(self, token_ids: Sequence[int], lora_int_id: int = 0) -> Prefix | None:
        """Return the prefix of these tokens, cut to whole blocks; None if no block is full.

        lora_int_id: the adapter that computes the tokens, 0 without one; adapters do not share
        prefixes.
        """
        length = len(token_ids) // self.block_size * self.block_size
        if not length:
            return None
        key = tuple(token_ids[:length]), lora_int_id
        if key not in self.prefixes:
            self.prefixes[key] = Prefix(key[0], self.block_size)
        return self.prefixes[key]
