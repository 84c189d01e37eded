# SPDX-License-Identifier: Apache-2.0
"""A device's memory less the weights: parameters as published, and what is not counted."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcore.sizing import count_parameters, make_budget, read_model
from kvcore.sizing.command import main
from kvcore.sizing.errors import MissingField, UnsupportedModel, WeightsDoNotFit
from kvcore.types.errors import InvalidCount
from tests.sizing.models import CONFIGS, GEMMA3, LLAMA, QWEN, write

LLAMA_8B = str(CONFIGS / "llama-3-8b.json")
GIB = 2**30
SHAPE = {"intermediate_size": 1024, "vocab_size": 1000}
EMBEDDING = 1000 * 512
LAYER = 512 * 64 * 2 * (8 + 2) + 3 * 512 * 1024 + 2 * 512
"""Of `LLAMA`: 8 heads of 64 numbers, 2 of them for keys and values; gate, up, down; two norms."""


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-2-9b-it", 9_241_705_984),
    ],
)
def test_parameters_are_as_many_as_the_checkpoint_has(name: str, published: int) -> None:
    assert count_parameters(read_model(CONFIGS / f"{name}.json")) == published


@pytest.mark.parametrize(
    ("base", "changes", "per_layer", "tied"),
    [
        (LLAMA, {}, 0, False),
        (LLAMA, {"tie_word_embeddings": True}, 0, True),
        (LLAMA, {"attention_bias": True}, 64 * (8 + 2 * 2) + 512, False),
        (LLAMA, {"mlp_bias": True}, 2 * 1024 + 512, False),
        (QWEN, {}, 64 * (8 + 2 * 2), False),
        (LLAMA, {"model_type": "qwen3", "head_dim": 64}, 2 * 64, False),
        (LLAMA, {"model_type": "gemma", "head_dim": 64}, 0, True),
        (GEMMA3, {"head_dim": 64, "num_hidden_layers": 4}, 2 * 512 + 2 * 64, True),
    ],
)
def test_each_family_adds_its_own(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], per_layer: int, tied: bool
) -> None:
    model = read_model(write(tmp_path, base, **SHAPE, **changes))
    head = EMBEDDING * (1 if tied else 2)
    assert count_parameters(model) == 4 * (LAYER + per_layer) + 512 + head


def test_a_device_keeps_a_copy_of_norms_and_of_heads_that_do_not_split(tmp_path: Path) -> None:
    model = read_model(write(tmp_path, LLAMA, **SHAPE))
    layer = 512 * 64 * 2 * (8 // 4 + 1) + 3 * 512 * 1024 // 4 + 2 * 512
    expected = 4 * layer + 512 + 2 * EMBEDDING // 4
    assert count_parameters(model, tensor_parallel=4) == expected

    for call in (count_parameters, partial(make_budget, gpu_bytes=GIB, utilization=Decimal(1))):
        with pytest.raises(InvalidCount, match="tensor_parallel"):
            call(model, tensor_parallel=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, 'field model_type is "gpt2": counted are the weights of llama, '),
        ({"model_type": "mixtral", "num_local_experts": 8}, "field num_local_experts is 8: exp"),
        ({"quantization_config": {"bits": 4}}, "field quantization_config is set: quantized"),
        ({"vision_config": {"x": 1}}, "field vision_config is set: models of several parts"),
    ],
)
def test_what_is_not_counted_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = write(tmp_path, LLAMA, **SHAPE, **changes)
    with pytest.raises(UnsupportedModel) as caught:
        count_parameters(read_model(path))
    assert str(caught.value).startswith(f"{path}: {said}")
    assert str(caught.value).endswith("; give the size of the weights (--weights)")


@pytest.mark.parametrize("field", ["intermediate_size", "vocab_size", "torch_dtype"])
def test_a_field_that_weights_follow_from_is_asked_for(tmp_path: Path, field: str) -> None:
    model = read_model(write(tmp_path, LLAMA, **{**SHAPE, field: ...}))
    with pytest.raises(MissingField, match=f"field {field} is missing: .*weights are counted"):
        make_budget(model, GIB, Decimal(1))


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main([LLAMA_8B, *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_device_is_stated_as_people_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--gpu", "80GiB", "--weights", "16GiB", "--utilization", "0.9"]
    code, data = ask(capsys, *device)
    assert (code, data["memory_bytes"]) == (0, (72 - 16) * GIB)
    assert data["budget"] == {
        "gpu_bytes": 80 * GIB,
        "utilization": 0.9,
        "weights_bytes": 16 * GIB,
        "num_parameters": None,
    }
    assert "activations and CUDA graphs" in data["notes"][-1]
    assert ask(capsys, "--memory", "56GiB")[1]["num_blocks"] == data["num_blocks"]
    assert ask(capsys, *device, "--tp", "2")[1]["memory_bytes"] == (72 - 8) * GIB
    main([LLAMA_8B, *device])
    assert "\ndevice     0.9 of 80.00 GiB is 72.00 GiB, less weights of 16.00 GiB\n" in (
        capsys.readouterr().out
    )


def test_weights_that_are_not_given_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    data = ask(capsys, "--gpu", "80GiB", "--dtype", "fp8")[1]
    assert data["budget"]["num_parameters"] == 8_030_261_248
    assert data["memory_bytes"] == 72 * GIB - 2 * 8_030_261_248
    main([LLAMA_8B, "--gpu", "80GiB"])
    assert "14.96 GiB (8,030,261,248 parameters in bfloat16)\n" in capsys.readouterr().out


def test_weights_that_leave_nothing_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LLAMA_8B, "--gpu", "16GiB"]) == 1
    assert capsys.readouterr().err == (
        "kvcore size: the weights take 14.96 GiB of 14.40 GiB (0.9 of 16.00 GiB): "
        "nothing is left for the cache\n"
    )
    with pytest.raises(WeightsDoNotFit) as caught:
        _ = make_budget(read_model(LLAMA_8B), GIB, Decimal(1), weights_bytes=GIB).cache_bytes
    assert caught.value.fields == {
        "weights_bytes": GIB,
        "usable_bytes": GIB,
        "utilization": Decimal(1),
        "gpu_bytes": GIB,
        "available": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "one of the arguments --memory --gpu is required"),
        (["--memory", "1GiB", "--gpu", "1GiB"], "not allowed with"),
        (["--memory", "1GiB", "--weights", "1GiB"], "--weights and --utilization belong to --gpu"),
        (["--memory", "1GiB", "--utilization", "1"], "--weights and --utilization belong to"),
        (["--gpu", "1GiB", "--utilization", "90"], "must be above 0 and at most 1, not '90'"),
        (["--gpu", "1GiB", "--utilization", "0"], "must be above 0 and at most 1, not '0'"),
        (["--gpu", "1GiB", "--utilization", "nan"], "must be above 0 and at most 1, not 'nan'"),
        (["--gpu", "1GiB", "--utilization", "much"], "must be above 0 and at most 1, not 'much'"),
    ],
)
def test_a_device_is_stated_once(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([LLAMA_8B, *arguments])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
