# SPDX-License-Identifier: Apache-2.0
"""The twin mirrors the core: the same rooms and files, with the same names in the same order.

A Rust file stands at the relative path of its Python file, or, as a part of its twin, in a folder
of that path. In the rooms of the core, each public function and class of the Python file is a
function or type of the Rust file, in the same order, and each public method is one of its
functions. What one language alone needs is listed below with its reason; a reason that is no longer
needed fails, too.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.syntax import parsed

ROOT = Path(__file__).parents[2]
PYTHON, RUST = ROOT / "kvcore", ROOT / "rust" / "src"
TWIN = re.compile(r"Twin:\s+(rust/src/[\w/]+\.rs)")
ITEM = re.compile(r"^\s*(?:pub(?:\(\w+\))? )?(?:fn|struct|enum|type) (\w+)", re.MULTILINE)
VARIANT = re.compile(r"^    ([A-Z]\w*)(?: \{|\(|,)", re.MULTILINE)
ARM = re.compile(r'^ {12}\("(\w+)", ', re.MULTILINE)
"""A call of a trace, which is a method in Python and an arm of a match in the twin."""
CORE = ("types", "hashing", "pool", "state", "transitions", "codec", "trace", "legacy")
"""The rooms whose files have the same names in both languages."""
OF_RUST = ("bindings", "fuzz")
"""The rooms that Rust alone has."""

TRANSACTION = "a mutable value needs no transaction"
BEFORE = "checked before a call reaches either language"
BY_POOL = "in block_pool.rs, which looks whether there is a policy"
VARIANT_OF = "a policy is a variant of `Eviction`"
KEYWORD = "a keyword of Rust: `note_use`"
PINS_OF_BLOCKS = ("pin", "unpin", "check_block", "check_pins", "check_unpins", "count_blocks")
GROWTH = ("measure", "plan_growth", "preallocate")
KEYS_OF_BLOCKS = ("unpublish", "unpublish_full")
TAILS_OF_BLOCKS = ("has_key", "tail_keys", "first_tail", "publish_tail", "withdraw_tails")
METHODS_OF_MAPS = ("add", "get", "items", "of", "remove", "set", "values")
PYTHON_ONLY = {
    ("pool/block_pool", "PoolTransaction"): TRANSACTION,
    ("pool/block_pool", "freeze"): TRANSACTION,
    ("pool/block_pool", "use"): KEYWORD,
    ("pool/block_pool", "clear_index"): "in block_pool/older.rs",
    ("pool/block_pool", "start_epoch"): "in block_pool/older.rs",
    **{("pool/block_pool", name): "in block_pool/pins.rs" for name in PINS_OF_BLOCKS},
    ("pool/block_pool", "note_takers"): "`note_taker` in block_pool/floored.rs",
    ("pool/block_pool", "spare"): "in pool/floors.rs",
    ("pool/block_pool", "num_kept"): "in block_pool/floored.rs",
    ("pool/floors", "taken"): "`note_taker` in block_pool/floored.rs",
    ("pool/floors", "may_take"): "in block_pool/floored.rs",
    ("pool/floors", "note"): "`note_spare` in block_pool/floored.rs",
    ("pool/floors", "first"): "`next_to_leave` in policy_pool.rs",
    ("pool/block_pool", "has_key"): "in block_pool/tailed.rs",
    ("pool/tails", "Keyed"): "for type checkers",
    ("pool/tails", "tails"): "for type checkers",
    ("pool/tails", "KeyedTransaction"): TRANSACTION,
    **{("pool/tails", name): "in block_pool.rs" for name in KEYS_OF_BLOCKS},
    **{("pool/tails", name): "in block_pool/tailed.rs" for name in TAILS_OF_BLOCKS},
    ("pool/policy_pool", "PolicyTransaction"): TRANSACTION,
    ("pool/policy_pool", "freeze"): TRANSACTION,
    ("pool/policy_pool", "seen"): "in policy_state.rs",
    ("pool/policy_pool", "place_of"): "in `enqueue_by_policy`",
    ("pool/policy_pool", "publish"): BY_POOL,
    ("pool/policy_pool", "unpublish"): BY_POOL,
    ("pool/policy_pool", "touch"): BY_POOL,
    ("pool/policy_pool", "clear_index"): BY_POOL,
    ("pool/policy_pool", "start_epoch"): BY_POOL,
    ("pool/policy_state", "with_places"): "`place_blocks` in policy_pool.rs",
    ("state/open_batch", "make_open_batch"): "the twin's map by row begins empty",
    ("state/state", "with_floors"): "`make_device` in block_pool/floored.rs",
    ("state/state", "RequestMap"): "`requests` and `rows`, which `State` has for itself",
    ("state/state", "RequestMapTransaction"): TRANSACTION,
    **{("state/state", name): "of RequestMap" for name in METHODS_OF_MAPS},
    ("state/state", "NamedPin"): "in state/named_pins.rs",
    **{("transitions/plan", name): "in plan/growth.rs" for name in GROWTH},
    ("state/state", "awaited"): "in state/samplers.rs",
    ("state/state", "awaiting"): "`set_awaited` in state/samplers.rs",
    ("state/state", "awaiting_before"): "`awaited_before` in state/samplers.rs",
    ("state/state", "scheduled"): "`schedule` in state/samplers.rs",
    ("state/state", "awaiting_none"): "`await_none` in state/samplers.rs",
    ("state/waiting", "with_waiting"): "the twin settles each request that it decodes",
    ("transitions/checkpoints", "checkpoints"): "`checkpoint`, of one group",
    ("transitions/checkpoints", "publish_states"): "`publish_of`, of one group",
    ("transitions/requests", "is_text"): "a str is UTF-8",
    ("types/policies", "QueueAware"): VARIANT_OF,
    ("types/policies", "LRU2"): VARIANT_OF,
    ("types/policies", "S3FIFO"): VARIANT_OF,
    ("types/policies", "Learned"): VARIANT_OF,
    ("types/policies", "policy_of"): VARIANT_OF,
    ("types/config", "most_pinned"): "in config/claims.rs",
    ("types/config", "tenant_of"): "in config/claims.rs",
    ("types/config", "tenants"): "floors are in the order of their salts",
    ("types/config", "host_eviction"): "`of_host` of `Eviction`",
    ("types/config", "max_rows"): "asked by runtimes, which are in Python",
    ("types/event_log", "Events"): "`EventLog`, which makes no objects before it is read",
    ("types/event_log", "to_bytes"): "`as_bytes` of `EventLog`, which has them",
    ("types/extra_inputs", "check_text"): "a text of the twin is UTF-8",
    ("types/errors", "WrongArgument"): "raised before a call reaches either language",
    ("hashing/extra_keys", "vllm_key"): "the twin lays out its bytes at once, in hash_message.rs",
    ("pool/free_queue", "FreeQueueTransaction"): TRANSACTION,
    ("pool/free_queue", "freeze"): TRANSACTION,
    ("pool/hash_index", "HashIndexTransaction"): TRANSACTION,
    ("pool/hash_index", "freeze"): TRANSACTION,
    ("pool/quarantine", "QuarantineTransaction"): TRANSACTION,
    ("pool/quarantine", "freeze"): TRANSACTION,
    ("pool/quarantine", "use"): KEYWORD,
    ("pool/priority_eviction", "PriorityPoolTransaction"): TRANSACTION,
    ("pool/priority_eviction", "freeze"): TRANSACTION,
    ("pool/priority_eviction", "make_transaction"): TRANSACTION,
    ("legacy/blocks/tiers", "check_options"): BEFORE,
    ("types/tokens", "PackedTokens"): "the twin changes a plain vector in place",
    ("types/tokens", "extend"): "the twin changes a plain vector in place",
    ("types/tokens", "check_tokens"): "a token is checked when it is converted to u32",
    ("types/tokens", "read_request_tokens"): "requests.rs refuses to add no tokens",
    ("trace/text", "BadWord"): "None in the twin",
    ("trace/text", "read_number"): "`str::parse` in the twin",
    ("trace/text", "read_u32"): "`str::parse` in the twin",
    ("trace/trace_file", "rewrite"): "one language writes the outcomes, the other must agree",
    ("transitions/slot_request", "read_hit"): BEFORE,
    ("transitions/slot_request", "make_slot_request"): BEFORE,
    ("transitions/slot_request", "check_hit_kind"): BEFORE,
    ("types/slot_request", "SlotOptions"): "keyword arguments, for type checkers",
    ("types/retention", "TokenRangeRetentionConfig"): BEFORE,
    ("types/retention", "KvCacheRetentionConfig"): BEFORE,
    ("pool/retention", "RetentionTransaction"): TRANSACTION,
    ("pool/retention", "freeze"): TRANSACTION,
    ("pool/retention", "take"): TRANSACTION,
    ("pool/retention", "unpublish"): TRANSACTION,
    ("pool/retention", "clear_index"): TRANSACTION,
    ("pool/retention", "start_epoch"): TRANSACTION,
    ("pool/retention", "with_levels"): "`set_kept` and `place_by_level`, as the twin decodes",
    ("types/values", "grown"): "a field of the twin's",
    ("types/values", "blocks"): "a field of the twin's",
    ("types/values", "Outcome"): "a transition changes the state that it is given",
}
RUST_ONLY = {
    "types/error_fields": "in Python any value is a field, and has a literal",
    "check/world/calls": "makes a call of oracle/calls.rs: kvcore/trace/calls.py",
    "check/names/same": "Python compares states by their bytes",
    "record/pen": "Python joins bytes, and writes them at once",
    "record/streamed": "Python's copies are the interpreter's",
    "check/tests/checked_calls": "tests of the properties, which Python has under tests/",
    "check/tests/checked_progress": "tests of the properties, which Python has under tests/",
    "check/tests/checked_states": "tests of the properties, which Python has under tests/",
    "check/tests/search": "tests of the search, which Python has under tests/",
    "hashing/hash_chain": "whole chains: Python's libraries hash block by block",
    "hashing/sha_ni": "instructions of processors, for which Python has no word",
    "hashing/hash_message": "the bytes that Python's libraries lay out, without an object for each",
    "lib": "the list of rooms",
    "mutants": "Python's seeded bugs are patches, in kvcore/check/mutants/",
    "oracle/calls": "a call as a value, which Python names by a str",
    "pool/prefetch": "a hint to the processor, for which Python has no word",
    "state/access": "what may be read of a state from outside: Python's fields are public",
    "state/new_blocks": "Python has tuples of ids",
    "state/row_map": "Python's maps serve; the twin looks each request up in each step",
    "types/clone_in_place": "copies in place: Python's states are shared, not copied",
    "types/violation": "an InvariantViolation, which Python raises",
    "types/ids": "newtypes for what Python has ints",
}


@cache
def python_files() -> dict[str, Path]:
    """Return the Python files by relative path, without the lists of rooms."""
    files = PYTHON.rglob("*.py")
    return {name(path, PYTHON): path for path in files if path.name != "__init__.py"}


@cache
def rust_files() -> dict[str, Path]:
    """Return the Rust files by relative path, without the lists of rooms and the unit tests."""
    files = [path for path in RUST.rglob("*.rs") if path.name not in ("mod.rs", "tests.rs")]
    found = {name(path, RUST): path for path in files}
    return {name: path for name, path in found.items() if not name.startswith(OF_RUST)}


def name(path: Path, tree: Path) -> str:
    """Return the path below a tree, without its suffix."""
    return path.relative_to(tree).with_suffix("").as_posix()


def part_of(file: str) -> str:
    """Return the file in whose folder a part stands."""
    return file.rpartition("/")[0]


def pairs() -> list[str]:
    """Return the files of the core that both languages have."""
    both = sorted(set(python_files()) & set(rust_files()))
    return [name for name in both if name.startswith(CORE)]


def public(nodes: list[ast.stmt]) -> list[ast.FunctionDef | ast.ClassDef]:
    """Return the public functions and classes among statements, in order."""
    named = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node for node in named if not node.name.startswith("_")]


def python_names(path: Path) -> tuple[list[str], list[str]]:
    """Return the public functions and classes of a file, and their public methods, in order."""
    items = public(parsed(path).body)
    classes = [item for item in items if isinstance(item, ast.ClassDef)]
    methods = [method.name for item in classes for method in public(item.body)]
    return [item.name for item in items], methods


@cache
def rust_names(path: Path) -> list[str]:
    """Return the functions, types, variants and arms of a file without its tests, in order."""
    source = path.read_text(encoding="utf-8").partition("#[cfg(test)]")[0]
    places = [
        (m.start(), m[1]) for pattern in (ITEM, VARIANT, ARM) for m in pattern.finditer(source)
    ]
    return [name for _, name in sorted(places)]


@pytest.mark.parametrize("pair", pairs())
def test_a_twin_has_the_names_of_its_core_file_in_their_order(pair: str) -> None:
    rust = rust_names(rust_files()[pair])
    items, methods = python_names(python_files()[pair])
    expected = [item for item in items if (pair, item) not in PYTHON_ONLY]
    rest = iter(rust)
    missing_or_late = [item for item in expected if item not in rest]
    assert not missing_or_late
    lacking = {method for method in methods if method not in rust}
    assert lacking <= {item for file, item in PYTHON_ONLY if file == pair}


def test_each_rust_file_stands_where_its_python_file_does() -> None:
    assert len(pairs()) > 40
    alone = {file for file in rust_files() if part_of(file) not in python_files()}
    assert alone - set(python_files()) == set(RUST_ONLY)


def test_a_python_file_that_names_a_twin_has_it() -> None:
    for file, path in python_files().items():
        header = ast.get_docstring(parsed(path)) or ""
        for twin in TWIN.findall(header):
            assert (ROOT / twin).exists()
            assert twin.startswith(f"rust/src/{OF_RUST[0]}/") or twin == f"rust/src/{file}.rs"


def test_no_exception_outlives_its_reason() -> None:
    for file in {file for file, _ in PYTHON_ONLY}:
        listed = {item for where, item in PYTHON_ONLY if where == file}
        items, methods = python_names(python_files()[file])
        twin = rust_files().get(file)
        assert listed == listed & {*items, *methods} - set(rust_names(twin) if twin else ())
