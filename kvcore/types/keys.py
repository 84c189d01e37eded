# SPDX-License-Identifier: Apache-2.0
"""Keys of blocks as values: the sizes and forms of hashes and keys, and the names of the hashings.

A key is a block's hash and its group. `kvcore/hashing/block_hash.py` makes the hashes. Twin:
rust/src/types/keys.rs.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

Hashing = Literal["sha256", "sha256_cbor", "xxh3"]

HASHINGS: tuple[Hashing, ...] = get_args(Hashing)
HASH_SIZE = 32
KEY_SIZE = 36
MAX_GROUPS = 64
GROUP_BYTES = tuple(group.to_bytes(4, "big") for group in range(MAX_GROUPS))
"""What stands behind the hash in the keys of each group."""


_UINT64 = 2**64
_SPREAD = 0x9E3779B97F4A7C15  # odd: the golden ratio's


def make_key(block_hash: bytes, group_id: int) -> bytes:
    """The key under which a block of this content and group is found."""
    return block_hash + group_id.to_bytes(4, "big")


def external_hash(block_hash: bytes) -> int:
    """The 64-bit form in which events name a hash: the low bits of the big-endian integer."""
    return int.from_bytes(block_hash, "big") % _UINT64


def fold_key(key: bytes) -> int:
    """A key in 8 bytes, spread evenly also where hashes are not: equal keys have equal ones."""
    folded = int.from_bytes(key[HASH_SIZE:], "big")
    for word in struct.unpack("<4Q", key[:HASH_SIZE]):
        folded = folded * _SPREAD % _UINT64 ^ word
    folded = folded * _SPREAD % _UINT64
    return folded ^ folded >> 32
