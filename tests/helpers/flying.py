# SPDX-License-Identifier: Apache-2.0
"""Short words for stories about batches in flight."""

from __future__ import annotations

from typing import Any

from kvcore import Group, KVCacheManager
from tests.conftest import Backend
from tests.helpers.stories import make

WINDOW = Group(2, kind="sliding_window", window=2)


def fly(backend: Backend, num_blocks: int = 10, **options: Any) -> KVCacheManager:
    """Return an empty manager that lets three batches be unfinished."""
    options.setdefault("max_in_flight", 3)
    return make(backend, num_blocks, **options)


def waiting(manager: KVCacheManager) -> list[int]:
    """Return the quarantined device blocks, in the order of their release."""
    return list(manager.state().device.quarantine or ())


def take(manager: KVCacheManager) -> int:
    """Close the open batch. Returns its number, and asserts every invariant."""
    manager.check()
    return manager.take_batch().number


def land(manager: KVCacheManager) -> None:
    """Close the open batch and complete all that are in flight."""
    take(manager)
    for number in manager.in_flight:
        manager.complete(number)
    manager.check()
