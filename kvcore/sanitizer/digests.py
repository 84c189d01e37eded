# SPDX-License-Identifier: Apache-2.0
"""Digests of prefixes: a namespace plus the sum of one mixed word per token and position.

With sums, a chunk of a prompt or the batch of a decode step takes one pass over its tokens. A slot
keeps 48 bits: two different contents look equal once in 2^48 comparisons, which can hide a bug but
never invent one. This does not protect against tokens chosen to collide.

Twin: rust/src/sanitizer/digests.rs.
"""

from __future__ import annotations

from hashlib import blake2b

WORD = (1 << 64) - 1
NOTHING, UNKNOWN, ZEROS = 0, 1, 2
"""The digests of no content, of an unknown token, and of zeros."""
NUM_RESERVED = 3


def namespace_digest(namespace: tuple[object, ...]) -> int:
    """Return the initial digest of a prefix in this namespace."""
    if not any(namespace):
        return 0
    return int.from_bytes(blake2b(repr(namespace).encode(), digest_size=8).digest(), "little")


def mix(token: int, position: int) -> int:
    """Return the word that a token adds at a position (splitmix64 of both)."""
    word = ((position << 32 | token & 0xFFFFFFFF) + 0x9E3779B97F4A7C15) & WORD
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & WORD
    return word ^ word >> 31


def slot_digest(total: int, group_id: int) -> int:
    """Return the content of a group's slot for a prefix with this sum: 48 bits, not a reserved
    value.
    """
    digest = (total + mix(group_id, WORD >> 32) & WORD) >> 16
    return digest + NUM_RESERVED if digest < NUM_RESERVED else digest
