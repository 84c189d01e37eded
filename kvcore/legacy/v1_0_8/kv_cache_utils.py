# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM 0.8.5's kv_cache_utils: hashes, blocks, sizes and metrics.

A media item contributes only its hash to a key, and an item that ends where a block starts still
contributes; so kvcore and engines of that release that share a hash seed have equal keys. What the
originals change in place is changed in place here (`unify_hybrid_kv_cache_specs`,
`get_kv_cache_config`, `unify_kv_cache_configs`), and only by a call that succeeds; no other
argument is changed. `kvcore.sizing` computes all sizes, bounds and searches, `kvcore.metrics` the
metrics. Any object with the original's attributes can be a request, a configuration or statistics.
Source: S001-21 to 70.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from kvcore import metrics, sizing
from kvcore.legacy.v1_0_8 import block_hashes, live_blocks
from kvcore.legacy.v1_0_8 import kv_cache_interface as layers
from kvcore.legacy.v1_0_8.errors import BeyondMedia, NoMediaHash, TokensMissing, of_original_kind
from kvcore.sizing.memory import at_least_none, check_need, longest_in_memory, max_request_bytes
from kvcore.types.arguments import read_count
from kvcore.types.errors import CountMismatch

NONE_HASH = block_hashes.NONE_HASH
BlockHashType = block_hashes.BlockHashType
FreeKVCacheBlockQueue = live_blocks.FreeKVCacheBlockQueue
KVCacheBlock = live_blocks.KVCacheBlock
PrefixCachingMetrics = metrics.PrefixCachingMetrics

Layers = Mapping[str, Any]
"""The specs of a model's layers by name."""

logger = logging.getLogger(__name__)


def need_extra_keys(request: Any) -> bool:
    """Return whether a request's blocks depend on media or an adapter besides their tokens."""
    return bool(request.mm_positions) or request.lora_request is not None


def _gen_mm_extra_hash_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[Any], int]:
    """Return the hashes of the media in a block, and the index of the next item to read.

    start_mm_idx: index of the first item to read; negative counts from the end. Items are sorted by
    position. Raises CountMismatch, BeyondMedia, NoMediaHash.
    """
    positions, hashes = request.mm_positions or [], request.mm_hashes or []
    count = len(positions)
    if count and len(hashes) != count:
        fields = {"request": request.request_id, "given": len(hashes), "expected": count}
        raise CountMismatch(name="multi-modal hashes", **fields)
    if not count or _span(positions[-1])[1] < start_token_idx:
        return [], start_mm_idx
    if start_mm_idx < -count:
        raise BeyondMedia(index=start_mm_idx, num_items=count)
    keys: list[Any] = []
    for index in range(count)[start_mm_idx:]:
        if hashes[index] is None:
            raise NoMediaHash(name=f"the hash of media item {index}", expected="set", value=None)
        first, end = _span(positions[index])
        if first < end_token_idx and end >= start_token_idx:
            keys.append(hashes[index])
        if first >= end_token_idx or end > end_token_idx:
            return keys, index
    return keys, max(start_mm_idx, count)


def _gen_lora_extra_hash_keys(request: Any) -> list[int]:
    """Return the id of a request's adapter in a list; empty if it has none."""
    return [request.lora_request.lora_int_id] if request.lora_request else []


def generate_block_hash_extra_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return the extra keys of a block, or None, and the index of the next media item to read.

    Adapter first, then media. Raises what `_gen_mm_extra_hash_keys` raises.
    """
    media, index = _gen_mm_extra_hash_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    return (*_gen_lora_extra_hash_keys(request), *media) or None, index


def hash_block_tokens(
    hash_function: block_hashes.HashFunction,
    parent_block_hash: int | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHashType:
    """Return the record of one full block. parent_block_hash: None for the first block."""
    parent = NONE_HASH if parent_block_hash is None else parent_block_hash
    tokens = tuple(curr_block_token_ids)
    number = hash_function((parent, tokens, extra_keys))
    # The class's own `__new__`, which Python makes, takes three times as long.
    return tuple.__new__(BlockHashType, (number, tokens, extra_keys))


def hash_request_tokens(
    hash_function: block_hashes.HashFunction, block_size: int, request: Any
) -> list[BlockHashType]:
    """Return the records of a request's full blocks, over prompt and generated tokens.

    Raises InvalidCount, and what `generate_block_hash_extra_keys` raises.
    """
    size = read_count("block_size", block_size, 1)
    num_full = len(request.all_token_ids) // size
    return hash_more_tokens(hash_function, size, request, (), num_full)


def hash_more_tokens(
    hash_function: block_hashes.HashFunction,
    block_size: int,
    request: Any,
    known: Sequence[BlockHashType],
    num_full: int,
) -> list[BlockHashType]:
    """Return the records of a request's first num_full blocks that are not known yet.

    If some are known, the others count as generated tokens: as in the original, only the last media
    item is read for them, even if it ends at the block's start. Raises
    TokensMissing, and what `generate_block_hash_extra_keys` raises.
    """
    tokens, end, start = request.all_token_ids, num_full * block_size, len(known) * block_size
    if start < end and len(tokens) < end:
        raise TokensMissing(request=request.request_id, num_tokens=len(tokens), requested=end)
    number = block_hashes.read_record(known[-1]).hash_value if known and start < end else NONE_HASH
    marked, keys, next_mm_idx = need_extra_keys(request), None, 0
    records: list[BlockHashType] = []
    for first in range(start, end, block_size):
        if marked:
            keys, next_mm_idx = generate_block_hash_extra_keys(
                request, first, first + block_size, -1 if known else next_mm_idx
            )
        own = tokens[first : first + block_size]
        records.append(hash_block_tokens(hash_function, number, own, keys))
        number = records[-1].hash_value
    return records


def estimate_max_model_len(vllm_config: Any, kv_cache_spec: Layers, available_memory: int) -> int:
    """Return the longest request that fits, at most the configured length; 0 if none fits.

    Raises WrongArgument, InvalidMemory above a PiB.
    """
    limits, specs = layers.read_limits(vllm_config), layers.read_specs(kv_cache_spec)
    return longest_in_memory(specs, at_least_none(available_memory), limits)


def check_enough_kv_cache_memory(
    vllm_config: Any, kv_cache_spec: Layers, available_memory: int
) -> None:
    """Raise NoCacheMemory or NotEnoughMemory unless one request of full length fits.

    A model without layers needs no memory. Also raises WrongArgument, InvalidMemory.
    """
    limits, specs = layers.read_limits(vllm_config), layers.read_specs(kv_cache_spec)
    check_need(lambda probe: max_request_bytes(specs, probe), available_memory, limits)


@of_original_kind()
def create_kv_cache_group_specs(
    kv_cache_spec: Layers, grouped_layer_names: Sequence[Sequence[str]]
) -> list[layers.KVCacheGroupSpec]:
    """Make one group for each list of layer names, in order.

    Raises LayersDiffer, NoGroupLayer, NoSuchLayer.
    """
    sizing.create_kv_cache_group_specs(layers.read_specs(kv_cache_spec), grouped_layer_names)
    return [
        layers.KVCacheGroupSpec(list(names), kv_cache_spec[names[0]])
        for names in grouped_layer_names
    ]


def is_kv_cache_type_uniform(kv_cache_spec: Layers) -> bool:
    """Return whether the blocks of all layers have the same layout; False without layers."""
    return sizing.is_kv_cache_type_uniform(layers.read_specs(kv_cache_spec))


def unify_hybrid_kv_cache_specs(kv_cache_spec: MutableMapping[str, Any]) -> None:
    """Convert windows to full attention in place, if the model has full attention too.

    A converted layer becomes a copy of the model's own spec of full attention, in its own shape.
    """
    read = layers.read_specs(kv_cache_spec)
    full = [kv_cache_spec[name] for name, each in read.items() if each.keeps_all]
    for name, kept in sizing.unify_hybrid_kv_cache_specs(read).items():
        if kept is not read[name]:
            shape = layers.read_fields("a spec", kv_cache_spec[name], *layers.SHAPE)
            kv_cache_spec[name] = made = copy.copy(full[0])
            for field, value in {**shape, "use_mla": False}.items():
                object.__setattr__(made, field, value)  # also of a frozen class


@of_original_kind()
def get_kv_cache_config(
    vllm_config: Any, kv_cache_spec: MutableMapping[str, Any], available_memory: int
) -> layers.KVCacheConfig:
    """Return a configuration of one group, after converting mixed windows to full attention.

    The conversion is in place. A request must fit with the converted layers; a configured number of
    blocks is used unchanged.
    Raises MixedLayers, NothingToCache, LayersDiffer, and what `check_enough_kv_cache_memory`
    raises; the specs are then as they were.
    """
    unified, limits = dict(kv_cache_spec), layers.read_limits(vllm_config)
    unify_hybrid_kv_cache_specs(unified)
    layout = sizing.make_unified_config(layers.read_specs(unified), available_memory, limits)
    kv_cache_spec.update(unified)
    return _as_worker(unified, layout, limits)


@of_original_kind()
def _get_kv_cache_config_uniform_type(
    vllm_config: Any, kv_cache_spec: Layers, available_memory: int
) -> layers.KVCacheConfig:
    """Return one group and one tensor per layer, with the blocks that fit or are configured.

    Raises NothingToCache, LayersDiffer, WrongArgument, InvalidMemory.
    """
    limits, specs = layers.read_limits(vllm_config), layers.read_specs(kv_cache_spec)
    layout = sizing.make_uniform_config(specs, at_least_none(available_memory), limits)
    return _as_worker(kv_cache_spec, layout, limits)


@of_original_kind()
def unify_kv_cache_configs(
    kv_cache_configs: MutableSequence[layers.KVCacheConfig], *, same_layers: bool = False
) -> MutableSequence[layers.KVCacheConfig]:
    """Sort the groups of all workers alike and set the smallest number of blocks, in place.

    Returns the same list. Tensors keep their sizes. same_layers: whether groups must have the same
    layers too, which is not so for the stages of a pipeline. Raises RankGroupsDiffer, RanksDiffer,
    RankLayersDiffer.
    """
    read = [_read_config(config) for config in kv_cache_configs]
    unified = sizing.unify_kv_cache_configs(read, same_layers=same_layers)
    for config, made in zip(kv_cache_configs, unified, strict=True):
        config.kv_cache_groups.sort(key=lambda group: layers.read_spec(group.kv_cache_spec).type_id)
        config.num_blocks = made.num_blocks
    return kv_cache_configs


def _as_worker(
    kv_cache_spec: Layers, layout: sizing.KVCacheConfig, limits: sizing.Limits
) -> layers.KVCacheConfig:
    """Return a worker's configuration of one group; logs the capacity."""
    tokens = sizing.num_cache_tokens(layout, limits)
    fitting = sizing.max_concurrency(layout, limits)
    text = "GPU KV cache: %d tokens; %.2f requests of %d tokens fit at once"
    logger.info(text, tokens, fitting, limits.max_model_len)
    names = list(kv_cache_spec)
    tensors = {each.shared_by[0]: layers.KVCacheTensor(each.size_bytes) for each in layout.tensors}
    groups = [layers.KVCacheGroupSpec(names, kv_cache_spec[names[0]])]
    return layers.KVCacheConfig(layout.num_blocks, tensors, groups)


def _read_config(config: layers.KVCacheConfig) -> sizing.KVCacheConfig:
    groups = tuple(
        sizing.KVCacheGroupSpec(tuple(group.layer_names), layers.read_spec(group.kv_cache_spec))
        for group in config.kv_cache_groups
    )
    return sizing.KVCacheConfig(config.num_blocks, (), groups)


def _span(position: Any) -> tuple[int, int]:
    """Return the first token of a media item and the end after its last one.

    position: an object or a mapping.
    """
    if isinstance(position, Mapping):
        return position["offset"], position["offset"] + position["length"]
    return position.offset, position.offset + position.length
