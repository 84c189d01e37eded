# SPDX-License-Identifier: Apache-2.0
"""Generate pages of the site, and rewrite links that lead out of docs/.

The start page is README.md. The reference comes from the docstrings and from the help texts of the
commands. A link to a file outside docs/ becomes the file's name: the site has no source tree.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
RECORD = ("recorder", "reader", "errors")
RUNTIME = ("cache.apply", "cache.layout", "engine.engine", "engine.exchange")
METHODS = {
    "Requests": "add_request add_tokens add_block_hashes add_drafts accept truncate remove_request",
    "Look-up and allocation": "get_computed_blocks allocate_slots can_allocate checkpoint_stop"
    " append fork",
    "Release and eviction": "free unschedule remove_skipped_blocks evict_blocks reset_prefix_cache"
    " advance_epoch stale_requests tick extend_retention"
    " pin_prefix unpin_prefix pin unpin",
    "Swap between tiers": "swap_out swap_in",
    "External tokens, store and load": "cache_blocks rewind store load complete_operation",
    "Batches": "take_batch complete cancel in_flight",
    "Events and statistics": "take_events take_stats take_new_block_ids",
    "Queries": "get_blocks get_block_ids get_block_keys get_block_key get_cached_block has_key"
    " num_owners get_num_common_prefix_blocks num_tokens num_draft_tokens num_output_placeholders"
    " num_computed_tokens get_row status epoch num_free_blocks num_free_host_blocks num_due_blocks"
    " num_cached_blocks quarantined_blocks usage",
    "Explanations": "explain_miss explain_refusal",
    "Recording": "start_recording stop_recording",
    "The state": "state check encode restore",
}
"""The sections of the manager's page; `pytest tests/docs` checks that no method is missing."""
ALSO = dict.fromkeys(("load", "can_allocate", "explain_refusal"), "allocate_slots")
"""Method -> another method whose errors it raises as well."""
PARAMETER = re.compile(r"(<p>|\.\s)([a-z]\w*):\s")
"""Matches a sentence of a docstring that describes one parameter."""


def _imports(door: str, room: str) -> list[str]:
    """Return the modules of a room that a package's `__init__.py` imports."""
    found = []
    for node in ast.walk(ast.parse((ROOT / door / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == room:
            found += [f"{room}.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{room}."):
            found.append(str(node.module))
    return list(dict.fromkeys(found))


ERRORS = ("base_error", "pool_errors", "errors")
ALONE = (*(f"kvcore.types.{name}" for name in ERRORS), "kvcore.types.policy")
"""Modules of public values that have pages of their own."""
MODULES = {
    "transitions": (
        "The transitions: arguments, order and errors of each call",
        _imports("kvcore/transitions", "kvcore.transitions"),
    ),
    "types": (
        "Values and commands",
        [name for name in _imports("kvcore", "kvcore.types") if name not in ALONE],
    ),
    "errors": ("Errors", [f"kvcore.types.{name}" for name in ERRORS]),
    "around": (
        "vLLM's interface, metrics and the scheduler",
        ["kvcore.compat.manager", "kvcore.metrics", "kvcore.scheduler"],
    ),
    "policies": ("Eviction policies", ["kvcore.types.policy", "kvcore.types.policies"]),
    "events": (
        "Events between processes",
        [
            *("kvcore.event_index.index", "kvcore.event_index.event_log"),
            *("kvcore_runtime.events.publisher", "kvcore_runtime.events.event_source"),
        ],
    ),
    "metrics": ("Metrics for Prometheus", ["kvcore_runtime.prometheus.exporter"]),
    "ranks": (
        "Ranks",
        [f"kvcore_runtime.ranks.{name}" for name in ("leader", "follower", "links", "shard")]
        + ["kvcore_runtime.ranks.step_wire", "kvcore_runtime.ranks.errors"],
    ),
    "record": ("The recorder", [f"kvcore.record.{name}" for name in RECORD]),
    "runtime": ("The runtime", [f"kvcore_runtime.{name}" for name in RUNTIME]),
}
AROUND_SANITIZER = (
    *("kvcore.sanitizer.attached.Guard", "kvcore.sanitizer.attached.WrongKv"),
    *("kvcore.sanitizer.findings.CERTAIN", "kvcore.sanitizer.engines.kvcore.Observer"),
    *("kvcore.sanitizer.hunter.adapter.EngineAdapter", "kvcore.sanitizer.hunter.adapter.Engine"),
)
"""The names that an adapter uses besides those of `kvcore.sanitizer`."""
COMMANDS = (
    *("check", "simulate", "sanitize", "replay", "route", "explain", "view", "shrink"),
    *("size", "trace", "generate"),
)
STYLE = """.doc-signature code { white-space: pre-wrap; }
.md-typeset td code { white-space: nowrap; }
.md-grid { max-width: 72rem; }
"""
BATCHES = """# What a runtime does for each command

A batch is a list of commands whose order is their meaning. `Batch.buffer` has six int32 columns:
`kind`, `segment`, and up to four fields in `a` to `d`, in the order of this table. A `key` in a
column is an index into `Batch.keys`, which has 36 bytes per key. Inside one segment the copies
(`Zero` to `Load`) may run in parallel. A runtime without a guard may skip `Allocate`, `Touch`,
`Evict`, `EvictAll` and `Free`: they report owners and keys and move no content. A `Store` or a
`Load` ends with one call of `complete_operation`.

| kind | command | fields | the runtime's part |
|---:|---|---|---|"""
NARROW = {**os.environ, "COLUMNS": "96"}


def on_files(files: Files, config: Any) -> Files:
    """Add the start page and the reference."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=_inside(readme)))
    files.append(File.generated(config, "site.css", content=STYLE))
    for name, (title, modules) in MODULES.items():
        text = f"# {title}\n\n" + "\n\n".join(f"::: {module}" for module in modules)
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for name, content in (
        ("manager", _manager()),
        ("sanitizer", _sanitizer()),
        ("batches", _batches()),
        ("commands", _commands()),
    ):
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files outside docs/ instead of linking to them."""
    out = "../" * (page.file.src_uri.count("/") + 1)
    outside = rf"\[([^\]]+)\]\({re.escape(out)}([^)#]+)[^)]*\)"
    return re.sub(outside, r"\1 (`\2`)", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Start a new line for each parameter of a docstring."""
    if not page.url.startswith("reference/"):
        return html
    return PARAMETER.sub(r"\1<br><code>\2</code>: ", html).replace("<p><br>", "<p>")


def _inside(readme: str) -> str:
    """Return README with its links relative to docs/, and other files named instead of linked."""
    outside = r"\[([^\]]+)\]\((?!https?:|#|docs/)([^)]+)\)"
    return re.sub(r"(\]\(|\[|src=\"|srcset=\")docs/", r"\1", re.sub(outside, r"\1 (`\2`)", readme))


def _manager() -> str:
    """Return the page of the manager's methods by subject, with the errors of each transition."""
    raised = _raised()
    homes = {kind: f"kvcore.types.{name}" for name in ERRORS for kind in _classes(f"types/{name}")}
    parts = ["# The manager\n\n::: kvcore.manager.KVCacheManager\n    options: {members: false}"]
    for title, names in METHODS.items():
        parts.append(f"## {title}")
        for name in names.split():
            errors = [*raised.get(ALSO.get(name, ""), ()), *raised.get(name, ())]
            links = ", ".join(f"[{each}][{homes[each]}.{each}]" for each in errors)
            parts.append(
                f"::: kvcore.manager.KVCacheManager.{name}\n    options: {{heading_level: 3}}"
            )
            parts += [f"All errors: WrongArgument, {links}."] * bool(links)
    return "\n\n".join(parts)


def _sanitizer() -> str:
    """Return the page of the names that `kvcore.sanitizer` exports, and of those for adapters."""
    door = ast.parse((ROOT / "kvcore" / "sanitizer" / "__init__.py").read_text(encoding="utf-8"))
    imported = [node for node in door.body if isinstance(node, ast.ImportFrom)]
    names = [f"{node.module}.{each.name}" for node in imported for each in node.names]
    parts = ["# The sanitizer"]
    for name in (*names, *AROUND_SANITIZER):
        inherited = str(name.endswith(".Sanitizer")).lower()
        parts.append(f"::: {name}\n    options: {{inherited_members: {inherited}}}")
    return "\n\n".join(parts)


def _raised() -> dict[str, list[str]]:
    """Return transition or query -> the errors that its docstring names."""
    found = {}
    for path in (ROOT / "kvcore" / "transitions").glob("*.py"):
        for each in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(each, ast.FunctionDef):
                _, _, errors = (ast.get_docstring(each) or "").partition("Raises ")
                names = re.findall(r"\b[A-Z]\w+", errors)
                found[each.name] = [name for name in names if name != "WrongArgument"]
    return found


def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return class name -> its definition, for a module of kvcore."""
    tree = ast.parse((ROOT / "kvcore" / f"{module}.py").read_text(encoding="utf-8"))
    return {each.name: each for each in tree.body if isinstance(each, ast.ClassDef)}


def _batches() -> str:
    """Return the page of a runtime's part per command, with the fields in the columns' order."""
    rows = []
    for name, each in _classes("types/commands").items():
        set_once = [node for node in each.body if isinstance(node, ast.Assign)]
        kinds = [ast.unparse(node.value) for node in set_once if "kind" in ast.unparse(node)]
        fields = [ast.unparse(node.target) for node in each.body if isinstance(node, ast.AnnAssign)]
        if kinds:
            does = " ".join((ast.get_docstring(each) or "").split())
            names = ", ".join(f"`{field}`" for field in fields)
            rows.append(f"| {kinds[0]} | `{name}` | {names} | {does} |")
    return "\n".join([BATCHES, *rows, ""])


def _commands() -> str:
    """Return the page of the help texts that the commands print."""
    parts = ["# The commands of kvcore\n"]
    for name in ("", *COMMANDS):
        words = [str(ROOT / ".venv" / "bin" / "kvcore"), *filter(None, [name]), "--help"]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=NARROW)
        parts.append(f"## kvcore {name}\n\n```text\n{done.stdout}```\n")
    return "\n".join(parts)
