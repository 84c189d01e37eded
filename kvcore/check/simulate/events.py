# SPDX-License-Identifier: Apache-2.0
"""A router's keys, derived from events alone."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.types.errors import InvariantViolation
from kvcore.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

Keys = set[tuple[bytes, int]]


def follow(keys: Keys, events: Iterable[Event]) -> None:
    """Apply events in order. Raises InvariantViolation (EVT-COPY) if a removed key is not known."""
    for event in events:
        match event:
            case BlockStored():
                keys.update((each, event.group_id) for each in event.block_hashes)
            case BlockRemoved():
                key = (event.block_hash, event.group_id)
                if key not in keys:
                    raise InvariantViolation("EVT-COPY", f"{event} removes what is not held")
                keys.discard(key)
            case AllBlocksCleared():
                keys.clear()
