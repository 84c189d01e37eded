# SPDX-License-Identifier: Apache-2.0
"""The rooms of both languages stand in one order, and each imports only from those before it.

An import that stands inside a function, or that only a type checker reads, counts as any other. In
Rust every path that begins with `crate::` counts, but those of unit tests. No module imports one
that imports it, over however many steps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers.syntax import statements

ROOT = Path(__file__).parents[1]
PYTHON, RUST = ROOT / "kvcore", ROOT / "rust" / "src"

ROOMS = (
    *("mutants", "types", "errors", "oracle", "hashing", "pool", "state", "codec", "invariants"),
    *("transitions", "_rust", "_twin", "record", "backend", "explain", "manager", "metrics"),
    "kvcore",
    *(
        "scheduler",
        "event_index",
        "far",
        "trace",
        "fuzz",
        "compat",
        "cli",
        "sanitizer",
        "sizing",
        "__main__",
        "legacy",
        "check",
        "replay",
        "route",
        "view",
        "bindings",
    ),
)
"""A room is a folder or a file at the top of `kvcore` or of `rust/src`; `kvcore` is the public
door. Rust alone has `mutants` (seeded bugs), `fuzz` and `bindings`, which is `_rust` in Python.
"""
RUST_ROOMS = [room for room in ROOMS if room != "oracle"]
RUST_ROOMS.insert(RUST_ROOMS.index("state") + 1, "oracle")
"""The twin's oracle reads the fields of a state. Python's declares in `state_like.py` what it
reads, so it can stand earlier.
"""

CRATE = re.compile(r"\bcrate::((?:\w+::)*)(\{[^;]*?\}|\w+)")
COMMENT = re.compile(r"//[^\n]*")
UNIT_TESTS = "#[cfg(test)]\nmod tests {"

Arrows = dict[str, set[str]]
"""Each module by its dotted name, without the root, and the modules that it imports."""


def python_arrows(root: Path = PYTHON) -> Arrows:
    """Return the imports among Python modules below a folder; its `__init__.py` has its name."""
    known = {dotted(path, root, "__init__"): path for path in root.rglob("*.py")}
    arrows: Arrows = {name: set() for name in known}
    for name, path in known.items():
        for node in statements(path):
            if isinstance(node, ast.Import):
                found = [alias.name.split(".") for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found = [[*node.module.split("."), alias.name] for alias in node.names]
            else:
                continue
            targets = {resolved(parts[1:], known, root) for parts in found if parts[0] == root.name}
            arrows[name] |= targets - {name}
    return arrows


def resolved(parts: list[str], known: Iterable[str], root: Path) -> str:
    """Return the imported module: the longest name that is one, and the root without any."""
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in known:
            return ".".join(parts[:end])
    return parts[0] if parts and (root / f"{parts[0]}.pyi").exists() else root.name


def rust_arrows(root: Path = RUST) -> Arrows:
    """Return the imports among the Rust modules, without their unit tests."""
    files = [path for path in root.rglob("*.rs") if path.stem not in ("lib", "tests")]
    known = {dotted(path, root, "mod"): path for path in files if "tests" not in path.parts}
    arrows: Arrows = {name: set() for name in known}
    for name, path in known.items():
        code = COMMENT.sub("", path.read_text(encoding="utf-8").partition(UNIT_TESTS)[0])
        assert "super::super" not in code, f"{name}: a path upwards, which is not read here"
        for start, rest in CRATE.findall(code):
            assert "{" not in rest[1:], f"{name}: braces in braces, which are not read here"
            for item in rest.strip("{}").split(","):
                parts = [*start.split("::")[:-1], *item.strip().split("::")]
                ends = range(len(parts), 0, -1)
                names = (".".join(parts[:end]) for end in ends)
                arrows[name] |= {next(each for each in names if each in known)} - {name}
    return arrows


def dotted(path: Path, root: Path, door: str) -> str:
    """Return a module's name; that of a folder's `__init__.py` is the folder's."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == door else parts) or root.name


def upward(arrows: Arrows, rooms: Sequence[str] = ROOMS) -> list[str]:
    """Return the imports of a room that does not stand before the one that imports it."""
    names = {*arrows, *set().union(*arrows.values())}
    of = {name: rooms.index(name.split(".")[0]) for name in names}
    return sorted(
        f"{name} imports {target}"
        for name, targets in arrows.items()
        for target in targets
        if of[target] > of[name]
    )


def cycle(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the modules of one import cycle, or an empty list."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


ORDERS = [(python_arrows(), ROOMS), (rust_arrows(), RUST_ROOMS)]
LANGUAGES = pytest.mark.parametrize(("arrows", "rooms"), ORDERS, ids=["py", "rs"])


@LANGUAGES
def test_a_room_imports_only_from_rooms_before_it(arrows: Arrows, rooms: Sequence[str]) -> None:
    assert sum(map(len, arrows.values())) > 700
    assert upward(arrows, rooms) == []


@LANGUAGES
def test_no_module_imports_one_that_imports_it(arrows: Arrows, rooms: Sequence[str]) -> None:
    assert {name.split(".")[0] for name in arrows} <= {*rooms}
    assert cycle(arrows) == []


def test_a_late_and_a_typed_import_are_arrows(tmp_path: Path) -> None:
    root = tmp_path / "kvcore"
    (root / "types").mkdir(parents=True)
    (root / "state").mkdir()
    late = "def use():\n    from kvcore.state.state import State\n    return State\n"
    typed = "if TYPE_CHECKING:\n    from kvcore.types import keys\n"
    (root / "types" / "keys.py").write_text(late)
    (root / "state" / "state.py").write_text(typed)
    arrows = python_arrows(root)
    assert upward(arrows) == ["types.keys imports state.state"]
    assert cycle(arrows) == ["types.keys", "state.state", "types.keys"]


def test_an_import_of_a_unit_test_is_no_arrow(tmp_path: Path) -> None:
    for room in ("types", "state"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "mod.rs").write_text(f"pub mod {room};\n")
    used = "use crate::state::state::{State, make};\n"
    (tmp_path / "state" / "state.rs").write_text("// crate::codec::encode\n")
    keys = tmp_path / "types" / "types.rs"
    keys.write_text(f"{UNIT_TESTS}\n    {used}}}\n")
    assert upward(rust_arrows(tmp_path)) == []
    keys.write_text(used)
    assert upward(rust_arrows(tmp_path)) == ["types.types imports state.state"]
