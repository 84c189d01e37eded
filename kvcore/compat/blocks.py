# SPDX-License-Identifier: Apache-2.0
"""KVCacheBlocks as vLLM's engines use them: block ids per group, and which have no hash.

A block is its id; all else about a block is a query of the manager. The null block is id 0; it has
no content, so it never counts as unhashed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import attrs

from kvcore.compat.errors import NotOneGroup
from kvcore.types.arguments import check_kind
from kvcore.types.values import Hit
from kvcore.types.values import KVCacheBlocks as CoreBlocks


@attrs.frozen
class KVCacheBlocks:
    """Block ids, one tuple per group, in table order.

    has_key: the manager's query whether a block is findable now; ignored in comparisons.
    """

    blocks: tuple[tuple[int, ...], ...]
    has_key: Callable[[int], bool] = attrs.field(eq=False, repr=False)

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """Concatenate the blocks of both, group by group."""
        pairs = zip(self.blocks, other.blocks, strict=True)
        return KVCacheBlocks(tuple(mine + theirs for mine, theirs in pairs), self.has_key)

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...
    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Return one list of ids per group; None if `allow_none` is set and no group has blocks."""
        if allow_none and not any(self.blocks):
            return None
        return tuple(list(ids) for ids in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the blocks without a hash, for a manager with one group. Raises NotOneGroup."""
        if len(self.blocks) != 1:
            raise NotOneGroup(num_groups=len(self.blocks))
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return the blocks without a hash, one list per group; the null block is never
        included.
        """
        return [[block for block in ids if not self.has_key(block)] for ids in self.blocks]

    def new_empty(self) -> KVCacheBlocks:
        """Return an instance without blocks, with the same number of groups."""
        return KVCacheBlocks(((),) * len(self.blocks), self.has_key)


def read_hit(blocks: KVCacheBlocks | None, num_tokens: int, *, looked_up: bool) -> Hit | None:
    """Read the hit that an engine passes; an empty one only means that it looked. looked_up:
    whether a look-up could have found anything. Raises WrongArgument.
    """
    if blocks is not None:
        check_kind("new_computed_blocks", blocks, KVCacheBlocks)
        if any(blocks.blocks):
            return Hit(CoreBlocks(blocks.blocks), num_tokens)
    if num_tokens or (looked_up and blocks is not None):
        return Hit(CoreBlocks(()), num_tokens)
    return None
