# SPDX-License-Identifier: Apache-2.0
"""No facade grows past its bound of code lines; `python -m tests.legacy.test_size` prints each.

A code line has code on it: no comment, no docstring, no blank line. A generation has the lines of
its folder, and those of each file of `legacy/blocks/` that it reaches by imports and no older one
does: what two share counts once, in the older. A Rust file counts with the Python file of its
name, without its tests; bindings count with the transitions that they bind. The rooms of the core
beneath, `pool/` and `types/`, belong to no generation. docs/generations.md has the figures.
"""

from __future__ import annotations

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.syntax import statements

ROOT = Path(__file__).parents[2]
LEGACY, TWIN = ROOT / "kvcore" / "legacy", ROOT / "rust" / "src"
BINDINGS = {"tiers": ["tiers.rs", "tiers_dump.rs"], "by_table": ["tables.rs"]}
BOUNDS = {"v0_3": 1984, "v0": 2158, "v1_first": 507, "v1_0_8": 813}
"""V0 and V1 of 0.8.5: the code lines of vLLM 0.8.5's own files. 0.3 and the first V1: their size
when this bound was set.
"""
GENERATIONS = ["v0_3", "v0", "v1_first", "v1_0_8"]


def python_lines(text: str) -> int:
    """Count the lines of code, without docstrings."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL) and token.string.strip():
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def rust_lines(text: str) -> int:
    """Count the lines of code before the tests."""
    lines = [line.strip() for line in text.split("#[cfg(test)]")[0].split("\n")]
    return sum(bool(line) and not line.startswith("//") for line in lines)


def imported(path: Path) -> set[str]:
    """Return the modules of the older managers that a module imports."""
    found: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcore.legacy."):
            found |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    return found


@cache
def files_of(generation: str) -> set[Path]:
    """Return the Python files of a folder, and those of the older managers that they reach."""
    reached: set[Path] = set()
    ahead = {*(LEGACY / generation).glob("*.py")}
    while ahead:
        reached |= ahead
        names = {name for path in ahead for name in imported(path)}
        paths = {ROOT / f"{name.replace('.', '/')}.py" for name in names}
        ahead = {path for path in paths if path.exists()} - reached
    return reached


def twins_of(path: Path) -> list[Path]:
    """Return the Rust files that count with a Python file."""
    if path.parent.name != "blocks":
        return []
    twin = TWIN / "legacy" / "blocks" / f"{path.stem}.rs"
    bound = [TWIN / "bindings" / name for name in BINDINGS.get(path.stem, [])]
    return [each for each in [twin, *bound] if each.exists()]


@cache
def count(generation: str) -> int:
    """Return the code lines of a generation that no older one has."""
    older: set[Path] = set()
    for each in GENERATIONS[: GENERATIONS.index(generation)]:
        older |= files_of(each)
    mine = files_of(generation) - older
    twins = [twin for path in mine for twin in twins_of(path)]
    python = sum(python_lines(path.read_text()) for path in mine)
    return python + sum(rust_lines(path.read_text()) for path in twins)


@pytest.mark.parametrize("generation", BOUNDS)
def test_a_facade_is_no_larger_than_what_it_stands_for(generation: str) -> None:
    assert count(generation) <= BOUNDS[generation]


def test_the_page_has_the_figures() -> None:
    page = (ROOT / "docs" / "generations.md").read_text()
    rows = {"v0_3": "0.3, with what all share", "v0": "V0", "v1_first": "early V1"}
    for generation, name in {**rows, "v1_0_8": "V1 of 0.8.5"}.items():
        assert f"\n| {name} | {count(generation):,} |" in page


def test_each_file_of_the_twin_counts_for_a_generation() -> None:
    counted = {twin for each in GENERATIONS for path in files_of(each) for twin in twins_of(path)}
    whole = {*(TWIN / "legacy").rglob("*.rs")}
    assert {path.name for path in whole - counted} == {"mod.rs", "tests.rs"}


def test_lines_are_code_if_they_are_no_comment_and_no_docstring() -> None:
    text = '"""Says so."""\n\n# why\nONE = (\n    1,  # one\n)\n\n\n'
    text += 'def two() -> str:\n    """Two."""\n'
    assert python_lines(text + '    return """a\nb"""\n') == 6
    assert (
        rust_lines("//! Says so.\n\nfn one() {\n    // why\n}\n#[cfg(test)]\nmod tests {}\n") == 2
    )


if __name__ == "__main__":
    for each in GENERATIONS:
        print(f"{each}: {count(each)} code lines, at most {BOUNDS[each]}")
