# SPDX-License-Identifier: Apache-2.0
"""Each program in examples/runtime/ prints, on both backends, what its header says."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests.conftest import Backend

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "runtime").glob("*.py"))
LINES_MAX = 60


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_runtime_prints_what_its_header_says(
    path: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvcore.manager._default_backend", lambda: backend)
    header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    command, *expected = header[header.index("    $ ") :].splitlines()
    assert command == f"    $ python examples/runtime/{path.name}"
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [line.removeprefix("    ") for line in expected]


def test_examples_of_the_runtime_are_small() -> None:
    assert EXAMPLES
    for path in EXAMPLES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX, path.name
