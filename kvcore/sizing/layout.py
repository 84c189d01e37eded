# SPDX-License-Identifier: Apache-2.0
"""The cache of one worker: its groups, its blocks and the tensors that hold them.

A block of the pool has one slot for each layer of a group, and every group's block has the
same size in bytes, so that any block can serve any group. A tensor is one slot of all blocks;
layers of different groups in the same slot share it. A group with fewer layers than slots leaves
the rest empty. Values are frozen: no call changes its argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvcore.sizing.errors import EmptyGroup, NoLayers, SpecsDiffer, UnknownLayer
from kvcore.sizing.memory import Specs, check_memory
from kvcore.sizing.specs import LayerSpec, Limits, blocks_of, check_count
from kvcore.types.config import Config
from kvcore.types.errors import GroupsDoNotFit
from kvcore.types.groups import Group


@attrs.frozen
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: tuple[str, ...]
    spec: LayerSpec


@attrs.frozen
class KVCacheTensor:
    """One slot of all blocks. shared_by: the layers, of different groups, that use it."""

    size_bytes: int
    shared_by: tuple[str, ...]


@attrs.frozen
class KVCacheConfig:
    """The cache that a worker allocates and a manager manages.

    hash_block_size: the tokens of a hash if hits may end inside blocks, else None.
    """

    num_blocks: int
    tensors: tuple[KVCacheTensor, ...]
    groups: tuple[KVCacheGroupSpec, ...]
    hash_block_size: int | None = None

    @property
    def num_slots(self) -> int:
        """Number of layers that fit into a block."""
        return num_slots(self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its slots."""
        return block_bytes(self.groups)


def create_kv_cache_group_specs(
    specs: Specs, grouped_layer_names: Sequence[Sequence[str]]
) -> tuple[KVCacheGroupSpec, ...]:
    """Make one group for each list of layer names, in order.

    Raises EmptyGroup, UnknownLayer, SpecsDiffer.
    """
    return tuple(
        KVCacheGroupSpec(tuple(names), _common_spec(specs, number, names))
        for number, names in enumerate(grouped_layer_names)
    )


def make_layout(groups: Sequence[KVCacheGroupSpec], num_blocks: int) -> KVCacheConfig:
    """Make blocks and tensors for groups whose blocks have one size.

    Raises NoLayers, GroupsDoNotFit, WrongArgument, InvalidCount, InvalidMemory above a PiB.
    """
    if not groups:
        raise NoLayers
    check_pages([group.spec for group in groups])
    check_count("num_blocks", num_blocks, least=0)
    check_memory("num_blocks", num_blocks * block_bytes(groups), least=0)
    size_bytes = groups[0].spec.page_bytes * num_blocks
    tensors = []
    for slot in range(num_slots(groups)):
        names = (group.layer_names[slot : slot + 1] for group in groups)
        tensors.append(KVCacheTensor(size_bytes, tuple(name for found in names for name in found)))
    return KVCacheConfig(num_blocks, tuple(tensors), tuple(groups))


def check_pages(specs: Sequence[LayerSpec]) -> None:
    """Raise GroupsDoNotFit unless all layers have one page size."""
    pages = [spec.page_bytes for spec in specs]
    if len(set(pages)) > 1:
        raise GroupsDoNotFit(groups=[spec.type_id for spec in specs], sizes=pages)


def num_slots(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the number of layers of the largest group."""
    return max(len(group.layer_names) for group in groups)


def block_bytes(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes of one block of the pool."""
    return num_slots(groups) * groups[0].spec.page_bytes


def blocks_per_request(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> int:
    """Return the most blocks that one request holds until it reaches the maximum length, over all
    groups.

    A windowed group holds no more than its tokens fill, so this is at most the sum of the layers'
    reservations (`max_blocks`). Cross-attention counts all its encoder tokens.
    """
    total = 0
    for group in groups:
        most = group.spec.max_blocks(limits)
        if group.spec.window is not None:
            most = min(most, blocks_of(limits.max_model_len, group.spec.block_size))
        total += most
    return total


def usable_blocks(config: KVCacheConfig, limits: Limits) -> int:
    """Return the number of blocks that can hold tokens."""
    return max(config.num_blocks - int(limits.null_block), 0)


def max_concurrency(config: KVCacheConfig, limits: Limits) -> float:
    """Return how many requests of maximum length fit at once, as a fraction.

    For one group of full attention: its tokens over the maximum length; otherwise: blocks over the
    blocks of one request.
    """
    blocks = usable_blocks(config, limits)
    if len(config.groups) == 1 and config.groups[0].spec.keeps_all:
        return blocks * config.groups[0].spec.block_size / limits.max_model_len
    return blocks / blocks_per_request(config.groups, limits)


def num_cache_tokens(config: KVCacheConfig, limits: Limits) -> int:
    """Return how many tokens the blocks hold; with windows, those of requests of maximum length."""
    blocks = usable_blocks(config, limits)
    if len(config.groups) == 1 and config.groups[0].spec.keeps_all:
        return blocks * config.groups[0].spec.block_size
    return blocks * limits.max_model_len // blocks_per_request(config.groups, limits)


def make_manager_config(config: KVCacheConfig, limits: Limits, **options: Any) -> Config:
    """Make the configuration of a `KVCacheManager` for these groups and blocks.

    Groups with a window, a chunk or states need the null block, which takes one more block; limits
    with `null_block=True` include it when memory is checked. options: further fields of
    `kvcore.Config`; `hash_block_size=None` keeps hits at whole blocks. Raises InvalidConfig as that
    does, also if limits without the null block left no space for it.
    """
    groups = tuple(
        Group(
            group.spec.block_size,
            kind=group.spec.kind,
            window=group.spec.window,
            page_bytes=config.block_bytes,
        )
        for group in config.groups
    )
    return Config(
        config.num_blocks,
        groups=groups,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        null_block=limits.null_block or any(group.is_windowed for group in groups),
        **{"hash_block_size": config.hash_block_size, **options},
    )


def _common_spec(specs: Specs, number: int, names: Sequence[str]) -> LayerSpec:
    if not names:
        raise EmptyGroup(group_id=number)
    for name in names:
        if name not in specs:
            raise UnknownLayer(group_id=number, layer=name)
        if specs[name] != specs[names[0]]:
            raise SpecsDiffer(
                group_id=number,
                layer=name,
                spec=specs[name],
                first_layer=names[0],
                first=specs[names[0]],
            )
    return specs[names[0]]
