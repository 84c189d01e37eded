# SPDX-License-Identifier: Apache-2.0
"""Seed 001's sizing functions, over `kvcore.sizing`.

Rules: what the originals change in place is changed in place here (`unify_hybrid_kv_cache_specs`,
`unify_kv_cache_configs`), and only by a call that succeeds; nothing else changes an argument. All
sizes, bounds and searches are those of `kvcore.sizing`. Source: S001-45 to 70. Twin: none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from kvcore import sizing
from kvcore.legacy.v1_0_8.errors import (
    LayersDiffer,
    MixedLayers,
    NoGroupLayer,
    NoSuchLayer,
    NothingToCache,
    PagesDiffer,
    RankGroupsDiffer,
    RankLayersDiffer,
    RanksDiffer,
)
from kvcore.legacy.v1_0_8.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    read_limits,
    read_spec,
    read_specs,
    type_id_of,
)
from kvcore.sizing.errors import (
    EmptyGroup,
    GroupCountDiffers,
    GroupKindDiffers,
    GroupLayersDiffer,
    SpecsDiffer,
    UnknownLayer,
)
from kvcore.sizing.memory import check_need, max_request_bytes

Layers = Mapping[str, Any]
"""The specs of a model's layers by name."""

logger = logging.getLogger(__name__)


def estimate_max_model_len(vllm_config: Any, kv_cache_spec: Layers, available_memory: int) -> int:
    """The longest request that fits, at most the configured length; 0 if not even one token.

    Raises WrongArgument, InvalidMemory above a PiB.
    """
    limits, specs = read_limits(vllm_config), read_specs(kv_cache_spec)
    if isinstance(available_memory, int):
        available_memory = max(available_memory, 0)
    return sizing.estimate_max_model_len(specs, available_memory, limits)


def check_enough_kv_cache_memory(
    vllm_config: Any, kv_cache_spec: Layers, available_memory: int
) -> None:
    """Raise NoCacheMemory or NotEnoughMemory unless one request of full length fits.

    Without layers it needs nothing. Raises WrongArgument, InvalidMemory besides.
    """
    limits, specs = read_limits(vllm_config), read_specs(kv_cache_spec)
    check_need(lambda probe: max_request_bytes(specs, probe), available_memory, limits)


def create_kv_cache_group_specs(
    kv_cache_spec: Layers, grouped_layer_names: Sequence[Sequence[str]]
) -> list[KVCacheGroupSpec]:
    """One group for each list of layer names, in order.

    Raises LayersDiffer, NoGroupLayer, NoSuchLayer.
    """
    try:
        sizing.create_kv_cache_group_specs(read_specs(kv_cache_spec), grouped_layer_names)
    except SpecsDiffer as error:
        raise LayersDiffer(**error.fields) from None
    except EmptyGroup as error:
        raise NoGroupLayer(**error.fields) from None
    except UnknownLayer as error:
        raise NoSuchLayer(**error.fields) from None
    return [KVCacheGroupSpec(list(names), kv_cache_spec[names[0]]) for names in grouped_layer_names]


def is_kv_cache_type_uniform(kv_cache_spec: Layers) -> bool:
    """Whether blocks of all layers are alike; False without layers."""
    return len(set(map(type_id_of, kv_cache_spec.values()))) == 1


def unify_hybrid_kv_cache_specs(kv_cache_spec: MutableMapping[str, Any]) -> None:
    """Make windows full attention where the model has full attention too; in place."""
    kv_cache_spec.update(_unified(kv_cache_spec))


def get_kv_cache_config(
    vllm_config: Any, kv_cache_spec: MutableMapping[str, Any], available_memory: int
) -> KVCacheConfig:
    """One group of all layers, windows beside full attention made full in place.

    A request must fit as its layers will be kept. Raises MixedLayers, NothingToCache, and what
    `check_enough_kv_cache_memory` raises; the specs are then as they were.
    """
    unified = {**kv_cache_spec, **_unified(kv_cache_spec)}
    check_enough_kv_cache_memory(vllm_config, unified, available_memory)
    if not unified:
        raise NothingToCache
    if not is_kv_cache_type_uniform(unified):
        kinds = sorted(set(map(type_id_of, unified.values())))
        raise MixedLayers(count=len(kinds), type_ids=", ".join(kinds))
    config = _get_kv_cache_config_uniform_type(vllm_config, unified, available_memory)
    kv_cache_spec.update(unified)
    return config


def _get_kv_cache_config_uniform_type(
    vllm_config: Any, kv_cache_spec: Layers, available_memory: int
) -> KVCacheConfig:
    """One group and one tensor for each layer, as many blocks as fit or as the config says.

    Raises NothingToCache, PagesDiffer, LayersDiffer, WrongArgument, InvalidMemory.
    """
    specs, limits = read_specs(kv_cache_spec), read_limits(vllm_config)
    if not specs:
        raise NothingToCache
    names = list(kv_cache_spec)
    for name in names:
        if specs[name].page_bytes != specs[names[0]].page_bytes:
            raise PagesDiffer(
                group=0,
                layer=name,
                spec=str(specs[name]),
                first_layer=names[0],
                first=str(specs[names[0]]),
            )
    if isinstance(available_memory, int):
        available_memory = max(available_memory, 0)
    try:
        layout = sizing.make_uniform_config(specs, available_memory, limits)
    except SpecsDiffer as error:
        raise LayersDiffer(**error.fields) from None
    tokens, requests = (
        sizing.num_cache_tokens(layout, limits),
        sizing.max_concurrency(layout, limits),
    )
    logger.info(
        "GPU KV cache: %d tokens; %.2f requests of %d tokens fit at once",
        *(tokens, requests, limits.max_model_len),
    )
    tensors = {
        name: KVCacheTensor(tensor.size_bytes)
        for tensor in layout.tensors
        for name in tensor.shared_by
    }
    groups = create_kv_cache_group_specs(kv_cache_spec, [names])
    return KVCacheConfig(layout.num_blocks, tensors, groups)


def unify_kv_cache_configs(
    kv_cache_configs: MutableSequence[KVCacheConfig], *, same_layers: bool = False
) -> MutableSequence[KVCacheConfig]:
    """Give all workers groups in one order and the fewest blocks of all; in place, same list.

    Tensors keep their sizes. same_layers: whether groups must have the same layers too, which the
    stages of a pipeline have not. Raises RankGroupsDiffer, RanksDiffer, RankLayersDiffer.
    """
    read = [_read_config(config) for config in kv_cache_configs]
    try:
        unified = sizing.unify_kv_cache_configs(read, same_layers=same_layers)
    except GroupCountDiffers as error:
        raise RankGroupsDiffer(**error.fields) from None
    except GroupKindDiffers as error:
        raise RanksDiffer(**error.fields) from None
    except GroupLayersDiffer as error:
        raise RankLayersDiffer(**error.fields) from None
    ordered = [
        sorted(config.kv_cache_groups, key=lambda group: type_id_of(group.kv_cache_spec))
        for config in kv_cache_configs
    ]
    for rank, groups in enumerate(ordered):
        _check_order(rank, groups, ordered[0])
    for config, groups, made in zip(kv_cache_configs, ordered, unified, strict=True):
        config.kv_cache_groups[:] = groups
        config.num_blocks = made.num_blocks
    return kv_cache_configs


def _check_order(
    rank: int, groups: Sequence[KVCacheGroupSpec], expected: Sequence[KVCacheGroupSpec]
) -> None:
    """Raise RanksDiffer unless groups of one type id stand in one order on two workers."""
    for index, (group, other) in enumerate(zip(groups, expected, strict=True)):
        spec, first = read_spec(group.kv_cache_spec), read_spec(other.kv_cache_spec)
        if spec != first:
            raise RanksDiffer(rank=rank, group=index, spec=str(spec), first=str(first))


def _unified(kv_cache_spec: Layers) -> dict[str, Any]:
    """The layers that `kvcore.sizing` keeps in another way than they say."""
    read = read_specs(kv_cache_spec)
    changed: dict[str, Any] = {}
    for name, kept in sizing.unify_hybrid_kv_cache_specs(read).items():
        if kept is not read[name]:
            spec = kv_cache_spec[name]
            shape = (spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype)
            changed[name] = FullAttentionSpec(*shape, kept.use_mla)
    return changed


def _read_config(config: KVCacheConfig) -> sizing.KVCacheConfig:
    groups = tuple(
        sizing.KVCacheGroupSpec(tuple(group.layer_names), read_spec(group.kv_cache_spec))
        for group in config.kv_cache_groups
    )
    return sizing.KVCacheConfig(config.num_blocks, (), groups)
