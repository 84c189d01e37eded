# SPDX-License-Identifier: Apache-2.0
"""Cache configurations: with one group, with several groups, and common to all workers.

A model with one kind of layers gives one group. A model with several kinds gives several groups
(`make_grouped_config`), or one group in which windows and chunks are kept as full attention
(`get_kv_cache_config`). The need of a request is checked after such a change, on the layers as they
will be kept: if it were checked before, a model would pass with the need of its windows and then
lack the blocks for one full request. A configured number of blocks must also be enough for that
request. No call changes its argument. Source: S001-58 to 70.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvcore.sizing.errors import (
    GroupCountDiffers,
    GroupKindDiffers,
    GroupLayersDiffer,
    MixedSpecs,
    NoLayers,
    NotEnoughBlocks,
)
from kvcore.sizing.grouping import group_layers
from kvcore.sizing.layout import (
    KVCacheConfig,
    KVCacheGroupSpec,
    block_bytes,
    blocks_per_request,
    create_kv_cache_group_specs,
    make_layout,
)
from kvcore.sizing.memory import (
    Specs,
    check_enough_kv_cache_memory,
    check_memory,
    check_need,
    longest_in_memory,
    longest_length,
)
from kvcore.sizing.specs import FullAttentionSpec, LayerSpec, Limits, WindowedSpec


def is_kv_cache_type_uniform(specs: Specs) -> bool:
    """Return whether the blocks of all layers are alike; False without layers."""
    return len({spec.type_id for spec in specs.values()}) == 1


def unify_hybrid_kv_cache_specs(specs: Specs) -> dict[str, LayerSpec]:
    """Return the layers with windows and chunks as full attention, if the model also has full
    attention.

    Without a layer of full attention they are unchanged. Does not modify specs.
    """
    full = next((spec for spec in specs.values() if isinstance(spec, FullAttentionSpec)), None)
    if full is None:
        return dict(specs)
    return {name: _as_full(spec, full.context_parallel) for name, spec in specs.items()}


def make_uniform_config(specs: Specs, available_bytes: int, limits: Limits) -> KVCacheConfig:
    """Make one group of all layers, with as many blocks as fit, or `limits.num_blocks`.

    Does not check that a request fits. Raises NoLayers, SpecsDiffer, NoCacheMemory below 0 bytes,
    InvalidMemory above a PiB, WrongArgument.
    """
    if not specs:
        raise NoLayers
    check_memory("available_bytes", available_bytes, least=0)
    groups = create_kv_cache_group_specs(specs, [tuple(specs)])
    return make_layout(groups, _num_blocks(groups, available_bytes, limits))


def get_kv_cache_config(specs: Specs, available_bytes: int, limits: Limits) -> KVCacheConfig:
    """Make one group of all layers; if some have full attention, windows and chunks are kept as
    full too.

    `make_grouped_config` gives each kind its own group, which takes less memory.
    Raises NoLayers, NoCacheMemory, InvalidMemory, WrongArgument, NotEnoughMemory, MixedSpecs,
    NotEnoughBlocks.
    """
    config = make_unified_config(specs, available_bytes, limits)
    _check_blocks(config.groups, limits)
    return config


def make_unified_config(specs: Specs, available_bytes: int, limits: Limits) -> KVCacheConfig:
    """Return the result of `get_kv_cache_config` with unchecked `limits.num_blocks`, as vLLM 0.8.5
    did.

    Raises what that raises, except NotEnoughBlocks.
    """
    unified = unify_hybrid_kv_cache_specs(specs)
    check_enough_kv_cache_memory(unified, available_bytes, limits)
    if not is_kv_cache_type_uniform(unified):
        kinds = sorted({spec.type_id for spec in unified.values()})
        raise MixedSpecs(count=len(kinds), type_ids=kinds)
    return make_uniform_config(unified, available_bytes, limits)


def make_grouped_config(specs: Specs, available_bytes: int, limits: Limits) -> KVCacheConfig:
    """Make groups of equal blocks over one pool, each kind with its own rule; see grouping.py.

    Raises NoLayers, GroupsDoNotFit, NoCacheMemory, InvalidMemory, WrongArgument, NotEnoughMemory,
    NotEnoughBlocks.
    """
    groups = group_layers(specs)
    check_need(lambda probe: request_bytes(groups, probe), available_bytes, limits)
    _check_blocks(groups, limits)
    return make_layout(groups, _num_blocks(groups, available_bytes, limits))


def request_bytes(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> int:
    """Return the bytes of the blocks that one request of maximum length holds, plus the
    null block.
    """
    return request_blocks(groups, limits) * block_bytes(groups)


def request_blocks(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> int:
    """Count the blocks that one request of maximum length holds, plus the null block."""
    return blocks_per_request(groups, limits) + int(limits.null_block)


def estimate_max_model_len(specs: Specs, available_bytes: int, limits: Limits) -> int:
    """Return the longest request that fits, at most `limits.max_model_len`; 0 if not even one token
    fits.

    It fits into the memory, and into `limits.num_blocks` of `make_grouped_config` if set.
    Raises WrongArgument, NoCacheMemory below 0 bytes, InvalidMemory above a PiB; with
    `limits.num_blocks` also what `group_layers` raises.
    """
    longest = longest_in_memory(specs, available_bytes, limits)
    if limits.num_blocks is None:
        return longest
    return min(longest, longest_in_blocks(group_layers(specs), limits.num_blocks, limits))


def longest_in_blocks(groups: Sequence[KVCacheGroupSpec], num_blocks: int, limits: Limits) -> int:
    """Return the longest request that these blocks hold, at most `limits.max_model_len`; 0
    if none.
    """
    return longest_length(lambda probe: request_blocks(groups, probe), num_blocks, limits)


def unify_kv_cache_configs(
    configs: Sequence[KVCacheConfig], *, same_layers: bool = True
) -> tuple[KVCacheConfig, ...]:
    """Unify the workers' configurations for one manager: groups in one order, the lowest number of
    blocks.

    Groups are ordered by type id; those of one type keep their order. Tensors keep their sizes: a
    worker with more memory uses only the first blocks. same_layers: False for the stages of a
    pipeline, whose layers differ. Does not modify configs.
    Raises GroupCountDiffers, GroupKindDiffers, GroupLayersDiffer.
    """
    if not configs:
        return ()
    num_blocks = min(config.num_blocks for config in configs)
    unified = tuple(
        attrs.evolve(
            config,
            num_blocks=num_blocks,
            groups=tuple(sorted(config.groups, key=lambda group: group.spec.type_id)),
        )
        for config in configs
    )
    for rank, config in enumerate(unified[1:], 1):
        _check_alike(rank, config.groups, unified[0].groups, same_layers)
    return unified


def _check_blocks(groups: Sequence[KVCacheGroupSpec], limits: Limits) -> None:
    """Raise NotEnoughBlocks unless `limits.num_blocks`, if set, hold one request of full length."""
    needed, num_blocks = request_blocks(groups, limits), limits.num_blocks
    if num_blocks is None or needed <= num_blocks:
        return
    longest = longest_in_blocks(groups, num_blocks, limits)
    raise NotEnoughBlocks(
        max_model_len=limits.max_model_len,
        needed=needed,
        null_block=limits.null_block,
        num_blocks=num_blocks,
        longest_model_len=longest,
    )


def _check_alike(
    rank: int,
    groups: tuple[KVCacheGroupSpec, ...],
    expected: tuple[KVCacheGroupSpec, ...],
    same_layers: bool,
) -> None:
    if len(groups) != len(expected):
        raise GroupCountDiffers(
            rank=rank,
            count=len(groups),
            type_ids=_type_ids(groups),
            expected=len(expected),
            first=_type_ids(expected),
        )
    for index, (group, first) in enumerate(zip(groups, expected, strict=True)):
        if group.spec != first.spec:
            raise GroupKindDiffers(rank=rank, group_id=index, spec=group.spec, first=first.spec)
        names, first_names = set(group.layer_names), set(first.layer_names)
        if same_layers and names != first_names:
            raise GroupLayersDiffer(
                rank=rank,
                group_id=index,
                missing=sorted(first_names - names),
                extra=sorted(names - first_names),
            )


def _num_blocks(groups: Sequence[KVCacheGroupSpec], available_bytes: int, limits: Limits) -> int:
    if limits.num_blocks is not None:
        return limits.num_blocks
    return available_bytes // block_bytes(groups)


def _as_full(spec: LayerSpec, context_parallel: int) -> LayerSpec:
    if not isinstance(spec, WindowedSpec):
        return spec
    return FullAttentionSpec(
        block_size=spec.block_size * context_parallel,
        context_parallel=context_parallel,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
    )  # never MLA, which has no window


def _type_ids(groups: Sequence[KVCacheGroupSpec]) -> list[str]:
    return [group.spec.type_id for group in groups]
