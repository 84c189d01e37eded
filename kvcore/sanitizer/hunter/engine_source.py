# SPDX-License-Identifier: Apache-2.0
"""The part of an adapter's file that drives the engine, for a written test without kvcore."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Collection, Iterable

WITHOUT_KVCORE = (
    *("kvcore.sanitizer.hunter.driven", "kvcore.sanitizer.hunter.template_engine"),
    "kvcore.sanitizer.engines.",
)
"""Modules of which a written test includes what it needs."""


def engine_source(module: str) -> str:
    """Return what an adapter's `Engine` needs of its file and of those that it imports, without
    kvcore.
    """
    bodies = {name: _Source(name) for name in _imported(module)}
    needed = _reachable(bodies.values())
    lines = [line for body in bodies.values() for line in body.lines(needed)]
    first = [line for line in lines if line.startswith("from __future__")]
    rest = [line for line in lines if line not in first]
    return "\n".join([*first[:1], "from types import SimpleNamespace", *rest, "", ""])


def _imported(module: str) -> list[str]:
    """Return a module behind those of engines that it imports."""
    names = [module]
    for node in ast.parse(inspect.getsource(importlib.import_module(module))).body:
        source = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if source.startswith(WITHOUT_KVCORE):
            names = [*_imported(source), *names]
    return list(dict.fromkeys(names))


class _Source:
    """The top level of a file: its functions and classes by name, and its other statements."""

    def __init__(self, module: str) -> None:
        self.text = inspect.getsource(importlib.import_module(module)).splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.others: list[ast.stmt] = []
        self.body = [node for node in ast.parse("\n".join(self.text)).body if not _is_left(node)]
        for node in self.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            else:
                self.others.append(node)

    def lines(self, needed: Collection[str]) -> list[str]:
        """Return the lines of the needed definitions and of all other statements."""
        lines: list[str] = []
        for node in self.body:
            name = getattr(node, "name", None)
            if name is None or name in needed:
                decorators = getattr(node, "decorator_list", [])
                start = min(each.lineno for each in (node, *decorators))
                lines += [*(["", ""] if name else []), *self.text[start - 1 : node.end_lineno]]
        return lines


def _is_left(node: ast.stmt) -> bool:
    """Return whether a statement is a text, or imports from kvcore's sanitizer."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("kvcore.sanitizer")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _reachable(sources: Iterable[_Source]) -> set[str]:
    """Return the names of the definitions that `Engine` and the other statements use."""
    definitions = {name: node for each in sources for name, node in each.definitions.items()}
    queue = [node for each in sources for node in each.others]
    queue += [node for name, node in definitions.items() if name == "Engine"]
    needed = {"Engine"}
    while queue:
        names = {each.id for each in ast.walk(queue.pop()) if isinstance(each, ast.Name)}
        new = names & definitions.keys() - needed
        needed |= new
        queue += [definitions[name] for name in new]
    return needed
