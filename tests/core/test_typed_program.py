# SPDX-License-Identifier: Apache-2.0
"""The program that type checkers read runs, and uses every public call."""

from __future__ import annotations

import ast
from pathlib import Path

from kvcore import KVCacheManager, Status
from tests.conftest import Backend
from tests.core import typed_program


def test_the_typed_program_runs(backend: Backend) -> None:
    manager = typed_program.play(backend)
    assert manager is not None
    assert manager.status("d") is Status.RUNNING


def test_the_typed_program_uses_every_public_call() -> None:
    tree = ast.parse(Path(typed_program.__file__).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    public = {name for name in dir(KVCacheManager) if not name.startswith("_")}
    assert public - used == set()
