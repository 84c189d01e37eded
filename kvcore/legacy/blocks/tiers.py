# SPDX-License-Identifier: Apache-2.0
"""One or two tiers of blocks and an open batch: all that a manager of sequences needs.

The transitions are those of `kvcore.pool.transitions` for one tier, and copies of a block inside
the device and between the tiers. Their commands gather in the open batch, which holds only the
copies of the host tier. Ids count from 0 in each tier. Errors about a host block name its tier.

Invariants: a call that raises or is refused changes nothing. Source: S002-33, 34, 50, 65,
S003-20, 21, 26, 28. Twin: rust/src/legacy/blocks/tiers.rs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, get_args

import attrs
from pyrsistent import PVector, pvector

from kvcore.pool import transitions
from kvcore.pool.block_pool import BlockPool, PoolEviction, PoolTransaction, make_pool
from kvcore.pool.priority_eviction import make_transaction
from kvcore.types.arguments import read_int, read_ints
from kvcore.types.commands import Batch, Command, CopyOnWrite, SwapIn, SwapOut, Tier, close
from kvcore.types.config import MAX_BLOCKS
from kvcore.types.effects import Effects
from kvcore.types.errors import InvalidConfig, KvcoreError, NoHostTier, NoOwner, WrongArgument
from kvcore.types.memory import check_memory
from kvcore.types.values import Outcome, Reason, Refused

Order = Literal["ascending", "descending"]
T = TypeVar("T")


@attrs.frozen
class Tiers:
    """The blocks of the device and the host (None without a host tier), and the open batch."""

    device: BlockPool
    host: BlockPool | None
    number: int = 0
    commands: PVector[Command] = attrs.field(factory=pvector)

    def pool(self, tier: Tier) -> BlockPool:
        """Return the blocks of one tier. Raises NoHostTier, WrongArgument."""
        if tier == "device":
            return self.device
        if tier != "host":
            raise WrongArgument(name="tier", expected="'device' or 'host'", value=tier)
        if self.host is None:
            raise NoHostTier
        return self.host

    def run(
        self, tier: Tier, transition: Callable[[BlockPool], Outcome[BlockPool, T]]
    ) -> Outcome[Tiers, T]:
        """Apply a transition of the pool layer to one tier."""
        pool = self.pool(tier)
        try:
            outcome = transition(pool)
        except KvcoreError as error:
            raise _in_tier(error, tier) from None
        if tier == "device":
            changed = self if outcome.state is pool else attrs.evolve(self, device=outcome.state)
            return _emit(changed, outcome.commands, outcome.value)
        changed = self if outcome.state is pool else attrs.evolve(self, host=outcome.state)
        return Outcome(changed, (), outcome.value)

    def known(self, block: Any, tier: Tier) -> int:
        """Return a block number as a plain int. Raises UnknownBlock."""
        number = read_int(block)
        try:
            PoolTransaction(self.pool(tier), Effects()).check_block(number)
        except KvcoreError as error:
            raise _in_tier(error, tier) from None
        return int(number)

    def held_pair(self, block: Any, host_block: Any) -> tuple[int, int]:
        """Return a device block and a host block as ints, after checking that both have owners.

        Raises NoHostTier, UnknownBlock, NoOwner.
        """
        host = self.pool("host")
        on_device = _held(PoolTransaction(self.device, Effects()), block)
        try:
            return on_device, _held(PoolTransaction(host, Effects()), host_block)
        except KvcoreError as error:
            raise _in_tier(error, "host") from None


def make_tiers(
    num_blocks: int,
    num_host_blocks: int = 0,
    *,
    null_block: bool = False,
    eviction: PoolEviction = "lru",
    order: Order = "ascending",
) -> Tiers:
    """Make empty tiers that share one eviction policy and one order of first use.

    null_block: reserve device block 0 as the null block, which is never taken. Raises
    InvalidConfig, PoolTooLarge.
    """
    num_blocks, num_host_blocks = check_options(
        num_blocks, num_host_blocks, null_block, eviction, order
    )
    check_memory(num_blocks + num_host_blocks)
    step = 1 if order == "ascending" else -1

    def pool(size: int, *, null_block: bool) -> BlockPool:
        ids = range(int(null_block), size)[::step]
        return make_pool(size, null_block=null_block, eviction=eviction, order=ids)

    host = pool(num_host_blocks, null_block=False) if num_host_blocks else None
    return Tiers(pool(num_blocks, null_block=null_block), host)


def check_options(
    num_blocks: Any, num_host_blocks: Any, null_block: Any, eviction: Any, order: Any
) -> tuple[int, int]:
    """Return both sizes as ints. Raises InvalidConfig if an option is not valid."""
    choices: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "eviction": (eviction, get_args(PoolEviction)),
        "order": (order, get_args(Order)),
    }
    for name, (value, known) in choices.items():
        if not isinstance(value, str) or value not in known:
            _refuse(name, value, f"must be one of {', '.join(known)}")
    if not isinstance(null_block, bool):
        _refuse("null_block", null_block, "must be True or False")
    return (
        _read_size("num_blocks", num_blocks, least=int(null_block)),
        _read_size("num_host_blocks", num_host_blocks, least=0),
    )


def take(
    tiers: Tiers, count: int, tier: Tier = "device"
) -> Outcome[Tiers, tuple[int, ...] | Refused]:
    """Give `count` free blocks one owner each; refused as a whole. Raises InvalidCount."""
    return tiers.run(tier, lambda pool: transitions.take(pool, count))


def admit(
    tiers: Tiers,
    blocks: Sequence[int],
    count: int,
    keys: Sequence[bytes] | None = None,
    tier: Tier = "device",
) -> Outcome[Tiers, tuple[int, ...] | Refused]:
    """Touch blocks and take `count` others; refused as a whole; value: the blocks taken.

    keys: the key that each block must have; None: not compared. Raises WrongArgument, InvalidCount,
    InvalidKey, WrongKey, UnknownBlock, UnusedBlock.
    """
    return tiers.run(tier, lambda pool: transitions.admit(pool, blocks, count, keys))


def touch(tiers: Tiers, blocks: Sequence[int], tier: Tier = "device") -> Outcome[Tiers, None]:
    """Add an owner to each block; it must have one, or a key. Raises UnknownBlock, UnusedBlock."""
    return tiers.run(tier, lambda pool: transitions.touch(pool, blocks))


def release(tiers: Tiers, blocks: Sequence[int], tier: Tier = "device") -> Outcome[Tiers, None]:
    """Take one owner from each block, in order. Raises UnknownBlock, DoubleFree."""
    return tiers.run(tier, lambda pool: transitions.release(pool, blocks))


def publish(tiers: Tiers, block: int, key: bytes, tier: Tier = "device") -> Outcome[Tiers, None]:
    """Publish a block that has an owner under a key.

    Raises InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    """
    return tiers.run(tier, lambda pool: transitions.publish(pool, block, key))


def publish_all(
    tiers: Tiers, blocks: Sequence[int], keys: Sequence[bytes], tier: Tier = "device"
) -> Outcome[Tiers, None]:
    """Publish blocks that have owners, each under its key, in order; all of them or none.

    Raises WrongArgument, InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
    """
    return tiers.run(tier, lambda pool: transitions.publish_all(pool, blocks, keys))


def unpublish(tiers: Tiers, block: int, tier: Tier = "device") -> Outcome[Tiers, None]:
    """Forget a block's key, if it has one. Raises UnknownBlock."""
    return tiers.run(tier, lambda pool: transitions.unpublish(pool, block))


def set_priority(
    tiers: Tiers,
    blocks: Sequence[int],
    time: float | None = None,
    length: int | None = None,
    tier: Tier = "device",
) -> Outcome[Tiers, None]:
    """Set the access time of blocks and the length of their chain in tokens; None keeps a value.

    Raises WrongArgument, UnknownBlock, and InvalidConfig unless eviction is "priority".
    """
    return tiers.run(tier, lambda pool: transitions.set_priority(pool, blocks, time, length))


def clear_index(tiers: Tiers, tier: Tier = "device") -> Outcome[Tiers, None]:
    """Forget every key."""
    return tiers.run(tier, transitions.clear_index)


def copy(tiers: Tiers, block: int) -> Outcome[Tiers, int | Refused]:
    """Copy a device block and move one of its owners to the copy; value: the copy.

    The copy is taken before the owner leaves. Raises UnknownBlock, NoOwner.
    """
    effects = Effects()
    tx = make_transaction(tiers.device, effects)
    source = _held(tx, block)
    if not tx.num_free:
        return Outcome(tiers, (), Refused(Reason.LATER, 1, 0))
    (fresh,) = tx.take(1)
    effects.commands.append(CopyOnWrite(source, fresh))
    tx.release([source])
    return _emit(attrs.evolve(tiers, device=tx.freeze()), effects.commands, fresh)


def copy_out(tiers: Tiers, block: int, host_block: int) -> Outcome[Tiers, None]:
    """Copy a device block to a host block; both must have owners, and keep them.

    Raises NoHostTier, UnknownBlock, NoOwner.
    """
    source, target = tiers.held_pair(block, host_block)
    return _emit(tiers, [SwapOut(source, target)], None)


def copy_in(tiers: Tiers, host_block: int, block: int) -> Outcome[Tiers, None]:
    """Copy a host block to a device block; both must have owners, and keep them.

    Raises NoHostTier, UnknownBlock, NoOwner.
    """
    target, source = tiers.held_pair(block, host_block)
    return _emit(tiers, [SwapIn(source, target)], None)


def lookup(tiers: Tiers, key: bytes, tier: Tier = "device") -> int | None:
    """Return the block that answers for a key, or None. Does not modify the tiers.

    Raises InvalidKey.
    """
    return transitions.lookup(tiers.pool(tier), key)


def lookup_prefix(tiers: Tiers, keys: Sequence[bytes], tier: Tier = "device") -> tuple[int, ...]:
    """Return the blocks that hold the keys' contents, up to the first key without one.

    Does not modify the tiers. Raises InvalidKey.
    """
    return transitions.lookup_prefix(tiers.pool(tier), keys)


def num_free(tiers: Tiers, tier: Tier = "device") -> int:
    """Return the number of blocks in the free queue. Does not modify the tiers."""
    return tiers.pool(tier).num_free


def ref_count(tiers: Tiers, block: int, tier: Tier = "device") -> int:
    """Return the owner count of a block. Does not modify the tiers. Raises UnknownBlock."""
    return tiers.pool(tier).ref_counts[tiers.known(block, tier)]


def ref_counts(tiers: Tiers, blocks: Sequence[int], tier: Tier = "device") -> tuple[int, ...]:
    """Return the owner count of each block. Does not modify the tiers. Raises UnknownBlock."""
    counts, ids = tiers.pool(tier).ref_counts, read_ints(blocks)
    return tuple(counts[tiers.known(block, tier)] for block in ids)


def key_of(tiers: Tiers, block: int, tier: Tier = "device") -> bytes | None:
    """Return the key of a block. Does not modify the tiers. Raises UnknownBlock."""
    return tiers.pool(tier).keys[tiers.known(block, tier)]


def free_blocks(tiers: Tiers, tier: Tier = "device") -> tuple[int, ...]:
    """Return the free queue, front first. Does not modify the tiers. Cost: O(free blocks)."""
    return tuple(tiers.pool(tier).queue)


def take_batch(tiers: Tiers) -> Outcome[Tiers, Batch]:
    """Close and number the open batch; value: its commands."""
    taken = close(tiers.number, tiers.commands)
    return Outcome(attrs.evolve(tiers, number=tiers.number + 1, commands=pvector()), (), taken)


def _emit(tiers: Tiers, commands: Sequence[Command], value: T) -> Outcome[Tiers, T]:
    if commands:
        tiers = attrs.evolve(tiers, commands=tiers.commands.extend(commands))
    return Outcome(tiers, tuple(commands), value)


def _in_tier(error: KvcoreError, tier: Tier) -> KvcoreError:
    """Return the error with the tier added, if it names a host block."""
    if tier == "device" or "block" not in error.fields:
        return error
    return type(error)(**error.fields, tier=tier)


def _held(tx: PoolTransaction, block: Any) -> int:
    number = read_int(block)
    tx.check_block(number)
    if tx.ref_counts[number] == 0:
        raise NoOwner(block=number)
    return int(number)


def _read_size(name: str, value: Any, least: int) -> int:
    number = read_int(value)
    if not isinstance(number, int) or not least <= number <= MAX_BLOCKS:
        _refuse(name, value, f"must be an integer from {least} to {MAX_BLOCKS}")
    return int(number)


def _refuse(name: str, value: Any, reason: str) -> NoReturn:
    raise InvalidConfig(field=name, value=value, reason=reason)
