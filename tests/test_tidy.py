# SPDX-License-Identifier: Apache-2.0
"""The style of this project, checked on every file that git tracks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.syntax import parsed, statements

ROOT = Path(__file__).parents[1]
LINES_MAX = 400
COLUMNS_MAX = 100
FILES_MAX, TOP_MAX = 28, 8
FUNCTION_LINES_MAX = 60
MODULES_MAX = 199
TABLE_ROOMS = re.compile(r"(kvcore|rust/src)/(pool|state|transitions)/")
TABLE_COMMANDS = re.compile(r"\b(SetTable|CutTable)\b")
STRUCT_ROOMS = re.compile(r"kvcore/(types|state)/")
OTHER_STRUCTS = {
    "kvcore/explain/explanation.py": {"Removal"},
    "kvcore/pool/key_map.py": {"Entry"},
    "kvcore/record/reader.py": {"RecordedCall"},
    "kvcore/replay/records/counterpart.py": {"Made"},
    "tests/core/codec/test_event_msgpack.py": {
        *("Batch", "Stored", "Removed", "Cleared"),
        *("OldStored", "OldRemoved", "OldCleared"),
    },
}
"""The structs outside those rooms: losses of keys, of which a call has many; the entries of the
index, which the garbage collector must not track; the calls of records, of which a replay makes one
or two each; and what a consumer of events decodes msgpack to.
"""
NO_ATTRS = {
    "kvcore/legacy/v1_0_8/block_hashes.py": "engines compare vLLM's record with plain tuples",
    "kvcore/legacy/v1_0_8/kv_cache_interface.py": "engines copy the specs by dataclasses.replace",
    "tests/conformance/legacy_utils/test_sizes.py": "specs as an engine declares them",
    "benches/peers/replay.py": "runs in the environment of a peer, which may have no attrs",
    "benches/peers/work.py": "the same",
    "tools/bootstrap.py": "runs before anything is installed",
    "kvcore/sanitizer/engines/mini_sglang.py": "the engine's scheduler unpacks it",
    "runtime/kvcore_runtime/attention/read_plan.py": "its fields go to a process as a plain tuple",
    "runtime/kvcore_runtime/engine/forward.py": "the same",
}
"""Files whose values are tuples with names, or dataclasses, and why."""
NAMED_ROOMS = re.compile(r"kvcore/(?!legacy/|compat/|sanitizer/hunter/template)|runtime/")
"""Where names are ours: facades have the names of their originals, and a template is copied."""
RUNTIME = "runtime/kvcore_runtime"
SAME_NAMES = {"Options", "Report", "Result"}
"""What a command is given and what it gives: `kvcore replay` and `kvcore route` have one each, and
the checker a report.
"""
ENGINES = ("kvcore/sanitizer/engines/", "kvcore/check/managers/")
"""Adapters, each for the environment of its engine, which computes with torch itself. They are
loaded by the name that a user gives, so that nothing else of kvcore needs what they import.
"""
SPDX = "SPDX-License-Identifier: Apache-2.0"
GENERATED = ("kvcore/_rust.pyi",)

MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:home|root|work|Users|opt|mnt)/\w")
REGISTRY = re.compile(r"\b(?:pypi|crates|debian|pythonhosted)\.(?:org|io)\b|--(?:extra-)?index-url")


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would add, below the patterns given."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip(f"git does not list this folder: {listed.stderr.strip()}")
    return [
        path for name in sorted(set(listed.stdout.split("\n"))) if (path := ROOT / name).is_file()
    ]


def sources(*suffixes: str) -> list[Path]:
    """Hand-written source files with one of the suffixes."""
    found = [
        path for path in tracked(*(f"*{suffix}" for suffix in suffixes)) if path.stat().st_size
    ]
    return [path for path in found if name_of(path) not in GENERATED]


def name_of(path: Path) -> str:
    """Return the path as the repository names it."""
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Yield each module that a Python file imports, at any depth, and each name from one."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imports_by_name(path: Path) -> Iterator[str]:
    """Yield each module that a Python file imports by a call; a formatted name's beginning."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            if called in {"import_module", "__import__", "find_spec"}:
                yield ast.unparse(node.args[0]).lstrip("f").strip("'\"")


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function, without its decorators."""
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def rust_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and number of lines of each function, by the indentation that rustfmt gives its end."""
    start, name, indent = 0, "", ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        opened = re.match(r"( *)(?:pub(?:\([a-z]+\))? )?(?:const |unsafe )*fn (\w+)", line)
        if opened:
            start, (indent, name) = number, opened.groups()
        if name and (line.startswith(f"{indent}}}") or (opened and line.endswith(("}", ";")))):
            yield name, number - start + 1
            name = ""


def test_no_file_is_longer_or_wider_than_a_reader_likes() -> None:
    files = sources(".py", ".rs")
    assert len(files) > 20
    found = []
    for path in files:
        lines = path.read_text().splitlines()
        if len(lines) > LINES_MAX:
            found.append(f"{name_of(path)} has {len(lines)} lines")
        for number, line in enumerate(lines, 1):
            if len(line) > COLUMNS_MAX:
                found.append(f"{name_of(path)}:{number} has {len(line)} columns")
    assert not found, "\n".join(found)


def test_no_folder_has_more_files_than_a_reader_takes_in() -> None:
    modules = [path for path in sources(".py") if path.parent == ROOT / "kvcore"]
    assert len(modules) <= TOP_MAX
    counts = Counter(name_of(path.parent) for path in tracked("*"))
    assert {name: count for name, count in counts.items() if count > FILES_MAX} == {}


def test_each_file_opens_with_its_licence_and_says_what_it_is() -> None:
    for path in sources(".py", ".rs"):
        lines = path.read_text().splitlines()
        rust = path.suffix == ".rs"
        first = next(line for line in lines if not line.startswith("#!"))
        assert first == f"{'//' if rust else '#'} {SPDX}", f"{name_of(path)} opens with {first!r}"
        if rust:
            said = any(line.startswith("//! ") for line in lines[1:3])
        else:
            said = ast.get_docstring(parsed(path)) is not None
        assert said, f"{name_of(path)} does not say what it is"


def test_each_function_fits_a_screen() -> None:
    found = []
    for path in sources(".py", ".rs"):
        functions = rust_functions if path.suffix == ".rs" else python_functions
        for name, num_lines in functions(path):
            if num_lines > FUNCTION_LINES_MAX:
                found.append(f"{name} in {name_of(path)} has {num_lines} lines")
    assert not found, "\n".join(found)


def test_the_length_of_rust_functions_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "three.rs"
    body = "        if x {\n            y();\n        }\n" * 20
    file.write_text(f"fn one() {{}}\nimpl A {{\n    pub(crate) fn two() {{\n{body}    }}\n}}\n")
    assert list(rust_functions(file)) == [("one", 1), ("two", 62)]


def test_the_core_imports_no_torch_and_no_runtime() -> None:
    core = [path for path in sources(".py") if name_of(path).startswith("kvcore/")]
    assert core
    for path in core:
        modules = {*imports(path), *imports_by_name(path)}
        packages = {module.split(".")[0] for module in modules}
        foreign = packages & {"torch", "numpy", "kvcore_runtime", "engines", "tests", "benches"}
        if name_of(path).startswith(ENGINES):
            foreign -= {"torch", "numpy"}
        else:
            adapters = tuple(folder.replace("/", ".") for folder in ENGINES)
            foreign |= {module for module in modules if f"{module}.".startswith(adapters)}
        assert not foreign, f"{name_of(path)} imports {foreign}"


def test_what_runs_without_torch_imports_none() -> None:
    """`make test-core` has none; the tests of engines' adapters skip themselves before they do."""
    files = {name_of(path): {*imports(path)} for path in tracked("tests/*.py")}
    needy = {"torch", "kvcore_runtime"}
    found = {name for name in files if needy & {each.split(".")[0] for each in files[name]}}
    while more := {
        name
        for name in files.keys() - found
        if files[name] & {each.removesuffix(".py").replace("/", ".") for each in found}
    }:
        found |= more
    assert "tests/bytes/run.py" in found
    allowed = ("tests/runtime/", "tests/engines/")
    assert [name for name in found if "/test_" in name and not name.startswith(allowed)] == []


def test_an_import_by_name_is_one(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text("x = importlib.import_module('torch.nn')\n__import__(f'a.{x}')\n")
    assert sorted(imports_by_name(file)) == ["a.{x}", "torch.nn"]


def test_one_file_of_each_language_changes_block_tables() -> None:
    found = set()
    for path in sources(".py", ".rs"):
        code = path.read_text().partition("#[cfg(test)]")[0]
        if TABLE_ROOMS.match(name_of(path)) and TABLE_COMMANDS.search(code):
            found.add(name_of(path))
    assert found == {"kvcore/state/table_edit.py", "rust/src/state/table_edit.rs"}


def made_as(path: Path, *words: str) -> set[str]:
    """Return the classes of a file that derive from one of these, or have one as a decorator."""
    found = set()
    for node in statements(path):
        if isinstance(node, ast.ClassDef):
            origins = map(ast.unparse, (*node.bases, *node.decorator_list))
            if {origin.partition("(")[0].split(".")[-1] for origin in origins} & {*words}:
                found.add(node.name)
    return found


def test_values_are_attrs_classes_and_structs_only_where_calls_make_them() -> None:
    files = {name_of(path): path for path in sources(".py")}
    structs = {name: made_as(path, "Struct") for name, path in files.items()}
    rooms = {name: made for name, made in structs.items() if STRUCT_ROOMS.match(name)}
    assert sum(map(len, rooms.values())) > 20
    assert {n: made for n, made in structs.items() if made and n not in rooms} == OTHER_STRUCTS
    others = {name for name, path in files.items() if made_as(path, "NamedTuple", "dataclass")}
    assert others == NO_ATTRS.keys()


def test_a_class_that_others_import_has_a_name_of_its_own() -> None:
    """Of the classes of one name, at most one is imported outside its folder."""
    defined: dict[str, set[str]] = defaultdict(set)
    shared: dict[str, set[str]] = defaultdict(set)
    for path in sources(".py"):
        for node in statements(path):
            if isinstance(node, ast.ClassDef) and NAMED_ROOMS.match(name_of(path)):
                defined[node.name].add(name_of(path))
            elif isinstance(node, ast.ImportFrom) and node.module:
                file = node.module.replace(".", "/").replace("kvcore_runtime", RUNTIME) + ".py"
                if Path(file).parent.as_posix() != name_of(path.parent):
                    for alias in node.names:
                        shared[alias.name].add(file)
    assert sum(map(len, defined.values())) > 700
    found = {name: files & shared[name] for name, files in defined.items()}
    assert {name for name, files in found.items() if len(files) > 1} == SAME_NAMES


def test_one_file_imports_the_compiled_twin() -> None:
    found = [path for path in sources(".py") if "kvcore._rust" in imports(path)]
    assert [name_of(path) for path in found] == ["kvcore/_twin.py"]


def test_nothing_names_a_machine_or_a_registry() -> None:
    this_file = Path(__file__).resolve()
    for path in tracked("*"):
        if path == this_file or path.suffix in {".png", ".lock"}:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = MACHINE_PATH.search(line) or REGISTRY.search(line)
            assert found is None, f"{name_of(path)}:{number} names {found}"


def test_the_readme_of_the_tests_names_each_folder() -> None:
    reported = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    parts = [name_of(path).split("/") for path in tracked("tests/*")]
    folders = {each[1] for each in parts if len(each) > 2}
    assert {folder for folder in folders if f"`{folder}/" not in reported} == set()
    files = {each[1] for each in parts if len(each) == 2} - {"README.md", "conftest.py"}
    assert {file for file in files if f"`{file}`" not in reported} == set()


def test_the_lock_pins_every_package_by_hash() -> None:
    for lock in tracked("locks/*.txt"):
        entries = re.split(r"\n(?=\S)", lock.read_text().strip())
        for entry in entries:
            name = entry.split()[0]
            assert "==" in name, f"{name_of(lock)}: {name} has no exact version"
            assert "--hash=sha256:" in entry, f"{name_of(lock)}: {name} has no hash"


def test_the_lock_of_the_peers_knows_what_kvcore_depends_on() -> None:
    dependencies = tomllib.loads((ROOT / "Cargo.toml").read_text())["dependencies"]
    needed = {name for name, each in dependencies.items() if "optional" not in each}
    lock = tomllib.loads((ROOT / "benches" / "peers" / "Cargo.lock").read_text())
    locked = next(each for each in lock["package"] if each["name"] == "kvcore")["dependencies"]
    assert {name.split()[0] for name in locked} == needed


def test_kvcore_is_imported_in_a_moment() -> None:
    """The modules of an import are counted: seconds would measure other processes as well."""
    code = "import sys; known = {*sys.modules}; import kvcore; print(len({*sys.modules} - known))"
    command = [sys.executable, "-c", code]
    reported = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(reported) <= MODULES_MAX


def test_kvcore_is_imported_without_what_only_tests_need() -> None:
    code = "import sys, kvcore; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pytest", "hypothesis"} & set(loaded)
