# SPDX-License-Identifier: Apache-2.0
"""The tables of one-line defects: enough rows, a reason for each that lives, and found by text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.mutation import applies, drawn_from
from tools.mutation_stages import ROOT, known_tests
from tools.mutation_table import LANGUAGES, UNNAMED, Row, apply_row, find_line, read_table

CODE = "def one():\n    return 1\n\n\ndef two():\n    x = 2\n    return 1\n"
ROW = Row(file="code.py", function="two", before=["x = 2"], was="return 1", now="return 2")


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_table_has_enough_rows_each_killed_or_with_a_reason(language: str) -> None:
    rows = [row for row in read_table(language) if row.status != "unbuildable" and applies(row)]
    equivalent = [row for row in rows if row.status == "equivalent"]
    assert len(rows) >= 150
    assert len(equivalent) <= len(rows) / 10
    assert all(row.reason for row in equivalent)
    assert {row.status for row in rows} == {"killed", "equivalent"}
    assert all(row.test for row in rows if row.status == "killed")


def named(language: str) -> set[str]:
    """Return the tests that kill a table's rows."""
    killed = (row.test for row in read_table(language) if row.status == "killed")
    return {test for test in killed if test not in UNNAMED}


def test_each_killed_row_names_a_test_that_there_is() -> None:
    names = {name for name in named("python") | named("rust") if name.startswith("tests/")}
    files = {name.partition("::")[0] for name in names}
    assert names <= known_tests("python", sorted(files))


def test_each_killed_row_names_a_test_of_cargo_that_there_is() -> None:
    names = {name for name in named("rust") if not name.startswith("tests/")}
    written: set[str] = set()
    for path in (ROOT / "rust").rglob("*.rs"):
        place = path.relative_to(ROOT / "rust/src" if "src" in path.parts else path.parent)
        module = "::".join(part for part in place.with_suffix("").parts if part != "mod")
        text = path.read_text()
        inner = "tests::" if "mod tests {" in text else ""
        found = re.findall(r"#\[test\]\s+fn (\w+)", text)
        written |= {f"{module}::{inner}{name}" for name in found}
        written |= set(found)
    assert names <= written


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_row_is_in_a_file_that_a_new_draw_reads(language: str) -> None:
    assert {row.file for row in read_table(language)} <= set(drawn_from(language))


def test_a_row_is_found_after_its_line_moved_and_not_if_it_changed() -> None:
    assert find_line(CODE.split("\n"), ROW) == 6
    assert find_line(("import os\n" + CODE).split("\n"), ROW) == 7
    assert find_line(CODE.replace("x = 2", "x = 3").split("\n"), ROW) is None
    assert find_line((CODE + CODE).split("\n"), ROW) is None


def test_a_defect_is_taken_out_again_with_what_was_compiled_of_it(tmp_path: Path) -> None:
    path, cache = tmp_path / "code.py", tmp_path / "__pycache__"
    path.write_text(CODE)
    cache.mkdir()
    (cache / "code.cpython-311.pyc").touch()
    with apply_row(tmp_path, ROW):
        assert path.read_text() == CODE[: -len("return 1\n")] + "return 2\n"
        assert not list(cache.iterdir())
    assert path.read_text() == CODE
