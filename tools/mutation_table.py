# SPDX-License-Identifier: Apache-2.0
"""The tables of drawn defects, `tests/mutation/*.json`: a row per line of code, found by its text.

A row survives moved lines: its line is the only one with its text and the given lines before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
LANGUAGES = {"python": ("kvcore", ".py"), "rust": ("rust/src", ".rs")}
UNNAMED = ("hangs", "crashes")


@attrs.define(kw_only=True)
class Row:
    """A defect: its place, the old and the new line, and the outcome.

    status: unrun (or not to the end: it has passed `stage`), killed (by test, in stage), survived
    (all stages), equivalent (for a reason), unbuildable.
    """

    file: str
    function: str
    before: list[str]
    was: str
    now: str
    status: str = "unrun"
    stage: str = ""
    test: str = ""
    reason: str = ""

    def is_named(self) -> bool:
        """Return whether the test that finds the defect is known by name."""
        return self.test not in UNNAMED


def read_table(language: str) -> list[Row]:
    """Return the committed rows of a language; empty if there is no table yet."""
    path = ROOT / "tests" / "mutation" / f"{language}.json"
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def write_table(language: str, rows: list[Row]) -> None:
    """Write the rows, one per line."""
    texts = ",\n ".join(json.dumps(attrs.asdict(row)) for row in rows)
    path = ROOT / "tests" / "mutation" / f"{language}.json"
    path.write_text(f"[{texts}]\n")


def find_line(lines: list[str], row: Row) -> int | None:
    """Return the index of the row's line; None unless there is exactly one."""
    size = len(row.before)
    stripped = [line.strip() for line in lines]
    found = [
        number
        for number in range(size, len(lines))
        if stripped[number] == row.was and stripped[number - size : number] == row.before
    ]
    return found[0] if len(found) == 1 else None


@contextmanager
def apply_row(folder: Path, row: Row) -> Iterator[None]:
    """Put the defect into a copy of the tree, and remove it at the end."""
    path = folder / row.file
    text = path.read_text()
    lines = text.split("\n")
    number = find_line(lines, row)
    assert number is not None, f"{row.file} has no single {row.was!r}"
    indent = lines[number][: -len(lines[number].lstrip())]
    lines[number] = indent + row.now
    try:
        write_source(path, "\n".join(lines))
        yield
    finally:
        write_source(path, text)


def write_source(path: Path, text: str) -> None:
    """Write a file and delete its compiled form, whose time stamp has whole seconds only."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
