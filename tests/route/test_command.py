# SPDX-License-Identifier: Apache-2.0
"""`kvcore route`: what it reports, what it refuses, and what an interrupt leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.replay.command import FINE, STOPPED, USAGE_ERROR
from kvcore.replay.synthetic import generate, to_lines
from kvcore.route import command
from kvcore.route.fleet import Fleet
from kvcore.route.results import Result

BLOCKS = ("--blocks", 40, "--prefill-rate", 400)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small trace of conversations."""
    path = tmp_path_factory.mktemp("traces") / "turns.jsonl"
    path.write_bytes(b"".join(to_lines(generate("turns", 60, 3))))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """Return the exit code, the output, and the text on standard error."""
    code = command.main([str(each) for each in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_each_rule_has_a_row(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = run(capsys, trace, *BLOCKS, "--replicas", 3, "--rule", "all", "--timing")
    assert code == FINE
    head, *rows = out.split("\n\n")[1].splitlines()
    assert head.split()[:5] == ["rule", "replicas", "hit", "rate", "p50"]
    assert head.endswith("router us")
    rules = ["round-robin", "least-loaded", "hash", "prefix", "cost"]
    assert [row.split()[0] for row in rows] == rules
    assert len(err.splitlines()) == 5


def test_values_are_combined_where_they_matter(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    words = ("--rule", "hash,prefix,cost", "--scale", "1,2", "--delay", "0,2", "--loss", "0,.05")
    code, out, _ = run(capsys, trace, *BLOCKS, "--replicas", "1,3", *words, "--json")
    assert code == FINE
    data = json.loads(out)
    named = ("num_replicas", "rule", "scale", "delay", "loss")
    runs = [tuple(each["options"][name] for name in named) for each in data["runs"]]
    lates = [(delay, loss) for delay in (0, 2) for loss in (0, 0.05)]
    expected = [("hash", 1, 0, 0), *(("prefix", 1, *late) for late in lates)]
    expected += [("cost", scale, *late) for scale in (1, 2) for late in lates]
    assert runs == [(replicas, *each) for replicas in (1, 3) for each in expected]
    assert 0 < data["ideal_hit_rate"] < 1
    assert all(each["hit_rate"] <= data["ideal_hit_rate"] for each in data["runs"])


def test_the_same_seed_prints_the_same(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    words = (trace, *BLOCKS, "--replicas", 4, "--loss", 0.3, "--die", "0,1", "--json")
    first, second, other = (run(capsys, *words, "--seed", seed)[1] for seed in (1, 1, 2))
    assert first == second != other


def test_deaths_are_set_against_the_run_without(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    _, out, _ = run(capsys, trace, *BLOCKS, "--rule", "hash", "--die", "0,2", "--json")
    whole, hurt = json.loads(out)["runs"]
    assert whole["hits_lost"] is None
    assert hurt["hits_lost"] == whole["hit_rate"] - hurt["hit_rate"]
    _, text, _ = run(capsys, trace, *BLOCKS, "--rule", "hash", "--die", "2")
    assert "only there" in text


def test_what_is_too_large_is_said(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    words = (trace, "--blocks", 1, "--model", "manager", "--backend", "python")
    code, out, _ = run(capsys, *words, "--replicas", 2, "--rule", "round-robin")
    assert code == FINE
    assert "round-robin on 2: 6" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--replicas", "4,2", "--die", 2), "--die 2 leaves none of 2 replicas"),
        (("--replicas", 65_537), "--replicas 65537 are more than 65,536"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], trace: Path, words: tuple[object, ...], sentence: str
) -> None:
    code, out, err = run(capsys, trace, *BLOCKS, *words)
    assert (code, out, err) == (USAGE_ERROR, "", f"kvcore route: {sentence}\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--rule", "random"), "must be all, or some of round-robin"),
        (("--loss", 1.5), "must be a number from 0 to 1, not '1.5'"),
        (("--delay", "nan"), "must be a number from 0 to 2147483647, not 'nan'"),
        (("--scale", 0), "must be a number from 1e-09 to 2147483647, not '0'"),
        (("--speed", "1e-320"), "must be a number from 1e-09"),
    ],
)
def test_a_value_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], trace: Path, words: tuple[object, ...], sentence: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(capsys, trace, *BLOCKS, *words)
    assert sentence in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "nowhere.jsonl", *BLOCKS)
    assert code == USAGE_ERROR
    assert err.startswith("kvcore route: nowhere.jsonl cannot be read: ")


def test_an_interrupt_leaves_the_runs_that_are_done(
    capsys: pytest.CaptureFixture[str], trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Fleet.run

    def run_but_cost(fleet: Fleet) -> Result:
        if fleet.feed.index is not None:
            raise KeyboardInterrupt
        return whole(fleet)

    monkeypatch.setattr(Fleet, "run", run_but_cost)
    code, out, _ = run(capsys, trace, *BLOCKS, "--rule", "hash,cost", "--json")
    assert code == STOPPED
    assert [each["options"]["rule"] for each in json.loads(out)["runs"]] == ["hash"]
    code, out, err = run(capsys, trace, *BLOCKS, "--rule", "cost")
    assert (code, out) == (STOPPED, "")
    assert "before the first run was finished" in err
