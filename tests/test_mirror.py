# SPDX-License-Identifier: Apache-2.0
"""The twin mirrors the core: the same files, with the same names in the same order.

Rules: a Python file that names a twin in its header has it, and every Rust file of the core is such
a twin. Each public function and class of the Python file is a function or type of the Rust file, in
the same order; each public method is one of its functions. What one language alone needs is listed
below with its reason; a reason that is no longer needed fails, too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TWIN = re.compile(r"Twin:\s+(rust/src/[\w/]+\.rs)")
ITEM = re.compile(r"^\s*(?:pub(?:\(\w+\))? )?(?:fn|struct|enum|type) (\w+)", re.MULTILINE)
VARIANT = re.compile(r"^    ([A-Z]\w*)(?: \{|\(|,)", re.MULTILINE)

DRAFT = "a mutable value needs no draft"
KEYWORD = "a keyword of Rust: `note_use`"
PYTHON_ONLY = {
    ("block_pool.py", "PoolDraft"): DRAFT,
    ("block_pool.py", "freeze"): DRAFT,
    ("block_pool.py", "use"): KEYWORD,
    ("decode.py", "read_event"): "in decode_events.rs, a part of decode.rs",
    ("errors.py", "BackendMissing"): "the twin is not missing where it runs",
    ("errors.py", "KvcoreError"): "the enum of its subclasses, `Error`",
    ("errors.py", "WrongArgument"): "raised before a call reaches either language",
    ("extra_keys.py", "check_kinds"): "raised before a call reaches either language",
    ("extra_keys.py", "vllm_key"): "the twin lays out its bytes at once, in message.rs",
    ("free_queue.py", "FreeQueueDraft"): DRAFT,
    ("free_queue.py", "freeze"): DRAFT,
    ("hash_index.py", "HashIndexDraft"): DRAFT,
    ("hash_index.py", "freeze"): DRAFT,
    ("quarantine.py", "QuarantineDraft"): DRAFT,
    ("quarantine.py", "freeze"): DRAFT,
    ("quarantine.py", "use"): KEYWORD,
    ("ranked.py", "RankedDraft"): DRAFT,
    ("ranked.py", "freeze"): DRAFT,
    ("ranked.py", "make_draft"): DRAFT,
    ("state.py", "Draft"): DRAFT,
    ("state.py", "freeze"): DRAFT,
    ("state.py", "store"): DRAFT,
    ("state.py", "transition"): DRAFT,
    ("tiers.py", "check_options"): "checked before a call reaches either language",
    ("tokens.py", "check_tokens"): "a token is checked when it is converted to u32",
    ("tokens.py", "read_request_tokens"): "requests.rs refuses to add no tokens",
    ("trace_text.py", "BadWord"): "None in the twin",
    ("trace_text.py", "read_number"): "`str::parse` in the twin",
    ("trace_text.py", "read_u32"): "`str::parse` in the twin",
    ("trace.py", "rewrite"): "one language writes the outcomes, the other must agree",
    ("values.py", "Outcome"): "a transition changes the state that it is given",
}
RUST_ONLY = {
    "access.rs": "what may be read of a state from outside: Python's fields are public",
    "decode_events.rs": "a part of decode.rs, which is long enough",
    "decode_request.rs": "a part of decode.rs, which is long enough",
    "ids.rs": "newtypes for what Python has ints",
    "lib.rs": "the list of modules",
    "message.rs": "the bytes that Python's libraries lay out, without an object for each",
    "mutants.rs": "Python's seeded bugs are patches, in kvcore/check/mutants/",
    "open_batch.rs": "a part of state.rs: the links of what Python has as tuples",
    "prefetch.rs": "a hint to the processor, for which Python has no word",
    "quiet.rs": "what the twin need not look at in most steps",
    "reuse.rs": "copies in place: Python's states are shared, not copied",
    "row_map.rs": "Python's maps serve; the twin asks it of each request in each step",
    "trace_words.rs": "a part of trace_calls.rs: the conversions that Python has",
}

CHECKER_RUST_ONLY = {
    "arena.rs": "a part of flight_model.rs: Python packs a node as bytes",
    "calls.rs": "the twin of kvcore/calls.py: requests are named by numbers",
    "closing.rs": "a part of core_model.rs, which is long enough",
    "flight_invariants.rs": "a part of invariants.rs, of batches in flight",
    "flight_name.rs": "a part of flight.rs, which is long enough",
    "forward.rs": "a part of ghost.rs, which is long enough",
    "invariants.rs": "the twin of kvcore/invariants.py: the core in Rust judges nothing",
    "judged.rs": "tests of the judges, which Python has under tests/",
    "judged_calls.rs": "tests of the judges, which Python has under tests/",
    "judged_progress.rs": "tests of the judges, which Python has under tests/",
    "mirror.rs": "a part of ghost.rs, which is long enough",
    "mod.rs": "the list of modules",
    "order.rs": "a part of canonical.rs, without the generators that Python has",
    "pack.rs": "a part of core_model.rs: Python packs a state as its canonical bytes",
    "renaming.rs": "a part of canonical.rs, which is long enough",
    "request_invariants.rs": "the twin of kvcore/request_invariants.py",
    "same.rs": "Python compares states by their bytes",
    "tests.rs": "tests of the search, which Python has under tests/",
    "visited.rs": "a part of search.rs: Python's sets and arrays serve",
}


def twins() -> dict[Path, Path]:
    """The Python files that name a twin in their header, each with the twin's path."""
    found = {}
    for path in sorted((ROOT / "kvcore").glob("*.py")):
        header = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        twin = TWIN.search(header)
        if twin is not None:
            found[path] = ROOT / twin.group(1)
    return found


def public(nodes: list[ast.stmt]) -> list[ast.FunctionDef | ast.ClassDef]:
    """The public functions and classes among statements, in order."""
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node for node in named if not node.name.startswith("_")]


def python_names(path: Path) -> tuple[list[str], list[str]]:
    """The public functions and classes of a file, and their public methods, in order."""
    items = public(ast.parse(path.read_text(encoding="utf-8")).body)
    classes = [item for item in items if isinstance(item, ast.ClassDef)]
    methods = [method.name for item in classes for method in public(item.body)]
    return [item.name for item in items], methods


def rust_names(path: Path) -> list[str]:
    """The functions, types and variants of a file without its tests, in order."""
    source = path.read_text(encoding="utf-8").partition("#[cfg(test)]")[0]
    places = [(m.start(), m[1]) for pattern in (ITEM, VARIANT) for m in pattern.finditer(source)]
    return [name for _, name in sorted(places)]


@pytest.mark.parametrize("path", twins(), ids=lambda path: path.name)
def test_a_twin_has_the_names_of_its_core_file_in_their_order(path: Path) -> None:
    twin = twins()[path]
    assert twin.exists()
    rust = rust_names(twin)
    items, methods = python_names(path)
    expected = [name for name in items if (path.name, name) not in PYTHON_ONLY]
    rest = iter(rust)
    missing_or_late = [name for name in expected if name not in rest]
    assert not missing_or_late
    lacking = {name for name in methods if name not in rust}
    assert lacking <= {name for file, name in PYTHON_ONLY if file == path.name}


def test_every_rust_file_of_the_core_is_a_twin() -> None:
    files = {path.name for path in (ROOT / "rust" / "src").glob("*.rs")}
    twin_names = {path.name for path in twins().values() if path.parent.name == "src"}
    assert files == twin_names | set(RUST_ONLY)


def test_no_exception_outlives_its_reason() -> None:
    for path, twin in twins().items():
        listed = {name for file, name in PYTHON_ONLY if file == path.name}
        if not listed:
            continue
        items, methods = python_names(path)
        assert listed == listed & {*items, *methods} - set(rust_names(twin))


def test_every_rust_file_of_the_checker_is_a_twin() -> None:
    """Python has more: registries, stories and what people write themselves."""
    python = {path.stem for path in (ROOT / "kvcore" / "check").glob("[!_]*.py")}
    files = {path.name: path for path in (ROOT / "rust" / "src" / "check").glob("*.rs")}
    assert {name for name in files if name.removesuffix(".rs") not in python} <= set(
        CHECKER_RUST_ONLY
    )
    assert set(CHECKER_RUST_ONLY) <= set(files)
    for name in set(files) - set(CHECKER_RUST_ONLY):
        said = f"Twin: kvcore/check/{name.removesuffix('.rs')}.py"
        header = " ".join(files[name].read_text(encoding="utf-8").replace("//!", " ").split())
        assert said in header, f"{name} does not name its twin"
