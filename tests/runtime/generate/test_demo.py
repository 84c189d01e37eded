# SPDX-License-Identifier: Apache-2.0
"""The main job on the tiny model: `kvcore generate --tiny`, in guard mode, with both backends."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kvcore_runtime.generate import command
from kvcore_runtime.generate.arguments import WrongCall, read_arguments
from kvcore_runtime.generate.options import TINY_PROMPTS
from kvcore_runtime.generate.prompts import read_prompts
from kvcore_runtime.model.sampling import Sampling

from tests.conftest import Backend

EXAMPLES = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_tiny_demo_verifies_itself(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "pool.png"
    argv = ["--tiny", "--guard", "--backend", backend, "--json", "--picture", str(picture)]
    assert command.main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    summary, verified = result["summary"], result["verified"]
    assert summary["backend"] == backend
    assert verified["rows of logits bit by bit"] == summary["generated_tokens"]
    assert verified["answers equal to a contiguous cache's"] == summary["num_answers"]
    for name in (
        *("evictions", "copies on write", "blocks swapped out", "blocks swapped in"),
        *("preemptions by swap", "preemptions by recompute"),
    ):
        assert verified[name] > 0
    assert summary["prompt_tokens_reused"] > 0
    assert picture.stat().st_size > 0


def test_the_hybrid_demo_prints_what_it_verified(capsys: pytest.CaptureFixture[str]) -> None:
    pool = "--block-size 48 --hash-block-size 8 --blocks 24 --host-blocks 6"  # of make demo-hybrid
    assert pool in (Path(__file__).parents[3] / "Makefile").read_text()
    options = ["--tiny", "--states", *pool.split(), "--guard", "--require-all"]
    assert command.main(options) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("verified: 12 answers equal to a contiguous cache's, ")
    assert " rows of logits bit by bit, " in last
    assert last.endswith(" inside a block")


def test_the_hybrid_demo_runs_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--tiny", "--states", "--max-in-flight", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verified"]["rows of logits bit by bit"] > 0
    assert result["summary"]["steps_overlapped"] > 0


def test_the_hybrid_demo_guesses_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--tiny", "--states", "--drafts", "2", "--guard", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["verified"]["rows of logits bit by bit"] > 0
    assert result["summary"]["drafts"] > result["summary"]["drafts_accepted"] > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--drafts", "16", "--block-size", "16"],
            "config draft_states=16: must be smaller than block_size=16",
        ),
        (["--directory", "pages"], "--states with --directory: not for states yet"),
    ],
)
def test_what_states_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert command.main(["--tiny", "--states", *options]) == 2
    assert capsys.readouterr().err == f"kvcore generate: {sentence}\n"


def test_files_keep_whole_blocks() -> None:
    with pytest.raises(WrongCall, match="--hash-block-size with --directory"):
        read_arguments(["--tiny", "--hash-block-size", "8", "--directory", "pages"])


def test_smollm2_has_no_states() -> None:
    with pytest.raises(WrongCall, match="smollm2 has no states"):
        read_arguments(["--model", "smollm2", "--states", "--prompts", str(EXAMPLES)])


@pytest.mark.parametrize("path", [EXAMPLES, TINY_PROMPTS], ids=["examples", "tiny"])
def test_committed_prompts_hold_what_the_demo_shows(path: Path) -> None:
    prompts = read_prompts(path, Sampling())
    assert sum(len(each.turns) for each in prompts) >= (12 if path == EXAMPLES else 8)
    assert len({each.system for each in prompts}) == 1, "one shared system prompt"
    assert sum(len(each.turns) > 1 for each in prompts) >= 2, "two conversations"
    (several,) = [each for each in prompts if each.num_samples > 1]
    assert several.num_samples == 3
    assert several.sampling.temperature > 0
