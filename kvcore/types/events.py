# SPDX-License-Identifier: Apache-2.0
"""Events of the hash index, for routers and stores that mirror it.

Invariants: a stored event names every block of one publication. A removed event is emitted only
when the last block of a content loses its key. Replaying all events from the start gives exactly
the index.
Twin: rust/src/types/events.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvcore.types.extra_inputs import ExtraKey
from kvcore.types.keys import HASH_SIZE, make_key

DEVICE_MEDIUM = "GPU"


@attrs.frozen
class BlockStored:
    """Consecutive blocks of one request became findable.

    block_hashes: in chain order. parent_hash: of the block before the first, None at the start.
    tokens: of all the blocks, in order. extra_keys: (tag, value) pairs, one tuple per block;
    empty if no block has any. epoch: number of the weights.
    """

    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    tokens: tuple[int, ...]
    block_size: int
    group_id: int
    lora_name: str | None = None
    extra_keys: tuple[tuple[ExtraKey, ...], ...] = ()
    medium: str = DEVICE_MEDIUM
    epoch: int = 0


@attrs.frozen
class BlockRemoved:
    """The last block of a content is no longer findable."""

    block_hash: bytes
    group_id: int
    medium: str = DEVICE_MEDIUM


@attrs.frozen
class AllBlocksCleared:
    """Nothing is findable any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def removed(key: bytes) -> BlockRemoved:
    """Make the event for the removal of the last block of a key."""
    return BlockRemoved(key[:HASH_SIZE], int.from_bytes(key[HASH_SIZE:], "big"))


def replay(events: Iterable[Event]) -> set[bytes]:
    """Return the keys that an empty mirror of the index holds after these events."""
    keys: set[bytes] = set()
    for event in events:
        match event:
            case BlockStored():
                keys.update(make_key(each, event.group_id) for each in event.block_hashes)
            case BlockRemoved():
                keys.remove(make_key(event.block_hash, event.group_id))
            case AllBlocksCleared():
                keys.clear()
    return keys
