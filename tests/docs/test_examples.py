# SPDX-License-Identifier: Apache-2.0
"""Each program in examples/ prints, on both backends, what its header says that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Backend
from tests.helpers.examples import ROOT, check_example, check_sizes

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OF_PYTHON = [path for path in EXAMPLES if path.stem in ("check_manager", "check_policy")]
"""Examples that make no manager of this project, so there is one way to run them."""


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path not in OF_PYTHON], ids=lambda path: path.stem
)
def test_an_example_prints_what_its_header_says(
    path: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_example(path, backend, monkeypatch, capsys)


@pytest.mark.parametrize("path", OF_PYTHON, ids=lambda path: path.stem)
def test_an_example_without_a_manager_prints_what_its_header_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_example(path, None, monkeypatch, capsys)


OF_THE_ENGINE = {
    "token": ("or [self.sampled[work.row]]", "or [STOP]"),
    "table": (
        "self.tables[command.row, command.position] = command.block",
        "self.tables.setdefault((command.row, command.position), command.block)",
    ),
}
"""Lines of examples/own_engine.py, and what would make its answers wrong."""


@pytest.mark.parametrize("name", OF_THE_ENGINE)
def test_the_engine_of_the_examples_finds_what_is_wrong_with_it(name: str) -> None:
    source = (ROOT / "examples" / "own_engine.py").read_text(encoding="utf-8")
    right, wrong = OF_THE_ENGINE[name]
    assert source.count(right) == 1
    with pytest.raises(SystemExit, match="wrong answers: "):
        exec(compile(source.replace(right, wrong), name, "exec"), {"__name__": "__main__"})


def test_examples_are_small() -> None:
    check_sizes(EXAMPLES, 3)
