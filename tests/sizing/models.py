# SPDX-License-Identifier: Apache-2.0
"""Layers small enough to do on paper, and the example files with what their figures come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcore.sizing import FullAttentionSpec, LayerSpec, SlidingWindowSpec

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
BLOCK = 16
PAGE = 2 * BLOCK * 1 * 64 * 2
"""Key and value, 16 tokens, 1 head of 64 numbers of 2 bytes."""


def full(**changes: Any) -> FullAttentionSpec:
    """Return a layer of full attention with a page of `PAGE` bytes."""
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": "float16"}
    return FullAttentionSpec(**{**shape, **changes})


def sliding(window: int = 16, **changes: Any) -> SlidingWindowSpec:
    """Return a layer with a sliding window and the same page."""
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": "float16"}
    return SlidingWindowSpec(window=window, **{**shape, **changes})


def layers(*specs: LayerSpec) -> dict[str, LayerSpec]:
    """Return a model of these layers, named by their places."""
    return {f"layer {index}": spec for index, spec in enumerate(specs)}


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
GEMMA3: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma3_text",
    "sliding_window": 64,
    "num_hidden_layers": 12,
}
LLAMA4: dict[str, Any] = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 256}
MLA: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
QWEN: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen2",
    "sliding_window": 64,
    "max_window_layers": 3,
}
HYBRIDS = (
    "qwen3-next-80b-a3b",
    "nemotron-h-8b",
    "jamba-v0.1",
    "falcon-h1-7b",
    "granite-4.0-h-small",
    "lfm2-1.2b",
)
"""The example files of models with states."""
WITHOUT_STATES = sorted(path for path in CONFIGS.glob("*.json") if path.stem not in HYBRIDS)
IN_TURNS = ["sliding_attention", "full_attention"] * 2


def write(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    """Write a config.json with these fields; a field that is changed to `...` is left out."""
    fields = {name: value for name, value in {**base, **changes}.items() if value is not ...}
    path = folder / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path
