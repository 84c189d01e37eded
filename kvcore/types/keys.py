# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks as values: the sizes and forms of hashes and keys, and the names of the hashings.

A key is a block's hash and its group. `kvcore/hashing/block_hash.py` makes the hashes. Twin:
rust/src/types/keys.rs.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

Hashing = Literal["sha256", "sha256_cbor", "xxh3", "siphash"]

HASHINGS: tuple[Hashing, ...] = get_args(Hashing)
ONE_WAY: tuple[Hashing, ...] = ("sha256", "sha256_cbor")
"""Those whose hashes may leave the process: nobody finds tokens from them, or two that collide."""
HASH_SIZE = 32
KEY_SIZE = 36
MAX_GROUPS = 64
GROUP_BYTES = tuple(group.to_bytes(4, "big") for group in range(MAX_GROUPS))
"""The suffix of the keys of each group, after the hash."""


_UINT64 = 2**64
_SPREAD = 0x9E3779B97F4A7C15  # odd, from the golden ratio


def make_key(block_hash: bytes, group_id: int) -> bytes:
    """Return the key of a block of this content and group."""
    return block_hash + group_id.to_bytes(4, "big")


def external_hash(block_hash: bytes) -> int:
    """Return the 64-bit form of a hash in events: the low bits of the big-endian integer."""
    return int.from_bytes(block_hash, "big") % _UINT64


def fold_key(key: bytes) -> int:
    """Fold a key into 8 bytes, evenly spread even if the hashes are not. Equal keys give equal
    results.
    """
    folded = int.from_bytes(key[HASH_SIZE:], "big")
    for word in struct.unpack("<4Q", key[:HASH_SIZE]):
        folded = folded * _SPREAD % _UINT64 ^ word
    folded = folded * _SPREAD % _UINT64
    return folded ^ folded >> 32
