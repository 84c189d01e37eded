# SPDX-License-Identifier: Apache-2.0
"""`kvcore explain`: its page shows what it prints, its data add up, wrong calls are refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcore.explain.explanation import CAUSES, LENGTHS
from kvcore.replay import trace_command
from kvcore.replay.explain import command as explain_command
from tests.conftest import need_twin

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"


@pytest.fixture(name="trace")
def made_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    words = "generate --kind documents --requests 60 --seed 7 --out documents.jsonl"
    assert trace_command.main(words.split()) == 0
    return "documents.jsonl"


def test_the_page_shows_what_the_commands_print(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    need_twin()
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text("utf-8")
    shell = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    first, second = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    generate, explain, one = (line.split()[1:] for line in shell.splitlines())
    assert trace_command.main(generate[1:]) == 0
    assert explain_command.main(explain[1:]) == 0
    assert capsys.readouterr().out == first
    assert explain_command.main(one[1:]) == 0
    assert capsys.readouterr().out == "".join(first.splitlines(keepends=True)[:4]) + second


def test_the_data_add_up_and_name_every_cause(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [trace, "--blocks", "2048", "--json", "--optimum", "--by", "evictor"]
    assert explain_command.main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert tuple(data["causes"]) == CAUSES
    assert sum(data["causes"].values()) == data["missed"] == data["ideal"] - data["hits"] > 0
    evicted = data["causes"]["evicted"]
    for name in ("evicted_by", "evicted_split", "evictors"):
        assert sum(data[name].values()) == evicted
    assert sum(not each["again"] for each in data["requests"]) == data["admissions"]
    page = PAGE.read_text("utf-8")
    for each in data["requests"]:
        assert tuple(each["lengths"]) == LENGTHS
        spans = sum(span["end"] - span["start"] for span in each["spans"])
        assert spans == each["lengths"]["known"] - each["lengths"]["used"]
    for name in (*LENGTHS, *CAUSES, *data, *data["requests"][0]):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("by", ["evictor", "request"])
def test_the_first_of_a_list_are_those_with_most(
    by: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_command.main([trace, "--blocks", "2048", "--by", by]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert head.split()[0] == by
    place = 1 if by == "evictor" else 4
    tokens = [int(row.split()[place].replace(",", "")) for row in rows]
    assert len(tokens) == 10
    assert tokens == sorted(tokens, reverse=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--optimum", "--preempt", "swap"], "--optimum needs --preempt recompute"),
        (["--request", "nobody"], "no request 'nobody' was admitted"),
    ],
)
def test_what_cannot_be_explained_is_refused_in_a_sentence(
    words: list[str], said: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain_command.main([trace, "--blocks", "2048", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("words", [["--sweep", "9"], ["--policies", "all"], ["--apply", "torch"]])
def test_options_of_replay_alone_are_not_taken(
    words: list[str], trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        explain_command.main([trace, "--blocks", "2048", *words])
    assert f"unrecognized arguments: {' '.join(words)}" in capsys.readouterr().err


def test_what_is_left_out_is_said(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(trace).open("a") as file:
        file.write("no request\n")
    words = [trace, "--blocks", "128", "--skip-bad"]
    usable = 127 * 16
    rows = [json.loads(line) for line in Path(trace).read_text().splitlines()[:-1]]
    needs = [each["input_length"] + each["output_length"] - 1 for each in rows]
    num_refused = sum(need > usable for need in needs)
    assert num_refused > 1
    assert explain_command.main(words) == 0
    reported = capsys.readouterr()
    said = f"left out: {num_refused} requests too large for the pool, 1 bad line"
    assert reported.out.splitlines()[2] == said
    assert "kvcore explain: skipped: documents.jsonl, line 61: not JSON" in reported.err
    assert explain_command.main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["refused"], data["skipped_lines"]) == (num_refused, 1)
    assert trace_command.main(["show", trace, "--skip-bad"]) == 0
    assert "kvcore trace: skipped: documents.jsonl, line 61" in capsys.readouterr().err


def test_one_request_is_shown_whole_only_on_request(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [trace, "--blocks", "8192", "--requests", "1"]
    assert explain_command.main([*words, "--optimum"]) == 0
    assert "\nideal " in capsys.readouterr().out
    assert explain_command.main([*words, "--request", "0"]) == 0
    assert "seen for the first time" in capsys.readouterr().out
    for more in (["--by", "evictor"], ["--by", "request"], ["--optimum"]):
        with pytest.raises(SystemExit, match="2"):
            explain_command.main([*words, "--request", "0", *more])
        assert "--request shows one request whole" in capsys.readouterr().err
