# SPDX-License-Identifier: Apache-2.0
"""Each bug of docs/found.md is shown again by its world, if its engine is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.sanitizer.hunter.adapter import KNOWN, NotInstalled, load, python_of
from kvcore.sanitizer.hunter.command import main
from kvcore.sanitizer.hunter.world import world_from_json

ROOT = Path(__file__).parents[2]
FOUND = sorted((ROOT / "tests" / "sanitizer" / "found").glob("*.json"))
PAGE = ROOT / "docs" / "found.md"


def missing(engine: str) -> str:
    """Return why an engine cannot be run here, or nothing."""
    try:
        python_of(engine)
        if KNOWN[engine].checkout:
            load(engine)
    except NotInstalled as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_a_found_bug_is_found_again(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(path.read_text())
    engine = found["engine"].split()[0]
    if reason := missing(engine):
        pytest.skip(reason)
    assert main([engine, "--replay", str(path), "--json"]) == 1
    again = json.loads(capsys.readouterr().out)["findings"]
    assert [(each["name"], each["where"]) for each in again] == [(found["name"], found["where"])]


def test_the_page_names_each_world_and_no_other() -> None:
    text = PAGE.read_text()
    for path in FOUND:
        assert path.name in text
        assert len(world_from_json(json.loads(path.read_text())["world"]).moves) <= 12
    assert text.count(".json`") == len(FOUND)
