# SPDX-License-Identifier: Apache-2.0
"""The keys of blocks: the full key, the tail keys, under which their first tokens are found, and
hashes as an engine makes them that brings its own.

Twin: rust/src/check/world/keyed.rs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_letters, digits

from immutables import Map

from kvcore.pool.block_pool import BlockPool
from kvcore.state.state import RequestState
from kvcore.types.config import Config
from kvcore.types.keys import HASH_SIZE

OWN = ascii_letters + digits
"""The letters of hashes of an engine's own: a trace can write a hash of one letter."""
NO_TAILS: Mapping[bytes, tuple[int, ...]] = Map()


def tail_keys(pool: BlockPool, block: int) -> tuple[bytes, ...]:
    """Return the tail keys of a block, shortest first."""
    return () if pool.tails is None else pool.tails.keys(block)


def keys_of(pool: BlockPool, block: int) -> tuple[bytes, ...]:
    """Return all keys of a block, the tail keys first."""
    key = pool.keys[block]
    return tail_keys(pool, block) if key is None else (*tail_keys(pool, block), key)


def found_by_tails(pool: BlockPool) -> Mapping[bytes, tuple[int, ...]]:
    """Return the blocks of each tail key, the one that a look-up finds first."""
    return NO_TAILS if pool.tails is None else pool.tails.by_key


def own_tails(
    config: Config, request: RequestState, group_id: int, position: int, most: int
) -> list[bytes]:
    """Return the tail keys of a request's block at a position that end up to a token, shortest
    first.
    """
    size, step = config.groups[group_id].block_size, config.hash_block_size
    first = position * size
    last = min(most, first + size - step, len(request.block_hashes) * step)
    counts = range(first + step, last + 1, step) if config.has_tails else ()
    return [request.key_at(config, group_id, count) for count in counts]


def own_hash(tokens: Sequence[int], num_letters: int) -> bytes:
    """Return an engine's own hash of a block, by its prefix: one letter per prefix, of OWN.

    num_letters: different tokens. Raises IndexError for a longer prefix than there are letters for.
    """
    number = 0
    for token in tokens:
        number = number * num_letters + token + 1
    return OWN[number - 1].encode() * HASH_SIZE
