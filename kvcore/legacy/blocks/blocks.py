# SPDX-License-Identifier: Apache-2.0
"""The blocks behind a facade: the transitions of `kvcore.legacy.blocks.tiers`, over either backend.

Rules: methods are those transitions without the state, which is held here; a facade asks nothing
else of the core. They raise typed errors and leave all as it was; a refusal is a value. Over the
twin a Python call around a transition takes as long as the transition: what is called for each
token asks `blocks` itself, with all arguments. `state` gives the same value from both backends, for
tests and for `check` (`check.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from kvcore import _twin
from kvcore.legacy.blocks import by_table, tiers
from kvcore.legacy.blocks.check import check_tiers
from kvcore.legacy.blocks.from_twin import from_columns
from kvcore.legacy.blocks.tiers import Order, Tiers, check_options, make_tiers
from kvcore.pool.block_pool import PoolEviction
from kvcore.types.commands import Batch, Tier
from kvcore.types.errors import BackendMissing
from kvcore.types.values import Outcome, Refused

MODULES = (tiers, by_table)
"""Where the transitions of the Python core are."""
BackendName = Literal["python", "rust"]


class Backing:
    """Blocks of one or two tiers and an open batch, changed by each call.

    blocks: the same transitions as the backend has them, of either language.
    """

    __slots__ = ("_eviction", "_first_block", "blocks")

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int = 0,
        *,
        null_block: bool = False,
        eviction: PoolEviction = "lru",
        order: Order = "ascending",
        backend: BackendName = "python",
    ) -> None:
        """Raises InvalidConfig, BackendMissing."""
        options: Any = {"null_block": null_block, "eviction": eviction, "order": order}
        self.blocks: _twin.Blocks = _make(backend, (num_blocks, num_host_blocks), options)
        self._first_block = int(null_block)
        self._eviction = eviction

    def take(self, count: int, tier: Tier = "device") -> tuple[int, ...] | Refused:
        """Give so many free blocks one owner each; refused as a whole. Raises InvalidCount."""
        return self.blocks.take(count, tier)

    def admit(
        self,
        blocks: Sequence[int],
        count: int,
        keys: Sequence[bytes] | None = None,
        tier: Tier = "device",
    ) -> tuple[int, ...] | Refused:
        """Touch blocks and take so many others; refused as a whole.

        keys: which the blocks are to have, one each; None: any. Raises WrongArgument, InvalidCount,
        InvalidKey, WrongKey, UnknownBlock, UnusedBlock.
        """
        return self.blocks.admit(blocks, count, keys, tier)

    def touch(self, blocks: Sequence[int], tier: Tier = "device") -> None:
        """Add an owner to each block that has one, or has a key.

        Raises UnknownBlock, UnusedBlock.
        """
        self.blocks.touch(blocks, tier)

    def release(self, blocks: Sequence[int], tier: Tier = "device") -> None:
        """Take one owner from each block, in order. Raises UnknownBlock, DoubleFree."""
        self.blocks.release(blocks, tier)

    def publish(self, block: int, key: bytes, tier: Tier = "device") -> None:
        """Make a block with an owner findable.

        Raises InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
        """
        self.blocks.publish(block, key, tier)

    def publish_all(
        self, blocks: Sequence[int], keys: Sequence[bytes], tier: Tier = "device"
    ) -> None:
        """Make blocks with owners findable, in order, by a key each; all of them or none.

        Raises WrongArgument, InvalidKey, UnknownBlock, UnusedBlock, AlreadyPublished.
        """
        self.blocks.publish_all(blocks, keys, tier)

    def unpublish(self, block: int, tier: Tier = "device") -> None:
        """Forget a block's key, if it has one. Raises UnknownBlock."""
        self.blocks.unpublish(block, tier)

    def rank(
        self,
        blocks: Sequence[int],
        time: float | None = None,
        length: int | None = None,
        tier: Tier = "device",
    ) -> None:
        """Say when blocks were used, and how many tokens their chain has; None changes nothing.

        Raises WrongArgument, UnknownBlock, and InvalidConfig unless eviction is "ranked".
        """
        self.blocks.rank(blocks, time, length, tier)

    def clear_index(self, tier: Tier = "device") -> None:
        """Forget every key."""
        self.blocks.clear_index(tier)

    def copy(self, block: int) -> int | Refused:
        """Copy a device block for one of its owners, which moves to the copy that is returned.

        Raises UnknownBlock, NoOwner.
        """
        return self.blocks.copy(block)

    def append(self, blocks: Sequence[int], num_blocks: int) -> int | Refused | None:
        """Let the owner of device blocks write behind what is in them, in so many blocks.

        Gives None where that is the last block as it is, else a new block to stand behind it where
        they were fewer, or a copy to stand in its place. Raises InvalidCount, UnknownBlock,
        NoOwner.
        """
        return self.blocks.append(blocks, num_blocks)

    def own(self, block: int) -> int | Refused:
        """Let one of a device block's owners write; gives where: there, or to a copy of its own.

        Raises UnknownBlock, NoOwner.
        """
        return self.blocks.own(block)

    def copy_out(self, block: int, host_block: int) -> None:
        """Copy a device block to a host block. Raises NoHostTier, UnknownBlock, NoOwner."""
        self.blocks.copy_out(block, host_block)

    def copy_in(self, host_block: int, block: int) -> None:
        """Copy a host block to a device block. Raises NoHostTier, UnknownBlock, NoOwner."""
        self.blocks.copy_in(host_block, block)

    def move_out(self, blocks: Sequence[int]) -> dict[int, int] | Refused:
        """Move one owner of each device block to the host; gives each with its copy, or a refusal.

        Raises NoHostTier, UnknownBlock, DoubleFree.
        """
        return self.blocks.move_out(blocks)

    def move_in(self, host_blocks: Sequence[int]) -> dict[int, int] | Refused:
        """Move one owner of each host block to the device; gives each with its copy, or a refusal.

        Raises NoHostTier, UnknownBlock, DoubleFree.
        """
        return self.blocks.move_in(host_blocks)

    def lookup(self, key: bytes, tier: Tier = "device") -> int | None:
        """The block that answers for a key. Raises InvalidKey."""
        return self.blocks.lookup(key, tier)

    def lookup_prefix(self, keys: Sequence[bytes], tier: Tier = "device") -> tuple[int, ...]:
        """The blocks that answer for keys, up to the first without one. Raises InvalidKey."""
        return self.blocks.lookup_prefix(keys, tier)

    def ref_counts(self, blocks: Sequence[int], tier: Tier = "device") -> tuple[int, ...]:
        """Owners of each block. Raises UnknownBlock."""
        return self.blocks.ref_counts(blocks, tier)

    def num_free(self, tier: Tier = "device") -> int:
        """Blocks in the free queue."""
        return self.blocks.num_free(tier)

    def ref_count(self, block: int, tier: Tier = "device") -> int:
        """Owners of a block. Raises UnknownBlock."""
        return self.blocks.ref_count(block, tier)

    def key_of(self, block: int, tier: Tier = "device") -> bytes | None:
        """The key of a block. Raises UnknownBlock."""
        return self.blocks.key_of(block, tier)

    def free_blocks(self, tier: Tier = "device") -> tuple[int, ...]:
        """The free queue, front first. Cost: O(free blocks)."""
        return self.blocks.free_blocks(tier)

    def take_batch(self) -> Batch:
        """Close and number the open batch: the commands since the last one."""
        return self.blocks.take_batch()

    def state(self) -> Tiers:
        """The value that both backends have. Cost: O(pool) with the twin."""
        if isinstance(self.blocks, PureBlocks):
            return self.blocks.state
        columns = self.blocks.dump()
        return from_columns(*columns, first_block=self._first_block, eviction=self._eviction)

    def check(
        self, held: Iterable[int] | None = None, held_on_host: Iterable[int] | None = None
    ) -> None:
        """Raise InvariantViolation with the first property of pools that does not hold.

        held, held_on_host: each block as often as the caller holds it; None: not compared.
        """
        check_tiers(self.state(), held, held_on_host)


class PureBlocks:
    """The functions of these modules over one value; the twin's `Tiers` has the same methods."""

    __slots__ = ("state",)

    def __init__(self, state: Tiers) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        """A transition or a question as a method."""
        function = next((each.__dict__[name] for each in MODULES if name in each.__dict__), None)
        if function is None:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            answer = function(self.state, *args)
            if not isinstance(answer, Outcome):
                return answer
            self.state = answer.state
            return answer.value

        return call


def _make(backend: Any, sizes: tuple[Any, Any], options: Any) -> Any:
    if backend == "python":
        return PureBlocks(make_tiers(*sizes, **options))
    if backend != "rust":
        reason = "there are 'python' and 'rust'"
        raise BackendMissing(backend=repr(backend), reason=reason)
    return _twin.make_tiers(*check_options(*sizes, *options.values()), **options)
