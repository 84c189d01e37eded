# SPDX-License-Identifier: Apache-2.0
"""Tiers by contents: the blocks of several keys at once, found or new, and what several have.

Rules: as those of `tiers.py`, which these functions go on. Keys are asked for one behind the other:
what a free block holds may be evicted for one before it, and is new then. Source: S002-08, 10, 11,
13, 42. Twin: rust/src/legacy/blocks/by_key.rs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace as evolve

from kvcore.legacy.blocks.tiers import Tiers
from kvcore.pool.block_pool import BlockPool, PoolTransaction
from kvcore.pool.priority_eviction import NEVER, NO_RANK, PriorityPoolTransaction, make_transaction
from kvcore.types.arguments import read_ints
from kvcore.types.commands import Command, SwapIn, SwapOut, Tier
from kvcore.types.config import NO_LIMIT
from kvcore.types.effects import Effects
from kvcore.types.errors import InvalidKey, WrongArgument
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome, Reason, Refused

Placed = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A block for each key; those of them that are new; those that were found without an owner."""


def find_or_take(
    tiers: Tiers, keys: Sequence[bytes | None], lengths: Sequence[int], tier: Tier = "device"
) -> Outcome[Tiers, Placed | Refused]:
    """Give the block of each key an owner more: the one that answers for it, or a new one, which
    does so from now on; for None a new one without key. Refused as a whole.

    lengths: tokens of the chain that ends in each block, where blocks are ranked. A block that is
    found without owner has no time then, as a new one. Raises InvalidKey, WrongArgument.
    """
    return tiers.run(tier, lambda pool: _place(pool, keys, lengths))


def copy_pairs(
    tiers: Tiers, blocks: Sequence[int], host_blocks: Sequence[int], to: Tier
) -> Outcome[Tiers, None]:
    """Copy device blocks to host blocks, or back, pair by pair, all or none; owners stay.

    to: the tier of the targets. Raises WrongArgument, NoHostTier, UnknownBlock, NoOwner.
    """
    tiers.pool(to)
    ids, host_ids = read_ints(blocks), read_ints(host_blocks)
    if len(ids) != len(host_ids):
        expected = f"a host block for each of {len(ids)} blocks"
        raise WrongArgument(name="host_blocks", expected=expected, value=repr(len(host_ids)))
    pairs = [tiers.held_pair(*pair) for pair in zip(ids, host_ids, strict=True)]
    copies: list[Command]
    if to == "host":
        copies = [SwapOut(block, host_block) for block, host_block in pairs]
    else:
        copies = [SwapIn(host_block, block) for block, host_block in pairs]
    changed = evolve(tiers, commands=tiers.commands.extend(copies)) if copies else tiers
    return Outcome(changed, tuple(copies), None)


def owners_of(tiers: Tiers, keys: Sequence[bytes], tier: Tier = "device") -> tuple[int | None, ...]:
    """How many own the block that answers for each key; None where none answers.

    Does not modify the tiers. Raises InvalidKey.
    """
    pool = tiers.pool(tier)
    _check_keys(keys)
    return _owners(pool, keys)


def ref_counts(tiers: Tiers, blocks: Sequence[int], tier: Tier = "device") -> tuple[int, ...]:
    """Owners of each block. Does not modify the tiers. Raises UnknownBlock."""
    counts, ids = tiers.pool(tier).ref_counts, read_ints(blocks)
    return tuple(counts[tiers.known(block, tier)] for block in ids)


def rank_of(tiers: Tiers, block: int, tier: Tier = "device") -> tuple[float, int]:
    """When a block was last used, and how many tokens its chain has, as was said.

    Does not modify the tiers. Raises UnknownBlock.
    """
    pool, known = tiers.pool(tier), tiers.known(block, tier)
    return pool.ranks.get(known, NO_RANK)


def _place(
    pool: BlockPool, keys: Sequence[bytes | None], lengths: Sequence[int]
) -> Outcome[BlockPool, Placed | Refused]:
    _check_keys(keys)
    tokens = _read_lengths(lengths, len(keys))
    needed = _count_needed(pool, keys)
    if needed > pool.num_free:
        reason = Reason.NEVER if needed > pool.num_usable else Reason.LATER
        return Outcome(pool, (), Refused(reason, needed, pool.num_free))
    effects = Effects()
    tx = make_transaction(pool, effects)
    blocks: list[int] = []
    taken: list[int] = []
    revived: list[int] = []
    for key, length in zip(keys, tokens, strict=True):
        block = None if key is None else tx.index.first(key)
        if block is None:
            block = _take_for(tx, key, length)
            taken.append(block)
        else:
            if not tx.ref_counts[block]:
                revived.append(block)
                if isinstance(tx, PriorityPoolTransaction):
                    tx.note(block, NEVER, None)
            tx.touch(block)
        blocks.append(block)
    value = (tuple(blocks), tuple(taken), tuple(revived))
    return Outcome(tx.freeze(), tuple(effects.commands), value)


def _take_for(tx: PoolTransaction, key: bytes | None, length: int) -> int:
    (block,) = tx.take(1)
    if key is not None:
        tx.publish(block, key)
        if isinstance(tx, PriorityPoolTransaction):
            tx.note(block, None, length)
    return block


def _owners(pool: BlockPool, keys: Sequence[bytes]) -> tuple[int | None, ...]:
    found = map(pool.index.firsts.get, keys)
    return tuple(None if block is None else pool.ref_counts[block] for block in found)


def _count_needed(pool: BlockPool, keys: Sequence[bytes | None]) -> int:
    """Blocks that leave the free ones: each content that nobody owns takes one."""
    distinct = {key for key in keys if key is not None}
    idle = sum(not owners for owners in _owners(pool, list(distinct)))
    return idle + sum(key is None for key in keys)


def _check_keys(keys: Sequence[bytes | None]) -> None:
    for key in keys:
        if key is not None and len(key) != KEY_SIZE:
            raise InvalidKey(size=len(key), expected=KEY_SIZE)


def _read_lengths(lengths: Sequence[Any], count: int) -> list[int]:
    given = list(lengths)
    if len(given) != count:
        expected = f"a length for each of {count} keys"
        raise WrongArgument(name="lengths", expected=expected, value=repr(len(given)))
    read = read_ints(given)
    for length, number in zip(given, read, strict=True):
        if not isinstance(number, int) or not 0 <= number <= NO_LIMIT:
            expected = f"integers from 0 to {NO_LIMIT}"
            raise WrongArgument(name="lengths", expected=expected, value=repr(length))
    return read
