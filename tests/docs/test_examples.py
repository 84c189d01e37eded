# SPDX-License-Identifier: Apache-2.0
"""Each program in examples/ prints, on both backends, what its header says that it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Backend
from tests.helpers.examples import ROOT, check_example, check_sizes

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_header_says(
    path: Path,
    backend: Backend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_example(path, backend, monkeypatch, capsys)


def test_examples_are_small() -> None:
    check_sizes(EXAMPLES, 3)
