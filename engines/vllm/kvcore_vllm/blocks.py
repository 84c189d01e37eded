# SPDX-License-Identifier: Apache-2.0
"""vLLM's block objects and its pool over kvcore's block ids.

A block stores nothing: its owners and its key are read from the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from kvcore import KVCacheManager as Core
from kvcore.compat import KVCacheManager as Compat
from kvcore.types.keys import make_key

Tables = tuple[Sequence[int], ...]


class Block:
    """One block of the pool, with the fields of vLLM's KVCacheBlock that others read."""

    __slots__ = ("_compat", "block_id")
    pool = None

    def __init__(self, compat: Compat, block_id: int) -> None:
        self._compat = compat
        self.block_id = block_id

    def __repr__(self) -> str:
        return f"<block {self.block_id} of {self._compat!r}>"

    @property
    def number(self) -> int:
        """The core's number of this block."""
        return self.block_id

    @property
    def is_null(self) -> bool:
        """Whether this is the null block, which stands for blocks that a window gave back."""
        return self.block_id == 0

    @property
    def has_key(self) -> bool:
        """Whether it can be found."""
        return self._compat.core.has_key(self.number)

    @property
    def ref_cnt(self) -> int:
        """Number of owners; those of the null block are not counted."""
        return 0 if self.is_null else self._compat.core.num_owners(self.number)

    @property
    def block_hash(self) -> bytes | None:
        """The key that it is found by, None if it has none."""
        return self._compat.core.get_block_key(self.number)


class MovedBlock(Block):
    """A block of vLLM that may be another one of the core from step to step. parts: knows which."""

    __slots__ = ("_parts",)

    def __init__(self, compat: Compat, block_id: int, parts: Any) -> None:
        super().__init__(compat, block_id)
        self._parts = parts

    @property
    def number(self) -> int:
        """The core's number of this block now."""
        number: int = self._parts.number(self.block_id)
        return number

    @property
    def block_hash_num_tokens(self) -> int | None:
        """The tokens before the end of what its key names, None if it has none."""
        length: int | None = self._parts.num_tokens(self.block_hash)
        return length


class HeldBlock(Block):
    """A pinned block that stays one block of the core."""

    __slots__ = ("_number",)

    def __init__(self, compat: Compat, block_id: int, number: int) -> None:
        super().__init__(compat, block_id)
        self._number = number

    @property
    def number(self) -> int:
        """The core's number of this block."""
        return self._number


class Blocks(KVCacheBlocks):  # type: ignore[misc] # vLLM has no types here
    """A result of the manager: ids per group, and block objects once they are read."""

    def __init__(self, ids: Tables, get_block: Callable[[int], Block]) -> None:
        self.ids = ids
        self._get_block = get_block
        self._blocks: tuple[Sequence[Block], ...] | None = None

    @property
    def blocks(self) -> tuple[Sequence[Block], ...]:
        """The block objects, one sequence per group; the same objects each time."""
        if self._blocks is None:
            self._blocks = tuple([self._get_block(each) for each in ids] or () for ids in self.ids)
        return self._blocks

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return the ids as one list per group, or per given group."""
        ids = self.ids if group_ids is None else [self.ids[group] for group in group_ids]
        if allow_none and not any(ids):
            return None
        return tuple(list(each) for each in ids)

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return the blocks without a key, one list per group, without the null block."""
        return [
            [each.block_id for each in group if not each.is_null and not each.has_key]
            for group in self.blocks
        ]

    def new_empty(self) -> Blocks:
        """Return an instance without blocks, with the same number of groups."""
        return Blocks(((),) * len(self.ids), self._get_block)


def read_ids(blocks: Any) -> Tables:
    """Return the ids of a result, which may be vLLM's own class."""
    if isinstance(blocks, Blocks):
        return blocks.ids
    return tuple([block.block_id for block in group] for group in blocks.blocks)


class BlockPool:
    """vLLM's pool, as far as connectors use it: its blocks are held by pins of the core."""

    def __init__(self, manager: Any, hash_block_size: int) -> None:
        self._manager = manager
        compat = self._compat = manager.compat
        self.hash_block_size = hash_block_size
        self.num_gpu_blocks = compat.config.num_blocks
        self.enable_caching = compat.config.enable_caching
        parts, numbers = manager.parts, range(self.num_gpu_blocks)
        self.blocks: list[Block] = [Block(compat, number) for number in numbers]
        if parts is not None:
            self.blocks = [MovedBlock(compat, number, parts) for number in numbers]
        self.block = self.blocks.__getitem__
        self.null_block = self.block(0)
        self.get_usage: Callable[[], float] = lambda: compat.usage
        self.evict_blocks = manager.evict_blocks
        self.reset_prefix_cache = manager.reset_prefix_cache

    @property
    def _core(self) -> Core:
        core: Core = self._compat.core
        return core

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks without an owner."""
        return self._core.num_free_blocks

    def is_block_writable(self, block: Block) -> bool:
        """Return whether a block's only owner may change its content."""
        return block.ref_cnt == 1 and not block.has_key

    def touch(self, blocks: Iterable[Any]) -> None:
        """Pin blocks, so that they are not reused."""
        self._core.pin([block.number for block in blocks if not block.is_null])

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give back pinned blocks. Of those without a key, the first is reused first.

        The core puts each at the front of the free queue in turn; vLLM keeps their order.
        """
        ids = [block.number for block in ordered_blocks if not block.is_null]
        core = self._core
        core.unpin([each for each in reversed(ids) if not core.has_key(each)])
        core.unpin([each for each in ids if core.has_key(each)])

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Any:
        """Return the block of this content in each group, or None unless every group has one."""
        keys = [make_key(block_hash, group) for group in kv_cache_group_ids]
        found = [self._core.get_cached_block(key) for key in keys]
        if None in found:
            return None
        shown = self._manager.shown([[each for each in found if each is not None]])
        return [self.block(each) for each in shown[0]]

    def take_events(self) -> list[Any]:
        """Return the events since the last call, without the kinds of their groups."""
        taken: list[Any] = self._manager.events.take()
        return taken
