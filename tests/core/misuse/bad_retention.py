# SPDX-License-Identifier: Apache-2.0
"""Bad input on levels: a time that falls, and wishes for an unknown request."""

from __future__ import annotations

from kvcore import KVCacheManager, KvCacheRetentionConfig
from kvcore.types.errors import TimeWentBack, UnknownRequest
from kvcore.types.retention import TIME_MAX
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import make


def later(backend: Backend) -> KVCacheManager:
    """Let 5 ms pass."""
    manager = make(backend, eviction="retention")
    manager.tick(5)
    return manager


def no_time(now_ms: object) -> TimeWentBack:
    return TimeWentBack(now_ms=now_ms, current=5, most=TIME_MAX)


ROWS: list[Row] = [
    *(bad(later, no_time(now), "tick", now) for now in (4, -1, TIME_MAX + 1, 2**70, "6", 6.0)),
    bad(later, UnknownRequest(request="x"), "extend_retention", "x", KvCacheRetentionConfig()),
]
