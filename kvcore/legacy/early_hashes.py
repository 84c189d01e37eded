# SPDX-License-Identifier: Apache-2.0
"""Content hashes as the first manager with prefix caching makes them.

Rules: a hash is a number and the block's tokens, and both are the key; the chain goes by the hash
before as a whole, None before the first block. The number is Python's `hash`, so it holds within a
process. Source: S004-09, 13; X-12. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvcore.arguments import read_count

BlockHashType: TypeAlias = tuple[int, tuple[int, ...]]


def hash_block_tokens(
    parent_block_hash: BlockHashType | None, curr_block_token_ids: Sequence[int]
) -> BlockHashType:
    """The hash of one full block. parent_block_hash: None where it is the first."""
    tokens = tuple(curr_block_token_ids)
    return hash((parent_block_hash, *tokens)), tokens


def hash_request_tokens(block_size: int, token_ids: Sequence[int]) -> list[BlockHashType]:
    """The hashes of the full blocks of these tokens. Raises InvalidCount."""
    size = read_count("block_size", block_size, 1)
    hashes: list[BlockHashType] = []
    parent: BlockHashType | None = None
    for start in range(0, len(token_ids) - size + 1, size):
        parent = hash_block_tokens(parent, token_ids[start : start + size])
        hashes.append(parent)
    return hashes
