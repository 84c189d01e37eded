# SPDX-License-Identifier: Apache-2.0
"""Computes the memory of a device for the cache: a share of the total, less the model's weights.

The parameters of dense models are counted from their config.json: embeddings, attention, MLP, norms
and the output head, as one of several devices keeps them (with a copy of the norms, and of
key-value heads if there are fewer than devices). Only families in `_FAMILIES` are counted. Experts,
quantized weights and parts besides the language model are refused by field, since a wrong number
would promise memory that does not exist.
"""

from __future__ import annotations

from decimal import Decimal

import attrs

from kvcore.sizing.errors import UnsupportedModel, WeightsDoNotFit
from kvcore.sizing.fields import NESTED, Fields, read_fields
from kvcore.sizing.heads import heads_per_device
from kvcore.sizing.models import Model, weights_dtype
from kvcore.sizing.specs import blocks_of, check_count
from kvcore.sizing.units import DTYPE_BYTES


@attrs.frozen(kw_only=True)
class Budget:
    """One device's memory. num_parameters: number counted, None if the weights' size was given."""

    gpu_bytes: int
    utilization: Decimal
    weights_bytes: int
    num_parameters: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes for weights and cache together."""
        return int(self.gpu_bytes * self.utilization)

    @property
    def cache_bytes(self) -> int:
        """Bytes left for the cache. Raises WeightsDoNotFit."""
        left = self.usable_bytes - self.weights_bytes
        if left > 0:
            return left
        raise WeightsDoNotFit(
            weights_bytes=self.weights_bytes,
            usable_bytes=self.usable_bytes,
            utilization=self.utilization,
            gpu_bytes=self.gpu_bytes,
            available=left,
        )


@attrs.frozen(kw_only=True)
class _Family:
    """The parameters of a family's layers. norms: number per layer. qkv_bias: always present;
    otherwise all projections have one if the file sets `attention_bias`. head_norms: one over
    queries, one over keys. tied: the output head is the embedding, unless the file says otherwise.
    """

    norms: int = 2
    qkv_bias: bool = False
    head_norms: bool = False
    tied: bool = False


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms=True),
    "gemma": _Family(tied=True),
    "gemma2": _Family(norms=4, tied=True),
    "gemma3_text": _Family(norms=4, head_norms=True, tied=True),
}
COUNTED = ", ".join(_FAMILIES)
"""The values of `model_type` whose parameters are counted."""

_NOT_COUNTED = {
    "quantization_config": "quantized weights are not counted",
    "compression_config": "quantized weights are not counted",
    NESTED: "models of several parts are not counted",
    "vision_config": "models of several parts are not counted",
    "audio_config": "models of several parts are not counted",
    "num_local_experts": "experts are not counted",
    "num_experts": "experts are not counted",
}


def make_budget(
    model: Model,
    gpu_bytes: int,
    utilization: Decimal,
    *,
    weights_bytes: int | None = None,
    tensor_parallel: int = 1,
) -> Budget:
    """Compute the budget of each device.

    weights_bytes: of the whole model, spread evenly; None: count the parameters in the weights'
    number format. Raises what `count_parameters` raises.
    """
    check_count("tensor_parallel", tensor_parallel)
    if weights_bytes is not None:
        share = blocks_of(weights_bytes, tensor_parallel)
        return Budget(gpu_bytes=gpu_bytes, utilization=utilization, weights_bytes=share)
    count = count_parameters(model, tensor_parallel=tensor_parallel)
    dtype = weights_dtype(model, "the weights are counted in this number format")
    return Budget(
        gpu_bytes=gpu_bytes,
        utilization=utilization,
        weights_bytes=count * DTYPE_BYTES[dtype],
        num_parameters=count,
    )


def count_parameters(model: Model, *, tensor_parallel: int = 1) -> int:
    """Count the parameters that one device keeps if the devices share the attention heads.

    Raises UnsupportedModel, MissingField, InvalidField, HeadsDoNotSplit, InvalidCount.
    """
    check_count("tensor_parallel", tensor_parallel)
    fields = read_fields(model.file)
    family = _read_family(fields, model.model_type)
    layer = model.attention
    assert layer is not None, "a family whose parameters are counted has attention"
    hidden, head_size = fields.count("hidden_size", _COUNTS), layer.head_size
    inner = blocks_of(fields.count("intermediate_size", _COUNTS), tensor_parallel)
    vocabulary = blocks_of(fields.count("vocab_size", _COUNTS), tensor_parallel)
    queries = model.num_heads // tensor_parallel
    keys = heads_per_device(layer.num_kv_heads, tensor_parallel)
    attention = hidden * head_size * 2 * (queries + keys)
    bias = fields.find_flag("attention_bias") is True
    if bias or family.qkv_bias:
        attention += head_size * (queries + 2 * keys) + (hidden if bias else 0)
    mlp = 3 * hidden * inner
    if fields.find_flag("mlp_bias"):
        mlp += 2 * inner + hidden
    norms = family.norms * hidden + (2 * head_size if family.head_norms else 0)
    said = fields.find_flag("tie_word_embeddings")
    tied = family.tied if said is None else said
    embeddings = vocabulary * hidden * (1 if tied else 2)
    return len(model.layers) * (attention + mlp + norms) + hidden + embeddings


_COUNTS = "the weights are counted from it"


def _read_family(fields: Fields, family: str) -> _Family:
    for name, reason in _NOT_COUNTED.items():
        if fields.has(name):
            raise _unsupported(fields, name, fields.values[name], reason)
    if family not in _FAMILIES:
        reason = f"counted are the weights of {COUNTED}"
        raise _unsupported(fields, "model_type", family, reason)
    return _FAMILIES[family]


def _unsupported(fields: Fields, name: str, value: object, reason: str) -> UnsupportedModel:
    reason += "; give the size of the weights (--weights)"
    return UnsupportedModel(file=fields.file, field=name, value=value, reason=reason)
