# SPDX-License-Identifier: Apache-2.0
"""Replays on the blocks of a model's layers, with hits inside blocks."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from kvcore.replay.command import main
from kvcore.replay.configuration import read_groups
from kvcore.replay.explain.command import main as explain_main
from kvcore.replay.loop import replay
from kvcore.replay.results import BackendName, Options
from kvcore.replay.workload import TraceRequest

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
QWEN3_NEXT = CONFIGS / "qwen3-next-80b-a3b.json"
SHARED, OWN = 240, 60
NUM_PREFIXES, NUM_REQUESTS = 8, 200


def prompts() -> list[TraceRequest]:
    """Requests that share one of a few prefixes of 240 tokens, and go on with 60 of their own."""
    return [
        TraceRequest(
            line=number + 1,
            arrival=number * 0.05,
            prompt_len=SHARED + OWN,
            output_len=4,
            hash_ids=array("Q", [number % NUM_PREFIXES, 1000 + number]),
            unit=SHARED,
        )
        for number in range(NUM_REQUESTS)
    ]


@pytest.mark.parametrize("backend", ["python", "rust"])
def test_short_prompts_of_a_hybrid_model_hit_inside_blocks(backend: BackendName) -> None:
    groups = read_groups(QWEN3_NEXT, 16)
    assert {each.block_size for each in groups} == {544}
    made = Options(num_blocks=3000, groups=groups)
    whole = replay(prompts(), made, backend=backend, costs=False)
    inside = Options(num_blocks=3000, groups=groups, hash_block_size=16)
    fine = replay(prompts(), inside, backend=backend, costs=False)
    small = replay(prompts(), Options(num_blocks=9000), backend=backend, costs=False)
    assert whole.hit_tokens == 0
    # The first prompt of a prefix is computed, and the second one keeps the state where they part.
    assert fine.hit_tokens == SHARED * (NUM_REQUESTS - 2 * NUM_PREFIXES)
    assert small.hit_tokens == SHARED * (NUM_REQUESTS - NUM_PREFIXES)
    assert fine.hit_tokens >= 0.9 * small.hit_tokens
    assert fine.ideal_hit_tokens == small.hit_tokens
    assert fine.optimum_hit_tokens is None
    assert fine.finished == NUM_REQUESTS


@pytest.mark.parametrize("name", ["gemma-3-27b.json", "falcon-h1-7b.json", "llama-3-8b.json"])
def test_long_prompts_are_computed_in_chunks(name: str) -> None:
    """A prompt of many steps on the groups of windows, states or neither."""
    groups = read_groups(CONFIGS / name, 16)
    ids = array("Q", range(40))
    asked = [TraceRequest(n + 1, float(n), 40 * 512, 2, ids, 512) for n in range(3)]
    unit = 16 if any(each.is_state for each in groups) else None
    options = Options(
        num_blocks=9000, groups=groups, hash_block_size=unit, token_budget=3000, max_running=1
    )
    found = replay(asked, options, costs=False)
    assert found.finished == 3
    assert found.ideal_hit_tokens is not None
    assert 0.9 * found.ideal_hit_tokens <= found.hit_tokens <= found.ideal_hit_tokens


def test_the_command_replays_on_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 50 * n, "input_length": 600, "output_length": 2, "hash_ids": [0, 1 + n]}
        for n in range(20)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [str(trace), "--blocks", "400", "--model", str(QWEN3_NEXT), "--hash-block-size", "16"]
    assert main([*given]) == 0
    text = capsys.readouterr().out
    assert "400 blocks of 1 full_attention group of 544 tokens and 3 state groups" in text
    assert "hits at multiples of 16" in text
    assert main([*given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in said["options"]["groups"]] == [
        "full_attention",
        *["state"] * 3,
    ]
    assert said["tokens"]["hit"] == 512 * 18


def test_misses_inside_blocks_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All prompts share 512 tokens, less than a block; no state is kept where the second parts."""
    trace = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": 50 * n, "input_length": 600, "output_length": 2, "hash_ids": [0, 1 + n]}
        for n in range(20)
    )
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = [str(trace), "--blocks", "400", "--model", str(QWEN3_NEXT), "--hash-block-size", "16"]
    assert explain_main([*given, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["ideal"], said["hits"]) == (512 * 19, 512 * 18)
    assert {name for name, count in said["causes"].items() if count} == {"no_checkpoint"}
    assert said["causes"]["no_checkpoint"] == 512
    assert explain_main([*given, "--optimum"]) == 2
    assert "--optimum has blocks of one size" in capsys.readouterr().err


@pytest.mark.parametrize("more", [("--far-blocks", "9"), ("--apply", "torch")])
def test_what_has_blocks_of_one_size_is_refused(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    assert main([str(trace), "--blocks", "9", "--model", str(QWEN3_NEXT), *more]) == 2
    assert f"{more[0]} has blocks of one size" in capsys.readouterr().err


def test_a_policy_without_parts_of_blocks_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    given = [str(trace), "--blocks", "9", "--hash-block-size", "8", "--policies", "lru,s3fifo"]
    assert main(given) == 2
    assert "lru or uncached_first" in capsys.readouterr().err
