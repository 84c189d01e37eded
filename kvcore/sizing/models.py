# SPDX-License-Identifier: Apache-2.0
"""Reads the properties of a model that determine the cache's size from a Hugging Face config.json.

Shapes have transformers' names. A field that is missing, impossible, or contradicts another is an
error that names field and file; the only defaults are those of the model's own family. families.py
lists known and refused families.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from kvcore.sizing.errors import HeadsDoNotSplit, InvalidField, MissingField, UnknownDtype
from kvcore.sizing.families import UNKNOWN, check_supported
from kvcore.sizing.fields import Fields, read_fields
from kvcore.sizing.heads import heads_per_device
from kvcore.sizing.hybrids import (
    HYBRID_FAMILIES,
    STATE,
    StateLayer,
    count_layers,
    read_kept,
    read_state,
)
from kvcore.sizing.patterns import read_kinds, read_window
from kvcore.sizing.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    LayerSpec,
    SlidingWindowSpec,
    StateSpec,
    check_count,
)
from kvcore.sizing.units import DTYPE_BYTES, read_dtype
from kvcore.types.groups import Kind

MAX_LAYERS = 4096
MAX_HEADS = 2**16

_HEAD_DIM_OF = {"gpt_oss": 64, "qwen3": 128}
_GEMMA_HEAD_DIM = 256
_GEMMA3 = ("gemma3", "gemma3_text")
_GEMMA3_HEADS, _GEMMA3_KV_HEADS = 8, 4


@attrs.frozen
class Layer:
    """One layer's cache in the whole model, before it is split over devices."""

    kind: Kind
    num_kv_heads: int
    head_size: int
    window: int | None


@attrs.frozen
class Model:
    """A model's cache. dtype: of the weights, None if the file does not give it.

    layer_names: of the layers, if they are not one per layer of the model; `layers.0` and so on if
    empty. remark: what the file says of itself (`kvcore_note`).
    """

    file: str
    model_type: str
    layers: tuple[Layer | StateLayer, ...]
    num_heads: int
    dtype: str | None
    max_position_embeddings: int | None
    layer_names: tuple[str, ...] = ()
    remark: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return self.layer_names or tuple(f"layers.{at}" for at in range(len(self.layers)))

    @property
    def attention(self) -> Layer | None:
        """The first layer of attention; None if there is none."""
        return next((each for each in self.layers if isinstance(each, Layer)), None)


def read_model(path: str | Path) -> Model:
    """Read the model that a config.json describes.

    Raises UnreadableModel, MissingField, InvalidField, ContradictoryFields, UnsupportedModel.
    """
    fields = read_fields(path)
    family = fields.find_text("model_type") or UNKNOWN
    check_supported(fields, family)
    num_layers = count_layers(fields, family, MAX_LAYERS)
    num_heads = _read_num_heads(fields, family)
    if family in HYBRID_FAMILIES:
        return _read_hybrid(fields, family, num_layers, num_heads)
    kinds = read_kinds(fields, num_layers)
    if fields.has("kv_lora_rank"):
        layers = _latent_layers(fields, kinds)
    else:
        num_kv_heads = _read_num_kv_heads(fields, family, num_heads)
        head_size = _read_head_size(fields, family, num_heads)
        layers = tuple(
            Layer(kind, num_kv_heads, head_size, read_window(fields, kind)) for kind in kinds
        )
    num_shared = fields.find_count("num_kv_shared_layers", least=0) or 0
    if num_shared >= num_layers:
        reason = f"{num_shared} of {num_layers} layers would share the cache of another"
        raise fields.contradiction("num_kv_shared_layers", "num_hidden_layers", reason)
    return Model(
        file=fields.file,
        model_type=family,
        layers=layers[: num_layers - num_shared],
        num_heads=num_heads,
        dtype=_read_dtype(fields),
        max_position_embeddings=fields.find_count("max_position_embeddings"),
        remark=fields.find_text("kvcore_note"),
    )


def _read_hybrid(fields: Fields, family: str, num_layers: int, num_heads: int) -> Model:
    """Read a model with layers that keep states; those that keep nothing are left out."""
    kept = read_kept(fields, family, num_layers)
    state = read_state(fields, family)
    attention = Layer(
        "full_attention",
        _read_num_kv_heads(fields, family, num_heads),
        _read_head_size(fields, family, num_heads),
        None,
    )
    parts = [
        (f"layers.{index}" + (f".{part}" if len(each) > 1 else ""), part)
        for index, each in enumerate(kept)
        for part in each
    ]
    return Model(
        file=fields.file,
        model_type=family,
        layers=tuple(state if part == STATE else attention for _, part in parts),
        num_heads=num_heads,
        dtype=_read_dtype(fields),
        max_position_embeddings=fields.find_count("max_position_embeddings"),
        layer_names=tuple(name for name, _ in parts),
        remark=fields.find_text("kvcore_note"),
    )


def make_layer_specs(
    model: Model,
    *,
    block_size: int = 16,
    dtype: str | None = None,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
) -> dict[str, LayerSpec]:
    """Return the layers as one device keeps them, named `layers.0` and so on.

    dtype: of the cache; None: that of the weights. tensor_parallel: devices that share the heads;
    if there are fewer heads than devices, a device keeps a copy, as always of a latent vector.
    context_parallel: ranks that share the tokens of full attention, whose blocks then hold
    block_size tokens on each; windows and states are the same on all ranks. Raises HeadsDoNotSplit,
    MissingField, InvalidField, UnknownDtype, InvalidCount.
    """
    check_count("tensor_parallel", tensor_parallel)
    check_count("context_parallel", context_parallel)
    kept = _cache_dtype(model, dtype)
    if model.num_heads % tensor_parallel:
        raise HeadsDoNotSplit(
            num_heads=model.num_heads, heads="attention heads", tensor_parallel=tensor_parallel
        )
    return {
        name: _state_spec(model, layer, block_size, tensor_parallel)
        if isinstance(layer, StateLayer)
        else _layer_spec(layer, block_size, kept, tensor_parallel, context_parallel)
        for name, layer in zip(model.names, model.layers, strict=True)
    }


def _cache_dtype(model: Model, dtype: str | None) -> str:
    if dtype is not None:
        return read_dtype(dtype)
    reason = "it is the cache's number format, which has no default: give one, like bfloat16"
    return weights_dtype(model, reason)


def weights_dtype(model: Model, reason: str) -> str:
    """Return the weights' number format. reason: why it is needed. Raises MissingField,
    InvalidField.
    """
    if model.dtype is None:
        raise MissingField(file=model.file, field="torch_dtype", reason=reason)
    try:
        return read_dtype(model.dtype)
    except UnknownDtype as error:
        raise InvalidField(
            file=model.file,
            field="torch_dtype",
            value=model.dtype,
            expected=f"one of {', '.join(DTYPE_BYTES)}, or another format must be given",
        ) from error


def _state_spec(
    model: Model, layer: StateLayer, block_size: int, tensor_parallel: int
) -> LayerSpec:
    """Make the spec of a state in the model's own number format, whatever the cache's is."""
    own = weights_dtype(model, "states are kept in it")
    num_bytes = layer.num_bytes(own, tensor_parallel)
    return StateSpec(
        block_size=block_size, dtype=own, state_bytes=num_bytes, padded_bytes=num_bytes
    )


def _layer_spec(
    layer: Layer, block_size: int, dtype: str, tensor_parallel: int, context_parallel: int
) -> LayerSpec:
    made: dict[str, Any] = {"head_size": layer.head_size, "dtype": dtype}
    split: dict[str, Any] = {
        "block_size": block_size * context_parallel,
        "context_parallel": context_parallel,
    }
    if layer.kind == "mla":
        return FullAttentionSpec(**made, **split, num_kv_heads=layer.num_kv_heads, use_mla=True)
    made["num_kv_heads"] = heads_per_device(layer.num_kv_heads, tensor_parallel)
    if layer.window is None:
        return FullAttentionSpec(**made, **split)
    kind = SlidingWindowSpec if layer.kind == "sliding_window" else ChunkedLocalSpec
    return kind(**made, block_size=block_size, window=layer.window)


def _latent_layers(fields: Fields, kinds: tuple[Kind, ...]) -> tuple[Layer, ...]:
    rank = fields.count("kv_lora_rank", "MLA keeps it")
    rope = fields.count("qk_rope_head_dim", "MLA keeps it beside kv_lora_rank")
    if set(kinds) != {"full_attention"}:
        windowed = "layer_types" if fields.has("layer_types") else "sliding_window"
        if "chunked_local" in kinds:
            windowed = "attention_chunk_size"
        raise fields.contradiction("kv_lora_rank", windowed, "MLA has no window")
    return tuple(Layer("mla", 1, rank + rope, None) for _ in kinds)


def _read_num_heads(fields: Fields, family: str) -> int:
    found = fields.find_count("num_attention_heads", most=MAX_HEADS)
    if found is None and family in _GEMMA3:
        return _GEMMA3_HEADS
    reason = "heads and their size follow from it"
    return found or fields.count("num_attention_heads", reason, most=MAX_HEADS)


def _read_num_kv_heads(fields: Fields, family: str, num_heads: int) -> int:
    default = _GEMMA3_KV_HEADS if family in _GEMMA3 else num_heads
    found = fields.find_count("num_key_value_heads", most=MAX_HEADS) or default
    if num_heads % found:
        reason = f"{found} does not divide {num_heads}"
        raise fields.contradiction("num_key_value_heads", "num_attention_heads", reason)
    return found


def _read_head_size(fields: Fields, family: str, num_heads: int) -> int:
    default = _GEMMA_HEAD_DIM if family.startswith("gemma") else _HEAD_DIM_OF.get(family)
    found = fields.find_count("head_dim", most=MAX_HEADS)
    if found is None and family == "nemotron_h":
        found = fields.find_count("attention_head_dim", most=MAX_HEADS)
    found = found or default
    if found is not None:
        return found
    hidden_size = fields.count("hidden_size", "without head_dim, a head's size follows from it")
    if hidden_size % num_heads:
        reason = f"{num_heads} heads do not divide {hidden_size}, and there is no head_dim"
        raise fields.contradiction("hidden_size", "num_attention_heads", reason)
    return hidden_size // num_heads


def _read_dtype(fields: Fields) -> str | None:
    old, new = fields.find_text("torch_dtype"), fields.find_text("dtype")
    if old is not None and new is not None and old != new:
        raise fields.contradiction("torch_dtype", "dtype", f"{old} and {new}")
    said = new or old
    return None if said is None else said.removeprefix("torch.")
