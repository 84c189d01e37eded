# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the package `nanovllm`, as far as `install` looks at it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest


class TheirBlockManager:
    """The six calls by nano-vllm's names."""

    def __init__(self, num_blocks: int, block_size: int) -> None: ...
    def can_allocate(self, seq: Any) -> int: ...  # type: ignore[empty-body] # never called
    def allocate(self, seq: Any, num_cached_blocks: int) -> None: ...
    def deallocate(self, seq: Any) -> None: ...
    def can_append(self, seq: Any) -> bool: ...  # type: ignore[empty-body] # never called
    def may_append(self, seq: Any) -> None: ...
    def hash_blocks(self, seq: Any) -> None: ...


def stub_scheduler(monkeypatch: pytest.MonkeyPatch, manager: type) -> Any:
    """Let `nanovllm.engine.scheduler` be a module that has this manager; returns the module."""
    for name in ("nanovllm", "nanovllm.engine", "nanovllm.engine.scheduler"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    scheduler: Any = sys.modules["nanovllm.engine.scheduler"]
    scheduler.BlockManager = manager
    return scheduler


def in_use(scheduler: Any) -> object:
    """Return the manager that a scheduler would make."""
    return scheduler.BlockManager
