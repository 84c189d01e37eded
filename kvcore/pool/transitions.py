# SPDX-License-Identifier: Apache-2.0
"""The pool layer: transitions of one tier's blocks, for managers with requests of their own.

Invariants: arguments are checked first, so a call that raises or is refused leaves the pool as it
was. Keys are opaque bytes.
Source: S000-34, 35, 38, 41, S001-82, 83, S002-38. Twin: rust/src/pool/transitions.rs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvcore.pool.block_pool import BlockPool, PoolTransaction, make_pool
from kvcore.pool.priority_eviction import PriorityPoolTransaction, make_transaction
from kvcore.types.arguments import read_count, read_int, read_ints
from kvcore.types.config import NO_LIMIT
from kvcore.types.effects import Effects
from kvcore.types.errors import (
    AlreadyPublished,
    DoubleFree,
    InvalidConfig,
    InvalidKey,
    UnusedBlock,
    WrongArgument,
    WrongKey,
)
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome, Reason, Refused

__all__ = [
    "BlockPool",
    "admit",
    "clear_index",
    "lookup",
    "lookup_prefix",
    "make_pool",
    "pin",
    "publish",
    "publish_all",
    "release",
    "set_priority",
    "take",
    "touch",
    "unpin",
    "unpublish",
]

T = TypeVar("T")


def take(pool: BlockPool, count: int) -> Outcome[BlockPool, tuple[int, ...] | Refused]:
    """Take `count` blocks from the front of the free queue and give each one owner, or refuse.

    Raises InvalidCount.
    """
    count = read_count("count", count)
    if count > pool.num_free:
        reason = Reason.NEVER if count > pool.num_usable else Reason.LATER
        return Outcome(pool, (), Refused(reason, count, pool.num_free))
    return _change(pool, lambda tx: tuple(tx.take(count)))


def admit(
    pool: BlockPool, blocks: Sequence[int], count: int, keys: Sequence[bytes] | None = None
) -> Outcome[BlockPool, tuple[int, ...] | Refused]:
    """Touch blocks and take `count` others, or refuse both. Value: the taken blocks.

    keys: the expected key of each block; None: any. Raises WrongArgument, InvalidCount,
    InvalidKey, WrongKey, UnknownBlock, UnusedBlock.
    """
    count, ids = read_count("count", count), read_ints(blocks)
    if keys is not None:
        _check_keys(keys, len(ids))

    def change(tx: PoolTransaction) -> tuple[int, ...] | Refused:
        for position, key in enumerate(keys or ()):
            tx.check_block(ids[position])
            if tx.keys[ids[position]] != key:
                raise WrongKey(block=ids[position], position=position)
        tx.check_pins(ids)
        touched = set(ids)
        needed = count + sum(not tx.ref_counts[block] for block in touched)
        if needed > tx.num_free:
            never = count + len(touched) > tx.num_usable
            return Refused(Reason.NEVER if never else Reason.LATER, needed, tx.num_free)
        for block in ids:
            tx.touch(block)
        return tuple(tx.take(count))

    return _change(pool, change)


def touch(pool: BlockPool, blocks: Sequence[int]) -> Outcome[BlockPool, None]:
    """Add an owner to each block that has one, or has a key. Raises UnknownBlock, UnusedBlock."""
    ids = read_ints(blocks)

    def change(tx: PoolTransaction) -> None:
        tx.check_pins(ids)
        for block in ids:
            tx.touch(block)

    return _change(pool, change)


def release(pool: BlockPool, blocks: Sequence[int]) -> Outcome[BlockPool, None]:
    """Remove one owner from each block, in order. Raises UnknownBlock, DoubleFree (pins stay)."""
    ids = read_ints(blocks)

    def change(tx: PoolTransaction) -> None:
        for block, requested in tx.count_blocks(ids):
            owners = tx.ref_counts[block] - tx.pins.get(block, 0)
            if owners < requested:
                raise DoubleFree(block=block, ref_count=owners, requested=requested)
        tx.release(ids)

    return _change(pool, change)


def publish(pool: BlockPool, block: int, key: bytes) -> Outcome[BlockPool, None]:
    """Make a block with an owner findable.

    Raises InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    """
    _check_key(key)
    block = read_int(block)

    def change(tx: PoolTransaction) -> None:
        tx.check_block(block)
        if tx.keys[block] is not None:
            raise AlreadyPublished(block=block)
        if tx.ref_counts[block] == 0:
            raise UnusedBlock(block=block)
        tx.publish(block, key)

    return _change(pool, change)


def publish_all(
    pool: BlockPool, blocks: Sequence[int], keys: Sequence[bytes]
) -> Outcome[BlockPool, None]:
    """Make blocks with owners findable, each by its key, in order; all of them or none.

    Raises WrongArgument, InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    """
    ids = read_ints(blocks)
    _check_keys(keys, len(ids))

    def change(tx: PoolTransaction) -> None:
        seen: set[int] = set()
        for block in ids:
            tx.check_block(block)
            if tx.keys[block] is not None or block in seen:
                raise AlreadyPublished(block=block)
            if tx.ref_counts[block] == 0:
                raise UnusedBlock(block=block)
            seen.add(block)
        for block, key in zip(ids, keys, strict=True):
            tx.publish(block, key)

    return _change(pool, change)


def unpublish(pool: BlockPool, block: int) -> Outcome[BlockPool, None]:
    """Forget a block's key, if it has one. Raises UnknownBlock."""
    block = read_int(block)

    def change(tx: PoolTransaction) -> None:
        tx.check_block(block)
        tx.unpublish(block)

    return _change(pool, change)


def set_priority(
    pool: BlockPool,
    blocks: Sequence[int],
    time: float | None = None,
    length: int | None = None,
) -> Outcome[BlockPool, None]:
    """Set the access time of blocks and the tokens of their chain; None keeps the old value.

    Raises WrongArgument, UnknownBlock, and InvalidConfig unless the policy is "priority".
    """
    when, tokens = _read_time(time), _read_length(length)
    ids = read_ints(blocks)

    def change(tx: PoolTransaction) -> None:
        if not isinstance(tx, PriorityPoolTransaction):
            reason = "blocks have priorities only under 'priority'"
            raise InvalidConfig(field="eviction", value=tx.eviction, reason=reason)
        for block in ids:
            tx.check_block(block)
        tx.set_priority(ids, when, tokens)

    return _change(pool, change)


def clear_index(pool: BlockPool) -> Outcome[BlockPool, None]:
    """Forget every key."""
    return _change(pool, lambda tx: tx.clear_index())


def lookup(pool: BlockPool, key: bytes) -> int | None:
    """Return the block that holds a key's content. Does not modify the pool. Raises InvalidKey."""
    _check_key(key)
    return pool.index.firsts.get(key)


def lookup_prefix(pool: BlockPool, keys: Sequence[bytes]) -> tuple[int, ...]:
    """Return the blocks that hold the keys' contents, up to the first key without one.

    Does not modify the pool. Raises InvalidKey.
    """
    for key in keys:
        _check_key(key)
    found: list[int] = []
    for key in keys:
        block = pool.index.firsts.get(key)
        if block is None:
            break
        found.append(block)
    return tuple(found)


def pin(pool: BlockPool, blocks: Sequence[int]) -> Outcome[BlockPool, None]:
    """Hold blocks that have an owner or a key. Raises UnknownBlock, UnusedBlock."""
    ids = read_ints(blocks)

    def change(tx: PoolTransaction) -> None:
        tx.check_pins(ids)
        for block in ids:
            tx.pin(block)

    return _change(pool, change)


def unpin(pool: BlockPool, blocks: Sequence[int]) -> Outcome[BlockPool, None]:
    """Undo `pin`. Raises UnknownBlock, NotPinned."""
    ids = read_ints(blocks)

    def change(tx: PoolTransaction) -> None:
        tx.check_unpins(ids, {})
        for block in ids:
            tx.unpin(block)

    return _change(pool, change)


def _change(pool: BlockPool, change: Callable[[PoolTransaction], T]) -> Outcome[BlockPool, T]:
    effects = Effects()
    tx = make_transaction(pool, effects)
    value = change(tx)
    return Outcome(tx.freeze(), tuple(effects.commands), value)


def _read_time(time: Any) -> float | None:
    if time is None:
        return None
    try:
        finite = math.isfinite(time)
    except (TypeError, ValueError, OverflowError):
        finite = False
    if not finite:
        raise WrongArgument(name="time", expected="a finite number", value=time)
    return float(time)


def _read_length(length: Any) -> int | None:
    if length is None:
        return None
    number = read_int(length)
    if not isinstance(number, int) or not 0 <= number <= NO_LIMIT:
        expected = f"an integer from 0 to {NO_LIMIT}"
        raise WrongArgument(name="length", expected=expected, value=length)
    return number


def _check_key(key: bytes) -> None:
    if len(key) != KEY_SIZE:
        raise InvalidKey(size=len(key), expected=KEY_SIZE)


def _check_keys(keys: Sequence[bytes], num_blocks: int) -> None:
    """Raise WrongArgument or InvalidKey unless there is one key per block."""
    if len(keys) != num_blocks:
        expected = f"{num_blocks} keys, one per block"
        raise WrongArgument(name="keys", expected=expected, value=len(keys))
    for key in keys:
        _check_key(key)
