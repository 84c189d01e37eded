# SPDX-License-Identifier: Apache-2.0
"""Each bug of docs/found_old.md is shown again in the version that had it, and not in its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.sanitizer.hunter.command import main
from kvcore.sanitizer.hunter.world import world_from_json
from tests.sanitizer.old.versions import FOUND, adapter, environment, folder

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "found_old.md"


def replayed(path: Path, version: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run a world in a version of its engine; return the exit code and the findings."""
    if not folder(version).is_dir():
        pytest.skip(f"{version} is not in {folder(version)}. Run: make engines-sanitizer-old")
    for name, value in environment(version).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)  # from where the engine's process imports the adapter
    code = main([adapter(version), "--replay", str(path), "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return code, [(each["engine"], each["name"], each["where"]) for each in findings]


@pytest.mark.slow
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_an_old_bug_is_found_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(path.read_text())
    wanted = (found["engine"], found["name"], found["where"])
    assert replayed(path, found["engine"], monkeypatch, capsys) == (1, [wanted])


@pytest.mark.slow
@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_the_fixed_version_is_clean(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = json.loads(path.read_text())["fixed"]
    assert replayed(path, fixed, monkeypatch, capsys) == (0, [])


def test_the_page_names_each_world_and_no_other() -> None:
    text = PAGE.read_text()
    for path in FOUND:
        assert path.name in text
        assert len(world_from_json(json.loads(path.read_text())["world"]).moves) <= 12
    assert text.count(".json`") == len(FOUND)
