# SPDX-License-Identifier: Apache-2.0
"""The map from hashes to blocks of vLLM 0.8.5's pool, to look at and to write by hand.

It is the core's index, and keeps nothing of its own. A block is found by one hash at most, and the
one that was published first answers. A block that is written in stands under its own id, whatever
key was used. A free one is found from then on and keeps its place in the queue. Source: S001-82.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from kvcore.legacy.blocks.blocks import Backing
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, read_record
from kvcore.legacy.v1_0_8.errors import AlreadyHashed
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock
from kvcore.types.errors import WrongArgument


class Pool(Protocol):
    """What is used here of the `BlockPool` that the blocks are of."""

    backing: Backing
    blocks: list[KVCacheBlock]

    def check_own(self, blocks: Sequence[Any]) -> list[int]:
        """The ids of blocks of this pool. Raises ForeignBlock."""


class BlocksOfHash(MutableMapping[int, KVCacheBlock]):
    """The blocks that one hash is found by, by id. Cost: O(pool) a question with the twin."""

    def __init__(self, pool: Pool, block_hash: Any) -> None:
        """Raises WrongArgument."""
        self._pool = pool
        self._record = read_record(block_hash)

    def __repr__(self) -> str:
        return repr(self._found())

    def __getitem__(self, block_id: int) -> KVCacheBlock:
        return self._found()[block_id]

    def __setitem__(self, block_id: int, block: KVCacheBlock) -> None:
        """Raises ForeignBlock, AlreadyHashed, and WrongArgument for the null block."""
        self.check([block])
        if block.block_id not in self:
            block.block_hash = self._record

    def __delitem__(self, block_id: int) -> None:
        self[block_id].reset_hash()

    def __iter__(self) -> Iterator[int]:
        return iter(self._found())

    def __len__(self) -> int:
        return len(self._found())

    def check(self, blocks: Sequence[Any]) -> None:
        """Raise unless these blocks can be found by this hash."""
        for block_id in self._pool.check_own(blocks):
            if block_id == 0:
                expected = "another block than the null block"
                raise WrongArgument(name="a cached block", expected=expected, value=str(block_id))
            if self._pool.backing.key_of(block_id) not in (None, self._record.core_key):
                raise AlreadyHashed(block=block_id)

    def _found(self) -> dict[int, KVCacheBlock]:
        index = self._pool.backing.state().device.index
        return {at: self._pool.blocks[at] for at in index.get(self._record.core_key, ())}


class CachedBlocks(MutableMapping[BlockHashType, MutableMapping[int, KVCacheBlock]]):
    """Which blocks each hash is found by. Cost: O(pool) a question with the twin.

    Asked for a hash that nobody has, it gives no blocks, into which some can be written.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return repr(dict(self))

    def __getitem__(self, block_hash: BlockHashType) -> MutableMapping[int, KVCacheBlock]:
        return BlocksOfHash(self._pool, block_hash)

    def __setitem__(self, block_hash: BlockHashType, blocks: Mapping[int, KVCacheBlock]) -> None:
        """Have a hash found by these blocks alone. Raises as `BlocksOfHash` does."""
        found, given = BlocksOfHash(self._pool, block_hash), list(blocks.values())
        found.check(given)
        wanted = {block.block_id: block for block in given}
        for block_id in set(found) - set(wanted):
            del found[block_id]
        found.update(wanted)

    def __delitem__(self, block_hash: BlockHashType) -> None:
        if block_hash not in self:
            raise KeyError(block_hash)
        self[block_hash].clear()

    def __contains__(self, block_hash: object) -> bool:
        return bool(BlocksOfHash(self._pool, block_hash))

    def __iter__(self) -> Iterator[BlockHashType]:
        firsts = self._pool.backing.state().device.index.firsts
        records = (self._pool.blocks[place].block_hash for place in firsts.values())
        return (record for record in records if record is not None)

    def __len__(self) -> int:
        return len(self._pool.backing.state().device.index)

    def get(self, block_hash: BlockHashType, default: Any = None) -> Any:
        """The blocks of a hash, or the default if it has none."""
        return self[block_hash] or default

    def clear(self) -> None:
        """Forget every hash."""
        self._pool.backing.clear_index()
