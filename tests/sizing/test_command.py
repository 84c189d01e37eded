# SPDX-License-Identifier: Apache-2.0
"""`kvcore size`: what it says, as text and as data, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore import Config, Group
from kvcore.cli import main as cli
from kvcore.sizing import Limits, read_model, size_model
from kvcore.sizing.command import main
from kvcore.types.errors import InvalidConfig
from tests.sizing.models import CONFIGS, LLAMA, WITHOUT_STATES, write

LLAMA_8B = str(CONFIGS / "llama-3-8b.json")
LLAMA_BLOCK = 2 * 16 * 8 * 128 * 2 * 32
"""Key and value, 16 tokens, 8 heads of 128 numbers of 2 bytes, 32 layers: 2 MiB."""


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and data of one call."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_of_the_manual_counts_whole_requests(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = cli.main(["size", LLAMA_8B, "--memory", "80GiB", "--max-model-len", "32768"])
    lines = capsys.readouterr().out.splitlines()
    blocks = 80 * 2**30 // LLAMA_BLOCK
    usable = f"of which {blocks - 1:,} hold tokens (one is the null block)"
    assert code == 0
    assert lines == [
        f"model      llama: 32 layers, cache in bfloat16 ({LLAMA_8B})",
        "1 group    full_attention: 32 layers, blocks of 16 tokens",
        f"a token    {LLAMA_BLOCK // 16:,} bytes",
        f"a block    {LLAMA_BLOCK:,} bytes: 32 layers of {LLAMA_BLOCK // 32:,}",
        f"memory     80.00 GiB: {blocks:,} blocks, {usable}",
        f"tokens     {(blocks - 1) * 16:,} in all blocks, which the requests share",
        f"a request  {32768 // 16:,} blocks, 4.00 GiB, for 32,768 tokens",
        "note       the model itself was made for 8,192 tokens",
        f"fits       {(blocks - 1) * 16 // 32768} requests of 32,768 tokens",
    ]


def test_one_byte_too_little_names_the_longest_length_that_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    enough = (8192 // 16 + 1) * LLAMA_BLOCK
    code, data = ask(capsys, LLAMA_8B, "--memory", f"{enough}B")
    assert (code, data["fits"], data["num_full_requests"]) == (0, True, 1)
    assert data["max_model_len"] == data["longest_model_len"] == 8192  # the model's own
    assert data["request_bytes"] == enough
    code, data = ask(capsys, LLAMA_8B, "--memory", f"{enough - 1}B")
    assert (code, data["fits"], data["num_full_requests"]) == (1, False, 0)
    assert data["longest_model_len"] == 8192 - 16
    assert main([LLAMA_8B, "--memory", f"{enough - 1}B"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "too small  a request of 8,192 tokens needs 1.00 GiB; "
        "the longest that would has 8,176 tokens"
    )


def test_blocks_that_are_set_bound_the_report() -> None:
    limits = Limits(max_model_len=8192, num_blocks=33, null_block=True)
    report = size_model(read_model(LLAMA_8B), 80 * 2**30, limits)
    assert (report.config.num_blocks, report.fits, report.longest_model_len) == (33, False, 512)


def test_memory_below_one_block_fits_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([LLAMA_8B, "--memory", "1MiB"]) == 1
    out = capsys.readouterr().out
    assert "not even one token would" in out
    assert "memory     1.00 MiB: 0 blocks" in out
    assert "tokens     0 in all blocks" in out


def test_tokens_beside_windows_are_counted_in_requests_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A request of the last length holds few tokens in windows, so blocks do not say how many."""
    name = str(CONFIGS / "gpt-oss-20b.json")
    arguments = [name, "--max-model-len", "65536", "--memory"]
    data = ask(capsys, *arguments, "8GiB")[1]
    assert data["fits"]
    usable = data["num_usable_blocks"]
    assert data["num_tokens"] == usable * 65536 // data["blocks_per_request"]
    main([*arguments, "8GiB"])
    shared = "if requests of 65,536 tokens share the blocks of all groups"
    assert f"tokens     {data['num_tokens']:,} {shared}\n" in capsys.readouterr().out
    assert main([*arguments, "1GiB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("tokens ")]
    assert "the longest that would has" in lines[-1]


def test_a_window_in_every_layer_shares_all_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(CONFIGS / "mistral-7b-v0.1.json"), "--memory", "8GiB"])
    assert " if requests of 32,768 tokens share all blocks\n" in capsys.readouterr().out


def test_options_scale_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--block-size", "32", "--dtype", "fp8", "--tp", "4"]
    code, data = ask(capsys, LLAMA_8B, "--memory", "80GB", *options)
    assert code == 0
    assert data["block_bytes"] == LLAMA_BLOCK * 2 // 2 // 4
    assert data["token_bytes"] == LLAMA_BLOCK // 16 // 2 // 4
    assert (data["dtype"], data["tensor_parallel"]) == ("fp8", 4)
    assert data["num_blocks"] == 80 * 10**9 // data["block_bytes"]
    main([LLAMA_8B, "--memory", "80GB", *options])
    assert "devices    4, each with 2 of 8 key-value heads" in capsys.readouterr().out


def test_a_latent_vector_is_whole_on_every_device(capsys: pytest.CaptureFixture[str]) -> None:
    name = str(CONFIGS / "deepseek-v3.json")
    whole = ask(capsys, name, "--memory", "80GiB")[1]
    split = ask(capsys, name, "--memory", "80GiB", "--tp", "8")[1]
    assert whole["token_bytes"] == split["token_bytes"] == 576 * 2 * 61
    main([name, "--memory", "80GiB", "--tp", "8"])
    assert "8, each with the whole latent vector" in capsys.readouterr().out


def test_windows_are_groups_of_their_own_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(CONFIGS / "gpt-oss-20b.json"), "--memory", "8GiB", "--max-model-len", "65536"]
    data = ask(capsys, *arguments, "--max-num-batched-tokens", "2048")[1]
    assert [(group["kind"], group["window"]) for group in data["groups"]] == [
        ("full_attention", None),
        ("sliding_window", 128),
    ]
    window_blocks = -(-(127 + 2048) // 16) + 1
    assert data["blocks_per_request"] == 65536 // 16 + window_blocks
    assert data["lasting_token_bytes"] * 2 == data["token_bytes"] == 2 * 8 * 64 * 2 * 24
    whole = ask(capsys, *arguments, "--no-windows")[1]
    assert [group["kind"] for group in whole["groups"]] == ["full_attention"]
    assert whole["blocks_per_request"] * whole["block_bytes"] == 65536 * data["token_bytes"]
    assert whole["num_full_requests"] < data["num_full_requests"]


def test_hits_inside_blocks_are_had_by_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [LLAMA_8B, "--memory", "80GiB", "--block-size", "64"]
    whole = ask(capsys, *arguments)[1]
    assert (whole["hash_block_size"], whole["hit_alignment"]) == (None, 64)
    inside = ask(capsys, *arguments, "--hash-block-size", "16")[1]
    assert (inside["hash_block_size"], inside["hit_alignment"]) == (16, 16)
    assert whole["num_blocks"] == inside["num_blocks"]
    main([*arguments, "--hash-block-size", "16"])
    line = "hits       end at multiples of 16 tokens, inside blocks too (hash_block_size=16)"
    assert line in capsys.readouterr().out.splitlines()


def test_slots_that_stay_empty_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / "gemma-3-27b.json"), "--memory", "80GiB"]) == 0
    line = "6 groups   sliding_window of 1,024 tokens: 52 layers, 8 slots left empty, blocks of 16"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("path", WITHOUT_STATES, ids=lambda path: path.stem)
def test_what_fits_makes_a_manager_and_what_does_not_makes_none(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(path), "--max-model-len", "16384"]
    enough = ask(capsys, *arguments, "--memory", "80GiB")[1]["request_bytes"]
    for memory_bytes in (enough, enough - 1):
        code, data = ask(capsys, *arguments, "--memory", f"{memory_bytes}B")
        groups = tuple(
            Group(
                group["block_size"],
                kind=group["kind"],
                window=group["window"],
                page_bytes=data["block_bytes"],
            )
            for group in data["groups"]
        )
        limits = {name: data[name] for name in ("max_model_len", "max_num_batched_tokens")}
        if code == 0:
            assert Config(data["num_blocks"], groups=groups, **limits).groups == groups
        else:
            with pytest.raises(InvalidConfig, match="one request of max_model_len=16384"):
                Config(data["num_blocks"], groups=groups, **limits)
            limits["max_model_len"] = data["longest_model_len"]
            assert Config(data["num_blocks"], groups=groups, **limits).groups == groups


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([LLAMA_8B, "--memory", "80G"], "memory '80G': unit g"),
        ([LLAMA_8B, "--memory", "80"], "memory '80': the unit is missing: give one of bytes, KiB"),
        ([LLAMA_8B, "--memory=-80GiB"], "memory '-80GiB': must be at least 1 byte"),
        ([LLAMA_8B, "--memory", "-80GiB"], "memory '-80GiB': must be at least 1 byte"),
        (["--memory", "-.5GiB", LLAMA_8B], "memory '-.5GiB': must be"),
        ([LLAMA_8B, "--gpu", "-80GiB"], "memory '-80GiB': must be at least 1 byte"),
        ([LLAMA_8B, "--gpu", "80GiB", "--weights", "16"], "memory '16': the unit is missing"),
        ([LLAMA_8B, "--gpu", "80GiB", "--tp", "3"], "8 key-value heads do not split over 3"),
        ([LLAMA_8B, "--memory", "9999TiB"], "must be at most 1024 TiB"),
        (
            [LLAMA_8B, "--memory", "1GiB", "--checkpoint-interval", "64"],
            "no layer keeps a state, of which one would be kept every 64 tokens",
        ),
        ([LLAMA_8B, "--memory", "80GiB", "--dtype", "fp3"], "dtype fp3 is not known"),
        (
            [LLAMA_8B, "--memory", "80GiB", "--hash-block-size", "32"],
            "hashes of 32 tokens do not fill blocks of 16 tokens",
        ),
        ([LLAMA_8B, "--memory", "80GiB", "--tp", "3"], "32 attention heads do not split over 3"),
        (["nowhere.json", "--memory", "80GiB"], "nowhere.json: cannot be read"),
    ],
)
def test_what_was_wrong_goes_to_standard_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvcore size: ")
    assert said in err


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "2147483648"])
@pytest.mark.parametrize("name", ["--block-size", "--max-model-len", "--tp", "--hash-block-size"])
def test_counts_are_integers_of_at_least_one(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([LLAMA_8B, "--memory", "80GiB", f"{name}={value}"])
    assert caught.value.code == 2
    assert f"must be an integer from 1 to 2147483647, not '{value}'" in capsys.readouterr().err


def test_a_file_without_a_longest_length_asks_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, LLAMA, max_position_embeddings=...))
    assert main([path, "--memory", "1GiB"]) == 2
    assert f"{path}: field max_position_embeddings is missing" in capsys.readouterr().err
    assert main([path, "--memory", "1GiB", "--max-model-len", "1"]) == 0
    assert capsys.readouterr().out.endswith(" requests of 1 token\n")


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({}, []),
        ({"model_type": "new"}, ["new is an unknown family: sized as a transformer"]),
        ({"model_type": ...}, ["the file names no model_type: sized as a transformer"]),
        ({"torch_dtype": "float32"}, ["the cache is in the weights' float32; engines serve"]),
        ({"max_position_embeddings": 8}, ["the model itself was made for 8 tokens"]),
    ],
)
def test_what_a_size_rests_on_is_noted(
    tmp_path: Path,
    changes: dict[str, Any],
    noted: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(write(tmp_path, LLAMA, **changes)), "--memory", "1GiB"]
    arguments += ["--max-model-len", "16"]
    notes = ask(capsys, *arguments)[1]["notes"]
    assert [note[: len(said)] for note, said in zip(notes, noted, strict=True)] == noted
    main(arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note ")]
    assert lines == [f"note       {note}" for note in notes]


def test_a_cache_in_float32_that_was_asked_for_needs_no_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, LLAMA, torch_dtype="float32"))
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        data = ask(capsys, path, "--memory", "1GiB", "--dtype", dtype)[1]
        assert (data["notes"], data["token_bytes"]) == ([], 2 * 2 * 64 * size * 4)


def test_the_help_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  size      compute how many requests of which length fit into memory" in lines
