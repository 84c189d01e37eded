# SPDX-License-Identifier: Apache-2.0
"""Misuse of the explaining calls."""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError


class ExplainOff(KvcoreError):
    """The manager was made without `explain_entries`, so it remembers no removed keys."""

    message = (
        "request {request_id!r} cannot be explained: the manager remembers no removed keys; make "
        "it with KVCacheManager(config, explain_entries=n)"
    )
