# SPDX-License-Identifier: Apache-2.0
"""Models read from a config.json: which layer keeps what, and split over devices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcore.sizing import AttentionSpec, Layer, Model, make_layer_specs, read_model
from kvcore.sizing.errors import ContradictoryFields, HeadsDoNotSplit
from tests.sizing.models import (
    CONFIGS,
    GEMMA3,
    HYBRIDS,
    IN_TURNS,
    LLAMA,
    LLAMA4,
    MLA,
    QWEN,
    write,
)

EXAMPLES: dict[str, tuple[int, dict[tuple[str, int | None], int]]] = {
    # Bytes of a token by hand: key and value (MLA: one vector) * heads * size * bytes * layers.
    "llama-3-8b": (2 * 8 * 128 * 2 * 32, {("full_attention", None): 32}),
    "llama-3.1-70b": (2 * 8 * 128 * 2 * 80, {("full_attention", None): 80}),
    "qwen2.5-7b": (2 * 4 * 128 * 2 * 28, {("full_attention", None): 28}),
    "qwen3-8b": (2 * 8 * 128 * 2 * 36, {("full_attention", None): 36}),
    "mistral-7b-v0.1": (2 * 8 * 128 * 2 * 32, {("sliding_window", 4096): 32}),
    "gemma-2-9b-it": (
        2 * 8 * 256 * 2 * 42,
        {("full_attention", None): 21, ("sliding_window", 4096): 21},
    ),
    "gemma-3-27b": (
        2 * 16 * 128 * 2 * 62,
        {("full_attention", None): 10, ("sliding_window", 1024): 52},
    ),
    "gpt-oss-20b": (
        2 * 8 * 64 * 2 * 24,
        {("full_attention", None): 12, ("sliding_window", 128): 12},
    ),
    "deepseek-v2": ((512 + 64) * 2 * 60, {("mla", None): 60}),
    "deepseek-v3": ((512 + 64) * 2 * 61, {("mla", None): 61}),
    "llama-4-scout": (
        2 * 8 * 128 * 2 * 48,
        {("full_attention", None): 12, ("chunked_local", 8192): 36},
    ),
}


def attention(model: Model) -> list[Layer]:
    """Return the layers of a model of which each is attention."""
    found = [layer for layer in model.layers if isinstance(layer, Layer)]
    assert len(found) == len(model.layers)
    return found


def kinds(path: Path) -> str:
    """Return the kind of each layer of a model as one letter: f, s, c or m."""
    return "".join(layer.kind[0] for layer in attention(read_model(path)))


def test_every_example_file_is_read_below() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*EXAMPLES, *HYBRIDS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_comes_to_what_its_figures_say(name: str) -> None:
    token_bytes, layers = EXAMPLES[name]
    model = read_model(CONFIGS / f"{name}.json")
    assert Counter((layer.kind, layer.window) for layer in attention(model)) == layers
    specs = make_layer_specs(model)
    assert sum(spec.token_bytes for spec in specs.values()) == token_bytes
    assert list(specs) == [f"layers.{index}" for index in range(sum(layers.values()))]


@pytest.mark.parametrize(
    ("name", "token_bytes"), [("llama-3-8b", 131_072), ("deepseek-v3", 70_272)]
)
def test_published_sizes_of_a_token(name: str, token_bytes: int) -> None:
    specs = make_layer_specs(read_model(CONFIGS / f"{name}.json"))
    assert sum(spec.token_bytes for spec in specs.values()) == token_bytes


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (LLAMA, {}, "ffff"),
        (LLAMA, {"sliding_window": None}, "ffff"),
        (LLAMA, {"sliding_window": 64}, "ssss"),
        (LLAMA, {"sliding_window": 64, "layer_types": IN_TURNS}, "sfsf"),
        (QWEN, {}, "ffff"),
        (QWEN, {"use_sliding_window": False}, "ffff"),
        (QWEN, {"use_sliding_window": True}, "fffs"),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 0}, "ssss"),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 28}, "ffff"),
        (LLAMA, {"model_type": "gemma2", "sliding_window": 64}, "sfsf"),
        (LLAMA, {"model_type": "gpt_oss", "sliding_window": 64}, "sfsf"),
        (LLAMA, {"model_type": "gpt_oss", "sliding_window": None}, "ffff"),
        (GEMMA3, {}, "sssssfsssssf"),
        (GEMMA3, {"sliding_window_pattern": 4}, "sssfsssfsssf"),
        (GEMMA3, {"_sliding_window_pattern": 5}, "ssssfssssfss"),
        (LLAMA4, {}, "cccf"),
        (LLAMA4, {"no_rope_layers": []}, "cccf"),
        (LLAMA4, {"no_rope_layers": [1, 0, 0, 1]}, "cffc"),
        (LLAMA4, {"no_rope_layer_interval": 2}, "cfcf"),
        (LLAMA4, {"attention_chunk_size": None}, "ffff"),
        (MLA, {}, "mmmm"),
        (LLAMA, {"num_kv_shared_layers": 1}, "fff"),
    ],
)
def test_layers_are_of_the_kinds_that_the_family_gives_them(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], expected: str
) -> None:
    assert kinds(write(tmp_path, base, **changes)) == expected


@pytest.mark.parametrize(
    ("base", "changes", "heads", "size"),
    [
        (LLAMA, {}, 2, 512 // 8),
        (LLAMA, {"num_key_value_heads": ...}, 8, 512 // 8),
        (LLAMA, {"head_dim": 96}, 2, 96),
        (LLAMA, {"head_dim": None}, 2, 512 // 8),
        (LLAMA, {"model_type": "qwen3"}, 2, 128),
        (GEMMA3, {"num_attention_heads": ..., "num_key_value_heads": ...}, 4, 256),
        (MLA, {}, 1, 512 + 64),
    ],
)
def test_heads_follow_from_the_file_or_from_the_familys_defaults(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], heads: int, size: int
) -> None:
    layer = attention(read_model(write(tmp_path, base, **changes)))[0]
    assert (layer.num_kv_heads, layer.head_size) == (heads, size)


def test_a_model_of_several_parts_is_read_from_its_language_model(tmp_path: Path) -> None:
    outer = {"model_type": "gemma3", "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    inner = {name: value for name, value in GEMMA3.items() if name != "torch_dtype"}
    inner["eos_token_id"] = 1
    path = write(tmp_path, outer, text_config=inner, num_hidden_layers=None)
    model = read_model(path)
    assert (model.model_type, model.dtype, len(model.layers)) == ("gemma3_text", "bfloat16", 12)
    with pytest.raises(ContradictoryFields, match=r"num_hidden_layers and text_config.num_hidden"):
        read_model(write(tmp_path, outer, text_config=inner, num_hidden_layers=62))


@pytest.mark.parametrize(
    ("base", "num_devices", "heads"), [(LLAMA, 1, 2), (LLAMA, 2, 1), (LLAMA, 8, 1), (MLA, 8, 1)]
)
def test_devices_share_heads_and_copy_what_does_not_split(
    tmp_path: Path, base: dict[str, Any], num_devices: int, heads: int
) -> None:
    model = read_model(write(tmp_path, base))
    made = make_layer_specs(model, tensor_parallel=num_devices).values()
    specs = [spec for spec in made if isinstance(spec, AttentionSpec)]
    assert len(specs) == len(model.layers)
    assert {spec.num_kv_heads for spec in specs} == {heads}
    assert {spec.head_size for spec in specs} == {attention(model)[0].head_size}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_devices", "named"),
    [
        (8, 2, 3, "8 attention heads"),
        (8, 2, 16, "8 attention heads"),
        (12, 6, 4, "6 key-value heads"),
    ],
)
def test_heads_that_do_not_split_are_refused(
    tmp_path: Path, num_heads: int, num_kv_heads: int, num_devices: int, named: str
) -> None:
    changes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    model = read_model(write(tmp_path, LLAMA, head_dim=64, **changes))
    with pytest.raises(HeadsDoNotSplit, match=f"{named} do not split over {num_devices} devices"):
        make_layer_specs(model, tensor_parallel=num_devices)


def test_the_cache_has_the_weights_dtype_unless_another_is_given(tmp_path: Path) -> None:
    for name in ("bfloat16", "torch.bfloat16"):
        model = read_model(write(tmp_path, LLAMA, torch_dtype=name))
        assert make_layer_specs(model)["layers.0"].dtype == "bfloat16"
        assert make_layer_specs(model, dtype="fp8")["layers.0"].dtype == "fp8"
    model = read_model(write(tmp_path, LLAMA, torch_dtype=..., dtype="float16"))
    assert make_layer_specs(model)["layers.0"].dtype == "float16"
