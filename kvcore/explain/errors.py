# SPDX-License-Identifier: Apache-2.0
"""Misuse of the explaining calls."""

from __future__ import annotations

from kvcore.types.base_error import KvcoreError
from kvcore.types.config import Config
from kvcore.types.errors import InvalidConfig


class ExplainOff(KvcoreError):
    """The manager was made without `explain_entries`, so it remembers no removed keys."""

    message = (
        "request {request_id!r} cannot be explained: the manager remembers no removed keys; make "
        "it with KVCacheManager(config, explain_entries=n)"
    )


def check_explained(config: Config) -> None:
    """Raise InvalidConfig if hits may end inside blocks: their misses have no causes yet."""
    if config.has_tails:
        reason = "misses are not explained where hits end inside blocks"
        raise InvalidConfig(field="hash_block_size", value=config.hash_block_size, reason=reason)
