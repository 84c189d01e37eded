# SPDX-License-Identifier: Apache-2.0
"""Keys of full blocks: a chain of SHA-256 over an unambiguous encoding.

Rules: a block's hash covers its parent's hash, its tokens and its tagged extra keys; the key under
which a block is found is that hash and the group, so two groups never share a block. The chain
grows with the request and no block is hashed twice. All integers are little-endian but the group,
which is big-endian as in the field. Twin: rust/src/hashing.rs.

    root       = SHA-256("kvcore root" 0x00 seed)
    block hash = SHA-256(parent[32] num_tokens[u32] token[u32]...
                         num_extra[u8] (tag[u8] size[u32] bytes)...)
    key        = block hash[32] group[u32]
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

HASH_SIZE = 32
KEY_SIZE = 36
MAX_EXTRA_KEYS = 255


def root_hash(seed: bytes) -> bytes:
    """The parent of each request's first block."""
    return hashlib.sha256(b"kvcore root\0" + seed).digest()


def hash_block(
    parent: bytes, tokens: Sequence[int], extra_keys: Sequence[tuple[int, bytes]] = ()
) -> bytes:
    """The hash of one full block.

    parent: hash of the block before, or the root. tokens: ids below 2**32. extra_keys: (tag, value)
    pairs, at most MAX_EXTRA_KEYS, in an order that is part of the key.
    """
    parts = [parent, struct.pack(f"<I{len(tokens)}I", len(tokens), *tokens)]
    parts.append(bytes([len(extra_keys)]))
    for tag, value in extra_keys:
        parts.append(struct.pack("<BI", tag, len(value)) + value)
    return hashlib.sha256(b"".join(parts)).digest()


def hash_blocks(parent: bytes, tokens: Sequence[int], block_size: int) -> Iterable[bytes]:
    """The hashes of the full blocks of these tokens, in order; a partial tail has none."""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = hash_block(parent, tokens[start : start + block_size])
        yield parent


def make_key(block_hash: bytes, group: int) -> bytes:
    """The key under which a block of this content and group is found."""
    return block_hash + group.to_bytes(4, "big")
