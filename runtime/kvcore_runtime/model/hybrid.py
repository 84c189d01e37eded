# SPDX-License-Identifier: Apache-2.0
"""The layers of a published hybrid model, in their real shapes, as this runtime can run them.

Read from a config.json: the order of the layers; of attention the heads and their size; of layers
with states the heads, their sizes, the convolution's length, and the element types of both parts of
a state, and with them the bytes of every page; the hidden size, unless another one is given.
Qwen3-Next is read (model_type qwen3_next), whose layers with states are gated delta nets as in
transformers (delta_rule.py, with the gated norm behind them). Not as in the real model are the
weights, which are random; attention, which has neither an output gate nor norms of queries and
keys, and rotates whole heads, not a quarter; the MLP, which is dense; and the vocabulary. None of
these changes what a layer keeps.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import torch

from kvcore.sizing import Model, StateLayer, read_model
from kvcore.sizing.fields import read_fields
from kvcore_runtime.attention.delta_rule import DeltaShape
from kvcore_runtime.attention.visibility import FULL, STATE
from kvcore_runtime.errors import UnsupportedModelFile
from kvcore_runtime.model.model import LlamaConfig


def read_hybrid(
    path: str | Path,
    *,
    num_layers: int | None = None,
    hidden_size: int | None = None,
    vocab_size: int = 260,
    max_model_len: int = 2048,
) -> tuple[LlamaConfig, Model]:
    """Read the shape of a hybrid model, and what `kvcore size` reads of the same layers.

    num_layers: the first of them; None for all. hidden_size: None for the file's own. The inner
    size of an MLP is the hidden size. Raises UnsupportedModelFile, and what `read_model` raises.
    """
    model, fields = read_model(path), read_fields(path)
    kept = slice(num_layers)
    model = attrs.evolve(model, layers=model.layers[kept], layer_names=model.layer_names[kept])
    state = next((each for each in model.layers if isinstance(each, StateLayer)), None)
    attention = model.attention
    if model.model_type != "qwen3_next":
        raise UnsupportedModelFile(what="model_type", value=model.model_type, expected="qwen3_next")
    if state is None or attention is None:
        raise UnsupportedModelFile(
            what="num_layers", value=num_layers, expected="layers of attention and with states"
        )
    hidden = hidden_size or fields.count("hidden_size", "it is the width of all layers")
    shape = LlamaConfig(
        num_layers=len(model.layers),
        hidden_size=hidden,
        intermediate_size=hidden,
        num_heads=model.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_size,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        visibilities=tuple(
            STATE if isinstance(each, StateLayer) else FULL for each in model.layers
        ),
        delta=_delta(state),
    )
    return shape, model


def _delta(state: StateLayer) -> DeltaShape:
    """Return the shape of a delta net, from the sizes of its state."""
    key_dim, value_dim = state.group_channels // 2, state.channels // state.heads
    kept = None if state.state_dtype is None else getattr(torch, state.state_dtype)
    return DeltaShape(
        num_key_heads=state.groups,
        num_value_heads=state.heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel_size=state.positions + 1,
        state_dtype=kept,
    )
