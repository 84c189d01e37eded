# SPDX-License-Identifier: Apache-2.0
"""`kvcore replay --explain`: causes and evictors in the text, in the data and on the page."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvcore.explain.explanation import CAUSES
from kvcore.replay import command
from kvcore.replay.explain.explained import POINTS_MAX, Explained
from kvcore.replay.synthetic import generate, to_lines
from tests.conftest import need_twin
from tests.replay.results import EMPTY


@pytest.fixture(name="trace")
def made_trace(tmp_path: Path) -> str:
    need_twin()
    path = tmp_path / "documents.jsonl"
    path.write_bytes(b"".join(to_lines(generate("documents", 60, 7))))
    return str(path)


def test_causes_and_evictors_are_in_every_report(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the page is drawn")
    page = tmp_path / "page.html"
    words = [trace, "--blocks", "2048", "--explain", "--sweep", "4096"]
    assert command.main([*words, "--json"]) == command.FINE
    data = json.loads(capsys.readouterr().out)
    reported = data["explained"]
    assert tuple(reported["causes"]) == CAUSES
    assert reported["hits"] == data["tokens"]["hit"]
    assert sum(reported["causes"].values()) == reported["ideal"] - reported["hits"] > 0
    assert len(reported["evictors"]) == 10
    assert command.main([*words, "--html", str(page)]) == command.FINE
    text = capsys.readouterr().out
    root = ElementTree.fromstring(page.read_text("utf-8"))
    assert len(list(root.iter("svg"))) == 3
    seen = {each.text for each in root.iter()}
    assert {"found", "evicted", "by a prompt's allocation", "evictor"} <= seen
    for name, tokens in reported["evictors"].items():
        assert f"{tokens:,}" in seen
        assert f"\n{name} " in text


def test_without_it_nothing_is_explained(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([trace, "--blocks", "4096", "--json"]) == command.FINE
    assert json.loads(capsys.readouterr().out)["explained"] is None


def test_the_points_of_a_long_run_are_thinned_evenly() -> None:
    explained = Explained()
    for _ in range(3 * POINTS_MAX):
        explained.watch(EMPTY)
    assert POINTS_MAX // 2 <= len(explained.points) < POINTS_MAX
