# SPDX-License-Identifier: Apache-2.0
"""Translates events into the form of Dynamo's router, for its radix tree and its event planes.

Dynamo names a block by its content alone: XXH3-64 over its tokens as little-endian 32-bit integers.
The adapter and the salt are in the seed. Read from and tested with `ai-dynamo-runtime` 1.6.1
(`compute_block_hash_for_seq`, `RadixTree.apply_event`).
"""

from __future__ import annotations

import struct
from typing import Any

import xxhash

from kvcore.codec.event_msgpack import EventMap
from kvcore.event_index.errors import DamagedEvents
from kvcore.event_index.wire import short_name
from kvcore.types.events import DEVICE_MEDIUM

SEED = 1337
_MASK = 2**64 - 1


class DynamoForm:
    """Events of one worker, as Dynamo's router takes them. Feed it every event, in order.

    Only the first block of a prompt says its salt, and Dynamo needs it for each. So the salts of
    the blocks that the worker has are kept here. rank: of the worker, data-parallel.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._salts: dict[int, str] = {}

    def as_dynamo(self, event: EventMap, number: int) -> dict[str, Any] | None:
        """Return an event of `decode_events` or `event_maps` as a `KvCacheEvent`, to be JSON.

        number: of the event, rising. Returns None for what Dynamo's index does not hold: blocks of
        another group than the first or of another medium, events of other types, and blocks that
        differ by more than tokens, adapter and salt. Raises DamagedEvents if the tokens do not fill
        the blocks, or if adapter, salt or extra keys are of the wrong type.
        """
        match event["type"]:
            case "AllBlocksCleared":
                self._salts.clear()
                data: Any = "cleared"
            case "BlockRemoved" if _is_indexed(event):
                names = [short_name(each) for each in event["block_hashes"]]
                for name in names:
                    self._salts.pop(name, None)
                data = {"removed": {"block_hashes": names}}
            case "BlockStored" if _is_indexed(event):
                data = {"stored": self._stored(event)}
            case _:
                return None
        return {"event_id": number, "data": data, "dp_rank": self._rank}

    def _stored(self, event: EventMap) -> dict[str, Any]:
        names = [short_name(each) for each in event["block_hashes"]]
        salt: str | None = event.get("cache_salt")
        parent = None
        if event.get("parent_block_hash") is not None:
            parent = short_name(event["parent_block_hash"])
            salt = salt or self._salts.get(parent)
        hashes = _content_hashes(event, salt)
        if salt:
            self._salts |= dict.fromkeys(names, salt)
        blocks = [
            {"block_hash": name, "tokens_hash": content}
            for name, content in zip(names, hashes, strict=True)
        ]
        return {"parent_hash": parent, "blocks": blocks}


def _is_indexed(event: EventMap) -> bool:
    """Return whether Dynamo's index can hold the blocks, and tell them from others."""
    known = (event.get("lora_name"), event.get("cache_salt"))
    if not all(value is None or isinstance(value, str) for value in known):
        raise DamagedEvents(reason="the adapter or the salt of a block is not a text")
    extra_keys = event.get("extra_keys") or ()
    if not isinstance(extra_keys, list | tuple) or not all(
        isinstance(each, list | tuple | None) for each in extra_keys
    ):
        raise DamagedEvents(reason="the extra_keys are not an array of arrays")
    return (
        event.get("group_idx", 0) == 0
        and event.get("medium") == DEVICE_MEDIUM
        and all(item in known for keys in extra_keys for item in keys or ())
    )


def _content_hashes(event: EventMap, salt: str | None) -> list[int]:
    size, tokens = event["block_size"], event["token_ids"]
    num_blocks = len(event["block_hashes"])
    try:
        packed = struct.pack(f"<{num_blocks * size}I", *tokens)
    except struct.error as error:
        reason = f"the token_ids of {num_blocks} blocks of {size}: {error}"
        raise DamagedEvents(reason=reason) from None
    seed = SEED
    for value, own_seed in ((event.get("lora_name"), 0), (salt, 1)):
        if value:
            seed += xxhash.xxh3_64_intdigest(value.encode(), own_seed)
    step = 4 * size
    return [
        xxhash.xxh3_64_intdigest(packed[at : at + step], seed & _MASK)
        for at in range(0, len(packed), step)
    ]
