# SPDX-License-Identifier: Apache-2.0
"""The rooms of the core do no I/O, read no clock and hold no tensors, as their imports show.

A state and its arguments alone decide what a transition returns. Three exceptions are named here,
each with its reason.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.syntax import parsed, statements

ROOT = Path(__file__).parents[2]
PURE = ["types", "oracle", "hashing", "pool", "state", "codec", "invariants", "transitions"]
ALLOWED = {
    *("__future__", "bisect", "collections", "copy", "enum", "functools", "hashlib", "itertools"),
    *("math", "operator", "struct", "typing"),
    *("attrs", "cbor2", "immutables", "msgspec", "pyrsistent", "xxhash"),
    "kvcore",
}
ENTROPY = ("kvcore/types/config.py", "os")
"""A process draws the seed of its keys once, so that no other process can guess them."""
PACKAGES = ("kvcore/oracle/device.py", "importlib")
"""The oracle finds devices that other distributions declare as entry points."""
MEMORY = {"kvcore/types/memory.py", "rust/src/types/memory.rs"}
"""A constructor reads how much memory the system has left before it makes a large pool."""

TALKS = {"open", "print", "input", "exec", "eval", "__import__", "breakpoint"}
SYSTEM = re.compile(
    r"\bstd::(fs|net|io|thread|time|process|env|os)\b|\be?print(ln)?!|\brand::|\bdbg!"
)
COMMENT = re.compile(r"//[^\n]*")


def foreign_imports(path: Path) -> set[str]:
    """Return what a file imports, by the first part of its name, beside what the core may."""
    found: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "kvcore").split(".")[0])
    return found - ALLOWED


def calls_by_name(path: Path) -> set[str]:
    """Return the names that a file calls directly."""
    return {
        node.func.id
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


@pytest.mark.parametrize("room", PURE)
def test_a_room_of_the_core_does_no_io(room: str) -> None:
    files = sorted((ROOT / "kvcore" / room).rglob("*.py"))
    assert files
    foreign = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files
        for name in foreign_imports(path)
    }
    assert foreign <= {ENTROPY, PACKAGES}
    talking = {path.relative_to(ROOT).as_posix() for path in files if calls_by_name(path) & TALKS}
    assert talking <= MEMORY


@pytest.mark.parametrize("room", PURE)
def test_a_room_of_the_twin_does_no_io(room: str) -> None:
    files = sorted((ROOT / "rust" / "src" / room).rglob("*.rs"))
    assert files
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "tests" not in path.parts
        and SYSTEM.search(COMMENT.sub("", path.read_text(encoding="utf-8")))
    }
    assert found <= MEMORY


def test_what_is_looked_for_is_found(tmp_path: Path) -> None:
    file = tmp_path / "room.py"
    file.write_text(
        "def late():\n    import time\n    from os import path\n    print(path, time)\n"
    )
    assert foreign_imports(file) == {"time", "os"}
    assert calls_by_name(file) & TALKS == {"print"}
    assert SYSTEM.search("use std::time::Instant;")
    assert not SYSTEM.search("std::sync::Arc")
