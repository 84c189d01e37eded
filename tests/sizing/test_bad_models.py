# SPDX-License-Identifier: Apache-2.0
"""Files that describe no model: the error names field and file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.sizing import make_layer_specs, read_model
from kvcore.sizing.errors import (
    ContradictoryFields,
    InvalidField,
    MissingField,
    UnreadableModel,
    UnsupportedModel,
)
from kvcore.types.errors import KvcoreError
from tests.sizing.models import GEMMA3, IN_TURNS, LLAMA, LLAMA4, MLA, QWEN, write

MISSING = [
    (LLAMA, "num_hidden_layers"),
    (LLAMA, "num_attention_heads"),
    (LLAMA, "hidden_size"),
    (MLA, "qk_rope_head_dim"),
    (MLA, "kv_lora_rank"),
    ({**MLA, "model_type": "minicpm3"}, "kv_lora_rank"),
    (GEMMA3, "sliding_window"),
    (LLAMA4, "attention_chunk_size"),
    ({**QWEN, "use_sliding_window": True}, "max_window_layers"),
    ({**QWEN, "use_sliding_window": True}, "sliding_window"),
    ({**LLAMA, "layer_types": IN_TURNS, "sliding_window": 64}, "sliding_window"),
    ({**LLAMA4, "layer_types": ["chunked_attention"] * 4}, "attention_chunk_size"),
]


@pytest.mark.parametrize(("base", "name"), MISSING)
def test_a_missing_field_is_named_with_its_file(
    tmp_path: Path, base: dict[str, Any], name: str
) -> None:
    read_model(write(tmp_path, base))
    path = write(tmp_path, base, **{name: ...})
    with pytest.raises(MissingField, match=f"field {name} is missing") as caught:
        read_model(path)
    assert caught.value.fields["file"] == str(path)
    assert str(path) in str(caught.value)


def test_a_file_without_dtype_needs_one_that_is_given(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, LLAMA, torch_dtype=...))
    with pytest.raises(
        MissingField, match=r"torch_dtype is missing: .*, which has no default: give"
    ):
        make_layer_specs(model)
    assert make_layer_specs(model, dtype="fp16")["layers.0"].dtype == "float16"
    with pytest.raises(InvalidField, match='torch_dtype is "mxfp4", must be one of float32'):
        make_layer_specs(read_model(write(tmp_path, LLAMA, torch_dtype="mxfp4")))


BAD: list[tuple[dict[str, Any], dict[str, Any], type[KvcoreError], str]] = [
    (LLAMA, {"num_hidden_layers": 0}, InvalidField, "num_hidden_layers is 0, must be an integer"),
    (LLAMA, {"num_hidden_layers": 10**9}, InvalidField, "must be an integer from 1 to 4096"),
    (LLAMA, {"num_hidden_layers": "4"}, InvalidField, 'num_hidden_layers is "4"'),
    (LLAMA, {"num_attention_heads": -8}, InvalidField, "num_attention_heads is -8"),
    (LLAMA, {"num_key_value_heads": 0}, InvalidField, "num_key_value_heads is 0"),
    (LLAMA, {"num_key_value_heads": True}, InvalidField, "num_key_value_heads is true"),
    (LLAMA, {"head_dim": 64.0}, InvalidField, "head_dim is 64.0"),
    (LLAMA, {"sliding_window": 0}, InvalidField, "sliding_window is 0"),
    (LLAMA, {"torch_dtype": 16}, InvalidField, "torch_dtype is 16, must be text"),
    (LLAMA, {"layer_types": "full"}, InvalidField, "layer_types is .*, must be a list"),
    (LLAMA, {"text_config": [1]}, InvalidField, "text_config is .*, must be an object"),
    (QWEN, {"use_sliding_window": "no"}, InvalidField, "must be true or false"),
    (GEMMA3, {"sliding_window_pattern": 0}, InvalidField, "sliding_window_pattern is 0"),
    (LLAMA4, {"no_rope_layers": [1, 0, 2, 1]}, InvalidField, "a list of 0 and 1"),
    (LLAMA, {"num_key_value_heads": 3}, ContradictoryFields, "num_key_value_heads and num_att"),
    (LLAMA, {"num_key_value_heads": 16}, ContradictoryFields, "16 does not divide 8"),
    (LLAMA, {"hidden_size": 500}, ContradictoryFields, "hidden_size and num_attention_heads"),
    (LLAMA, {"layer_types": IN_TURNS[:3]}, ContradictoryFields, "3 items for 4 layers"),
    (LLAMA, {"dtype": "float16"}, ContradictoryFields, "torch_dtype and dtype"),
    (LLAMA, {"num_kv_shared_layers": 4}, ContradictoryFields, "num_kv_shared_layers and num_h"),
    (LLAMA4, {"no_rope_layers": [1]}, ContradictoryFields, "1 items for 4 layers"),
    (MLA, {"sliding_window": 64}, ContradictoryFields, "kv_lora_rank and sliding_window"),
    (MLA, {"attention_chunk_size": 64}, ContradictoryFields, "kv_lora_rank and attention_chunk"),
    (
        QWEN,
        {"layer_types": IN_TURNS, "use_sliding_window": False},
        ContradictoryFields,
        "layer_types and use_sliding_window",
    ),
    (
        {**GEMMA3, "num_hidden_layers": 4},
        {"layer_types": IN_TURNS, "sliding_window_pattern": 6},
        ContradictoryFields,
        "layer_types and sliding_window_pattern",
    ),
    (LLAMA, {"layer_types": ["linear_attention"] * 4}, UnsupportedModel, r"layer_types\[0\]"),
    (
        LLAMA,
        {"model_type": "new", "layer_types": ["retnet"] * 4},
        UnsupportedModel,
        r'layer_types\[0\] is "retnet": known are full.*chunked.* \(model_type is "new"\)',
    ),
    (
        LLAMA,
        {"model_type": ..., "layer_types": ["retnet"] * 4},
        UnsupportedModel,
        r"chunked_attention \(no model_type\)",
    ),
    (LLAMA, {"mamba_d_state": 16}, UnsupportedModel, "mamba_d_state is 16: state layers"),
    (
        LLAMA,
        {"state_size": 128, "model_type": "new"},
        UnsupportedModel,
        'state_size is 128: .*model_type is "new"',
    ),
    (LLAMA, {"ssm_state_size": 128}, UnsupportedModel, "ssm_state_size is 128: state layers"),
    (LLAMA, {"model_type": "mamba2"}, UnsupportedModel, 'model_type is "mamba2": state layers'),
    (LLAMA, {"model_type": "kimi_linear"}, UnsupportedModel, 'model_type is "kimi_linear"'),
    (MLA, {"kv_lora_rank": None}, MissingField, "kv_lora_rank is missing: models of type deep"),
    (
        LLAMA,
        {"qk_rope_head_dim": 64},
        MissingField,
        "kv_lora_rank is missing: qk_rope_head_dim is set",
    ),
    (
        LLAMA,
        {"model_type": "new", "num_attention_heads": ...},
        MissingField,
        "field num_attention_heads is missing",
    ),
    (MLA, {"index_head_dim": 128}, UnsupportedModel, "index_head_dim is 128: the indexer"),
    (LLAMA, {"is_encoder_decoder": True}, UnsupportedModel, "is_encoder_decoder is true"),
]


@pytest.mark.parametrize(("base", "changes", "error", "said"), BAD)
def test_what_no_model_has_is_refused_with_field_and_file(
    tmp_path: Path,
    base: dict[str, Any],
    changes: dict[str, Any],
    error: type[KvcoreError],
    said: str,
) -> None:
    path = write(tmp_path, base, **changes)
    with pytest.raises(error, match=said) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"{path}: field")
    if "value" in caught.value.fields:
        field, value = caught.value.fields["field"], caught.value.fields["value"]
        listed = changes.get("layer_types", [None])[0]
        assert value == changes.get(str(field), listed)


def test_fields_that_contradict_each_other_are_given_with_their_values(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA, text_config={"hidden_size": 64})
    with pytest.raises(ContradictoryFields) as caught:
        read_model(path)
    assert caught.value.fields == {
        "file": str(path),
        "first": "hidden_size",
        "first_value": LLAMA["hidden_size"],
        "second": "text_config.hidden_size",
        "second_value": 64,
        "reason": f"{LLAMA['hidden_size']} and 64",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b'{"num_hidden_layers": 4', "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (json.dumps([LLAMA]).encode(), "is not a JSON object"),
        (b"null", "is not a JSON object"),
    ],
)
def test_a_file_that_is_no_description_is_refused(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableModel, match=said) as caught:
        read_model(path)
    assert caught.value.fields["file"] == str(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UnreadableModel, match="cannot be read") as caught:
            read_model(path)
        assert caught.value.fields["file"] == str(path)
