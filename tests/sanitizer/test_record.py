# SPDX-License-Identifier: Apache-2.0
"""A hunt in many parts: `--record` says where the next part goes on, and what all add up to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcore.sanitizer.hunter import session
from kvcore.sanitizer.hunter.command import main
from kvcore.sanitizer.hunter.record import sentence, totals

TEMPLATE = "kvcore.sanitizer.hunter.template:Adapter"


def part(engine: str = "it 1", seed: int = 1, **counts: Any) -> str:
    """Return a line of a record."""
    tables: Any = {name: {} for name in ("reached", "values", "moves", "found")}
    numbers = {"runs": 0, "steps": 0, "skipped": 0, "seconds": 0.0}
    return json.dumps({"engine": engine, "seed": seed, **numbers, **tables, **counts}) + "\n"


def test_the_next_part_has_the_next_seed_and_adds_to_the_ones_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record"
    assert main([TEMPLATE, "--runs", "50", "--record", str(record)]) == 0
    assert "in all: 0 h 0 min" in capsys.readouterr().out
    assert main([TEMPLATE, "--runs", "30", "--record", str(record), "--json"]) == 0
    (total,) = json.loads(capsys.readouterr().out)["in_all"]
    first, second = map(json.loads, record.read_text().splitlines())
    assert (first["seed"], second["seed"], total["seeds"]) == (1, 2, [1, 2])
    assert (first["runs"], second["runs"], total["runs"]) == (50, 30, 80)
    for name in ("steps", "seconds"):
        assert total[name] == first[name] + second[name] > 0
    assert total["reached"]["hit"] == first["reached"]["hit"] + second["reached"]["hit"]
    assert set(total["missing"]) == {*first["missing"]} & {*second["missing"]}


def test_a_record_is_summed_up_without_a_hunt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record"
    record.write_text(
        part(seconds=3600.0, runs=5, steps=40, reached={"hit": 2}, found={"leak": 1})
        + part(seed=4, seconds=3179.6, runs=2, steps=2, found={"leak": 2})
        + part("it 2", 9, runs=1)
    )
    assert main(["it", "--record", str(record), "--sum"]) == 0
    one, other = capsys.readouterr().out.splitlines()
    assert one.startswith(
        "it 1 in all: 1 h 53 min 0 s of CPU, 7 runs, 42 steps checked, seeds 1, 4; "
        "findings: leak 3; not reached: "
    )
    assert "hit" not in one.partition("not reached: ")[2].split(", ")
    assert other.startswith("it 2 in all: 0 h 0 min 0 s of CPU, 1 runs, 0 steps checked, seeds 9; ")
    assert "findings: none" in other
    assert main(["it", "--record", str(record), "--sum", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["in_all"] == totals(record)
    assert len(record.read_text().splitlines()) == 3


def test_a_hunt_whose_engine_does_not_start_again_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"name": "leak", "where": "", "needs": [], "text": "", "world": {"moves": []}}

    def events(job: Any) -> Iterator[dict[str, Any]]:
        del job
        yield {"event": "start", "engine": "it 1"}
        yield {"event": "tally", "runs": 5, "seconds": 9.0, "found": {"leak": 1}}
        yield {"event": "found", **found}
        yield {"event": "unsupported", "text": "it did not start"}

    monkeypatch.setattr("kvcore.sanitizer.hunter.command.events", events)
    record = tmp_path / "record"
    assert main([TEMPLATE, "--record", str(record)]) == 1
    assert "it did not start" in capsys.readouterr().err
    kept = json.loads(record.read_text())
    assert (kept["runs"], kept["seconds"], kept["interrupted"]) == (5, 9.0, True)
    assert kept["findings"] == ["leak  "]


def test_one_crash_is_told_once_and_written_once_by_all_parts_of_a_hunt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = "it 1"

    def found(where: str, *needs: str) -> dict[str, Any]:
        world = {"num_blocks": 2, "block_size": 1, "axes": {}, "moves": [], "seed": 1}
        about = {"event": "found", "name": "crash", "text": "", "muted": [], "engine": version}
        return {**about, "where": where, "needs": [*needs], "world": world}

    def events(_: Any) -> Iterator[dict[str, Any]]:
        yield {"event": "start", "engine": "it 1"}
        yield from [found("in free", "abort", "size=2"), found("in free", "abort")]
        yield from [found("in free", "abort", "fork"), found("in take", "fork")]
        yield from [found("", "abort", "fork"), found("", "abort")]  # no place, no cause

    monkeypatch.setattr("kvcore.sanitizer.hunter.command.events", events)
    written: list[str] = []

    def write(event: dict[str, Any], _adapter: str, folder: Path) -> list[Path]:
        written.append(f"{event['where']}: {' '.join(event['needs'])}")
        (folder / f"{len(written)}.json").write_text(json.dumps(event))
        return []

    monkeypatch.setattr("kvcore.sanitizer.hunter.command.write", write)
    record = tmp_path / "record"
    for _ in range(2):
        options = ["--record", str(record), "--write", str(tmp_path / "findings")]
        assert main([TEMPLATE, *options]) == 1
    told = ["in free: abort", "in take: fork", ": abort fork", ": abort"]
    assert written == told
    (tmp_path / "findings" / "other.json").write_text("[]")
    version = "it 2"
    assert main([TEMPLATE, *options]) == 1
    assert written == told + told, "another version has reports of its own"
    parts = [json.loads(line) for line in record.read_text().splitlines()]
    brief = ["crash in free abort", "crash in take fork", "crash  abort fork", "crash  abort"]
    assert [part["findings"] for part in parts] == [brief, brief, brief]


def test_a_record_without_a_file_has_no_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--sum"], ["--sum", "--record", str(tmp_path / "none")]):
        assert main(["it", *options]) == 2
        assert "--sum needs a file of --record" in capsys.readouterr().err


def test_all_goals_may_be_reached() -> None:
    total = {**json.loads(part(seconds=59.7)), "seeds": [1], "missing": []}
    assert sentence(total).startswith("it 1 in all: 0 h 1 min 0 s")
    assert sentence(total).endswith("not reached: none")


def test_an_interrupted_part_without_a_finding_is_not_a_clean_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def process(_: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"event": "start"}
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_one_process", process)
    record = tmp_path / "record"
    assert main([TEMPLATE, "--record", str(record)]) == 130
    assert json.loads(record.read_text())["interrupted"]
