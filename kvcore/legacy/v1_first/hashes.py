# SPDX-License-Identifier: Apache-2.0
"""Content hashes as the first manager with prefix caching computes them.

A hash is a pair of a number and the block's tokens, and the pair is the key. It covers the whole
hash of the previous block, or None for the first block. The number is Python's `hash`, so it is
valid within one process. Blocks are found by the core's hashes, which take token ids from 0 to
2**32 - 1; for other ids, such as the -1 that stands for an image, this module makes the hash.
Source: S004-09, 13; X-12.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvcore.hashing.block_hash import hash_block
from kvcore.types.arguments import read_count
from kvcore.types.tokens import MAX_TOKEN

BlockHashType: TypeAlias = tuple[int, tuple[int, ...]]


def hash_block_tokens(
    parent_block_hash: BlockHashType | None, curr_block_token_ids: Sequence[int]
) -> BlockHashType:
    """Return the hash of one full block. parent_block_hash: None for the first block."""
    tokens = tuple(curr_block_token_ids)
    return hash((parent_block_hash, *tokens)), tokens


def hash_request_tokens(block_size: int, token_ids: Sequence[int]) -> list[BlockHashType]:
    """Return the hashes of the full blocks of these tokens. Raises InvalidCount."""
    size = read_count("block_size", block_size, 1)
    hashes: list[BlockHashType] = []
    parent: BlockHashType | None = None
    for start in range(0, len(token_ids) - size + 1, size):
        parent = hash_block_tokens(parent, token_ids[start : start + size])
        hashes.append(parent)
    return hashes


def hash_any_blocks(parent: bytes, tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the core's hashes of full blocks after a parent, for tokens that may be any ints."""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        own = [int(token) for token in tokens[start : start + block_size]]
        if min(own) >= 0 and max(own) <= MAX_TOKEN:
            parent = hash_block(parent, own)
        else:
            parent = hashlib.sha256(b"any" + parent + repr(own).encode()).digest()
        yield parent
