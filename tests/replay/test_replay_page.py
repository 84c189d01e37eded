# SPDX-License-Identifier: Apache-2.0
"""docs/replay.md and the README's section show what their commands give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcore.replay import command, trace_command
from tests.conftest import need_twin

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "replay.md"
README = ROOT / "README.md"


def commands_of(page: Path) -> list[list[str]]:
    """Return the words after `kvcore` of each command in a page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    found = [re.fullmatch(r"(?:\.venv/bin/)?kvcore ((?:trace|replay) .*)", each) for each in lines]
    return [each[1].split() for each in found if each]


def reported(text: str) -> str:
    """Return a report without what depends on the machine: call times, in order of cost."""
    before, _, rest = text.partition("\nus of CPU")
    return before + rest.partition("\n\n")[2]


def test_the_example_is_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    need_twin()
    pytest.importorskip("matplotlib", reason="the example draws its page")
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^```text\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    generate, show, replay, *_ = commands_of(PAGE)
    assert trace_command.main(generate[1:]) == command.FINE
    assert trace_command.main(show[1:]) == command.FINE
    assert capsys.readouterr().out == shown[0]
    assert command.main(replay[1:]) == command.FINE
    assert reported(capsys.readouterr().out) == reported(shown[1])
    assert (tmp_path / "documents.html").stat().st_size > 50_000


def test_the_blocks_of_a_model_hit_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    need_twin()
    generate, whole, inside = commands_of(PAGE)[3:]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert trace_command.main(generate[1:]) == command.FINE
    said = " ".join(PAGE.read_text("utf-8").split())
    rates = []
    for words in (whole, inside):
        assert command.main([*words[1:], "--json"]) == command.FINE
        rates.append(json.loads(capsys.readouterr().out)["hit_rate"])
    hit, ideal = ([f"{100 * each[name]:.2f} %" for each in rates] for name in ("run", "ideal"))
    assert f"hit {hit[0]} of the prompt tokens at whole blocks and {hit[1]} inside them" in said
    assert f"of {ideal[0]} and {ideal[1]} with an unlimited cache" in said


def test_the_commands_of_the_readme_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, *words in commands_of(README):
        main = trace_command.main if name == "trace" else command.main
        assert main(words) == command.FINE
    out = capsys.readouterr().out
    assert re.search(r"^hit rate +\d", out, re.MULTILINE)
