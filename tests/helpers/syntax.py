# SPDX-License-Identifier: Apache-2.0
"""Python files as trees, each parsed once in a run."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
"""The fields of a node that hold statements, or what holds some."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a file's tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def statements(path: Path) -> list[Any]:
    """Return every statement of a file at any depth, outer ones first: a tenth of its nodes."""
    found: list[Any] = [parsed(path)]
    for node in found:
        for field in BLOCKS:
            found += getattr(node, field, ())
    return found
