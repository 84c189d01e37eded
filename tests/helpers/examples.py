# SPDX-License-Identifier: Apache-2.0
"""Examples are held to their headers: the command that runs them, and what it prints."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import Backend

ROOT = Path(__file__).parents[2]
LINES_MAX = 60
STORY_LINES_MAX = 200
"""The most lines of an example whose header shows a whole counterexample."""
LONG_LINES_MAX = {"generations.py": 380, "own_engine.py": 180}
"""The same for those that drive several managers by calls of their own, or are an engine."""


def check_example(
    path: Path,
    backend: Backend | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Assert that a program prints what its header says, on a backend; None: it asks for none."""

    def chosen() -> Backend:
        assert backend is not None
        return backend

    monkeypatch.setattr("kvcore.manager.default_backend", chosen)
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    command, *expected = header[header.index("    $ ") :].splitlines()
    assert command == f"    $ python {path.relative_to(ROOT).as_posix()}"
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [line.removeprefix("    ") for line in expected]


def check_sizes(paths: Sequence[Path], least: int) -> None:
    """Assert that there are this many programs, each small."""
    assert len(paths) >= least
    for path in paths:
        most = STORY_LINES_MAX if path.name.startswith("check_") else LINES_MAX
        most = LONG_LINES_MAX.get(path.name, most)
        assert len(path.read_text(encoding="utf-8").splitlines()) <= most, path.name
