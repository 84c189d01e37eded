# SPDX-License-Identifier: Apache-2.0
"""A rank's share of a model: some of the heads, and some of the inner size of each MLP.

Each rank computes one addend of a layer's output; the model's `reduce` adds them. Every rank has
the whole embedding, norms and head.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvcore_runtime.errors import UnsupportedModelFile
from kvcore_runtime.model.model import LayerWeights, Llama, LlamaConfig, Reduce
from kvcore_runtime.ranks.errors import UnevenShard


def shard(model: Llama, rank: int, world: int, reduce: Reduce | None = None) -> Llama:
    """Return a rank's share of a model, as a model whose weights are copies.

    rank: 0 to world - 1. reduce: sums a tensor over all ranks, in place or not; see `Links.reduce`.
    Raises UnevenShard unless world divides the numbers of query and key-value heads and the inner
    size; UnsupportedModelFile for a model with delta nets.
    """
    config = model.config
    _refuse_delta(config)
    sizes = {
        "query heads": config.num_heads,
        "key-value heads": config.num_kv_heads,
        "inner size": config.intermediate_size,
    }
    for what, size in sizes.items():
        if world < 1 or size % world:
            raise UnevenShard(what=what, size=size, world=world)
    shape = attrs.evolve(
        config,
        num_heads=config.num_heads // world,
        num_kv_heads=config.num_kv_heads // world,
        intermediate_size=config.intermediate_size // world,
    )

    def part(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(world, dim)[rank]

    def share(layer: LayerWeights) -> LayerWeights:
        return attrs.evolve(
            layer,
            qkv=torch.cat([part(each) for each in _split_qkv(layer.qkv, config)]),
            output=part(layer.output, 1).contiguous(),
            gate_up=torch.cat([part(each) for each in layer.gate_up.chunk(2)]),
            down=part(layer.down, 1).contiguous(),
        )

    weights = attrs.evolve(model.weights, layers=tuple(map(share, model.weights.layers)))
    return attrs.evolve(model, config=shape, weights=weights, reduce=reduce)


def pad_heads(model: Llama, world: int) -> Llama:
    """Append heads of zeros until world divides the number of heads. Returns an equivalent model.

    A head of zeros adds nothing to any sum, but costs cache and time. If world divides the number
    of heads already, this is the model itself. Raises UnsupportedModelFile as `shard` does.
    """
    config = model.config
    _refuse_delta(config)
    num_kv = -(-config.num_kv_heads // world) * world
    if num_kv == config.num_kv_heads:
        return model
    num_heads = config.num_heads // config.num_kv_heads * num_kv
    more_heads, more_kv = num_heads - config.num_heads, num_kv - config.num_kv_heads

    def zeros(tensor: Tensor, num_more: int, dim: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] = num_more * config.head_dim
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)

    def pad(layer: LayerWeights) -> LayerWeights:
        query, *others = _split_qkv(layer.qkv, config)
        parts = [zeros(query, more_heads, 0), *(zeros(each, more_kv, 0) for each in others)]
        return attrs.evolve(layer, qkv=torch.cat(parts), output=zeros(layer.output, more_heads, 1))

    weights = attrs.evolve(model.weights, layers=tuple(map(pad, model.weights.layers)))
    shape = attrs.evolve(config, num_heads=num_heads, num_kv_heads=num_kv)
    return attrs.evolve(model, config=shape, weights=weights)


def _refuse_delta(config: LlamaConfig) -> None:
    """Raise UnsupportedModelFile for a model with delta nets, which ranks cannot share."""
    if config.delta is not None:
        expected = "None in a model that ranks share"
        raise UnsupportedModelFile(what="delta", value=config.delta, expected=expected)


def _split_qkv(qkv: Tensor, config: LlamaConfig) -> tuple[Tensor, ...]:
    """Split a weight into the rows of queries, keys, values and, if the layer has them, gates."""
    num_queries = config.num_heads * config.head_dim
    return qkv[:num_queries], *qkv[num_queries:].split(config.num_kv_heads * config.head_dim)
