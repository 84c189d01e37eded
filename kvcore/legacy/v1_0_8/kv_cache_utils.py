# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM 0.8.5's kv_cache_utils: sizes and metrics, and those of blocks and hashes.

What the originals change in place is changed in place here (`unify_hybrid_kv_cache_specs`,
`get_kv_cache_config`, `unify_kv_cache_configs`), and only by a call that succeeds; nothing else
changes an argument. All sizes, bounds and searches are those of `kvcore.sizing`, the metrics those
of `kvcore.metrics`. Whatever has the original's attributes is a request, a configuration or
statistics. Source: S001-21 to 26, 45 to 70.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from kvcore import metrics, sizing
from kvcore.legacy.v1_0_8 import block_hashes, live_blocks
from kvcore.legacy.v1_0_8 import kv_cache_interface as layers
from kvcore.legacy.v1_0_8.errors import of_original_kind
from kvcore.sizing.memory import check_need, max_request_bytes
from kvcore.types.values import PrefixCacheStats

NONE_HASH = block_hashes.NONE_HASH
BlockHashType = block_hashes.BlockHashType
FreeKVCacheBlockQueue = live_blocks.FreeKVCacheBlockQueue
KVCacheBlock = live_blocks.KVCacheBlock
_gen_lora_extra_hash_keys = block_hashes._gen_lora_extra_hash_keys
_gen_mm_extra_hash_keys = block_hashes._gen_mm_extra_hash_keys
generate_block_hash_extra_keys = block_hashes.generate_block_hash_extra_keys
hash_block_tokens = block_hashes.hash_block_tokens
hash_request_tokens = block_hashes.hash_request_tokens
need_extra_keys = block_hashes.need_extra_keys

Layers = Mapping[str, Any]
"""The specs of a model's layers by name."""

logger = logging.getLogger(__name__)


class PrefixCachingMetrics(metrics.PrefixCachingMetrics):
    """Hit rate over the most recent requests; queries and hits are what the statistics count.

    The rule is the core's: as many old updates leave as it takes, the newest stays.
    """

    def observe(self, stats: Any) -> None:
        """Add an update, an object with requests, queries, hits and reset. Raises WrongArgument."""
        counts = layers.read_fields("stats", stats, "requests", "queries", "hits", "reset")
        super().observe(PrefixCacheStats(**counts))


def estimate_max_model_len(vllm_config: Any, kv_cache_spec: Layers, available_memory: int) -> int:
    """The longest request that fits, at most the configured length; 0 if not even one token.

    Raises WrongArgument, InvalidMemory above a PiB.
    """
    limits, specs = layers.read_limits(vllm_config), layers.read_specs(kv_cache_spec)
    return sizing.estimate_max_model_len(specs, max(0, available_memory), limits)


def check_enough_kv_cache_memory(
    vllm_config: Any, kv_cache_spec: Layers, available_memory: int
) -> None:
    """Raise NoCacheMemory or NotEnoughMemory unless one request of full length fits.

    Without layers it needs nothing. Raises WrongArgument, InvalidMemory besides.
    """
    limits, specs = layers.read_limits(vllm_config), layers.read_specs(kv_cache_spec)
    check_need(lambda probe: max_request_bytes(specs, probe), available_memory, limits)


@of_original_kind()
def create_kv_cache_group_specs(
    kv_cache_spec: Layers, grouped_layer_names: Sequence[Sequence[str]]
) -> list[layers.KVCacheGroupSpec]:
    """One group for each list of layer names, in order.

    Raises LayersDiffer, NoGroupLayer, NoSuchLayer.
    """
    sizing.create_kv_cache_group_specs(layers.read_specs(kv_cache_spec), grouped_layer_names)
    return [
        layers.KVCacheGroupSpec(list(names), kv_cache_spec[names[0]])
        for names in grouped_layer_names
    ]


def is_kv_cache_type_uniform(kv_cache_spec: Layers) -> bool:
    """Whether blocks of all layers are alike; False without layers."""
    return sizing.is_kv_cache_type_uniform(layers.read_specs(kv_cache_spec))


def unify_hybrid_kv_cache_specs(kv_cache_spec: MutableMapping[str, Any]) -> None:
    """Make windows full attention if the model has full attention too; in place."""
    read = layers.read_specs(kv_cache_spec)
    for name, kept in sizing.unify_hybrid_kv_cache_specs(read).items():
        if kept is not read[name]:
            kv_cache_spec[name] = layers.FullAttentionSpec(
                **layers.read_fields("", kv_cache_spec[name], *layers.SHAPE)
            )


@of_original_kind()
def get_kv_cache_config(
    vllm_config: Any, kv_cache_spec: MutableMapping[str, Any], available_memory: int
) -> layers.KVCacheConfig:
    """One group of all layers, windows beside full attention made full in place.

    A request must fit as its layers will be kept. Raises MixedLayers, NothingToCache, LayersDiffer,
    and what `check_enough_kv_cache_memory` raises; the specs are then as they were.
    """
    unified, limits = dict(kv_cache_spec), layers.read_limits(vllm_config)
    unify_hybrid_kv_cache_specs(unified)
    layout = sizing.get_kv_cache_config(layers.read_specs(unified), available_memory, limits)
    kv_cache_spec.update(unified)
    return _as_worker(unified, layout, limits)


@of_original_kind()
def _get_kv_cache_config_uniform_type(
    vllm_config: Any, kv_cache_spec: Layers, available_memory: int
) -> layers.KVCacheConfig:
    """One group and one tensor for each layer, as many blocks as fit or as the config sets.

    Raises NothingToCache, LayersDiffer, WrongArgument, InvalidMemory.
    """
    limits, specs = layers.read_limits(vllm_config), layers.read_specs(kv_cache_spec)
    layout = sizing.make_uniform_config(specs, max(0, available_memory), limits)
    return _as_worker(kv_cache_spec, layout, limits)


@of_original_kind()
def unify_kv_cache_configs(
    kv_cache_configs: MutableSequence[layers.KVCacheConfig], *, same_layers: bool = False
) -> MutableSequence[layers.KVCacheConfig]:
    """Give all workers groups in one order and the fewest blocks of all; in place, same list.

    Tensors keep their sizes. same_layers: whether groups must have the same layers too, which the
    stages of a pipeline have not. Raises RankGroupsDiffer, RanksDiffer, RankLayersDiffer.
    """
    read = [_read_config(config) for config in kv_cache_configs]
    unified = sizing.unify_kv_cache_configs(read, same_layers=same_layers)
    for config, made in zip(kv_cache_configs, unified, strict=True):
        config.kv_cache_groups.sort(
            key=lambda group_id: layers.read_spec(group_id.kv_cache_spec).type_id
        )
        config.num_blocks = made.num_blocks
    return kv_cache_configs


def _as_worker(
    kv_cache_spec: Layers, layout: sizing.KVCacheConfig, limits: sizing.Limits
) -> layers.KVCacheConfig:
    """A configuration of one group as a worker has it; what fits is logged."""
    tokens, fitting = (
        sizing.num_cache_tokens(layout, limits),
        sizing.max_concurrency(layout, limits),
    )
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
