# SPDX-License-Identifier: Apache-2.0
"""The methods of a manager that say how long content stays cached, for `eviction="retention"`."""

from __future__ import annotations

from typing import Protocol

from kvcore.types.arguments import check_kind, check_request
from kvcore.types.retention import KvCacheRetentionConfig
from kvcore.types.values import Request


class Told(Protocol):
    """What a backend has for it."""

    def tick(self, now_ms: int) -> None: ...
    def extend_retention(self, request_id: str, retention: KvCacheRetentionConfig, /) -> None: ...


class Levels:
    """The part of a manager that is told of time and wishes."""

    def _told(self) -> Told:
        """The backend, which the manager holds."""
        told: Told = vars(self)["_core"]
        return told

    def tick(self, now_ms: int) -> None:
        """Say the time in ms: levels whose duration is over end. Raises TimeWentBack."""
        self._told().tick(now_ms)

    def extend_retention(self, request_id: str, retention: KvCacheRetentionConfig) -> None:
        """Join more wishes to those of a request, for the blocks that it releases from now on. A
        range without an end ends with the tokens that it has.
        """
        check_kind("retention", retention, KvCacheRetentionConfig)
        self._told().extend_retention(request_id, retention)


def check_retention(request: Request) -> None:
    """Raise WrongArgument unless a value is a request, and its retention one, or None."""
    check_request(request)
    if request.retention is not None:
        check_kind("retention", request.retention, KvCacheRetentionConfig)
