# SPDX-License-Identifier: Apache-2.0
"""Reads and checks the msgpack of events, from vLLM's publishers and from `encode_events`.

Both forms of an event are read: a map of fields, and the array of older releases. Unknown fields
are kept in a map, and ignored in an array. An event of an unknown type is returned, and the caller
counts it. Bytes are never unpickled, and no memory is reserved by a number that they contain.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from kvcore.codec.event_msgpack import ARRAY_FIELDS, EventMap
from kvcore.event_index.errors import DamagedEvents
from kvcore.types.events import DEVICE_MEDIUM
from kvcore.types.keys import external_hash

Name = int | bytes
"""A block's hash on the wire: 64 bits as an integer, or the bytes of the whole hash."""

NAME_BYTES_MAX = 64
_decoder = msgspec.msgpack.Decoder()


@attrs.frozen
class EventBatch:
    """One message. timestamp: seconds since the epoch. events: maps, in order."""

    timestamp: float
    events: tuple[EventMap, ...]
    rank: int | None


def decode_events(payload: bytes) -> EventBatch:
    """Read one message.

    The maps have "type", and for stored and removed blocks "block_hashes", "medium" and
    "group_idx"; if the message leaves these out, they are "GPU" and 0. Raises DamagedEvents if the
    bytes are not a batch, or if a field of these types has a bad value.
    """
    try:
        batch = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedEvents(reason=str(error)) from None
    if not isinstance(batch, list) or len(batch) not in (2, 3):
        raise DamagedEvents(reason="a batch is an array of timestamp, events and perhaps a rank")
    timestamp, events, rank = [*batch, None][:3]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise DamagedEvents(reason="the timestamp is not a number")
    if not isinstance(events, list):
        raise DamagedEvents(reason="the events are not an array")
    if rank is not None and not _is_count(rank):
        raise DamagedEvents(reason="the rank is not an integer of at least 0")
    return EventBatch(float(timestamp), tuple(map(_read, events)), rank)


def short_name(name: Name) -> int:
    """Return a block's hash as the 64 bits that routers know it by."""
    return external_hash(name) if isinstance(name, bytes) else name % 2**64


def is_cleared(event: EventMap) -> bool:
    """Return whether the event clears the whole index."""
    return bool(event["type"] == "AllBlocksCleared")


def _read(event: Any) -> EventMap:
    if isinstance(event, list) and event and isinstance(event[0], str):
        fields = ARRAY_FIELDS.get(event[0], ())
        event = {"type": event[0], **dict(zip(fields, event[1:], strict=False))}
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise DamagedEvents(reason="an event is a map with a type, or an array with its name first")
    if event["type"] in ("BlockStored", "BlockRemoved"):
        event["medium"] = _default(event.get("medium"), DEVICE_MEDIUM)
        event["group_idx"] = _default(event.get("group_idx"), 0)
        _check(event)
    if event["type"] == "BlockStored":
        _check_stored(event)
    return event


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check(event: EventMap) -> None:
    names = event.get("block_hashes")
    kind = event["type"]
    if not isinstance(names, list) or not all(map(_is_name, names)):
        raise DamagedEvents(reason=f"the block_hashes of a {kind} are not an array of hashes")
    if not isinstance(event["medium"], str):
        raise DamagedEvents(reason=f"the medium of a {kind} is not a text")
    if not _is_count(event["group_idx"]):
        raise DamagedEvents(reason=f"the group_idx of a {kind} is not an integer of at least 0")


def _check_stored(event: EventMap) -> None:
    parent, size, tokens = map(event.get, ("parent_block_hash", "block_size", "token_ids"))
    window = event.get("kv_cache_spec_sliding_window")
    if not (parent is None or _is_name(parent)):
        raise DamagedEvents(reason="the parent_block_hash of a BlockStored is not a hash")
    # vLLM's offloading connector names what it stored by placeholders, of blocks of size 0.
    if not _is_count(size) or (size == 0 and event["medium"] == DEVICE_MEDIUM):
        raise DamagedEvents(reason="the block_size of a BlockStored is not a positive integer")
    if not isinstance(tokens, list):
        raise DamagedEvents(reason="the token_ids of a BlockStored are not an array")
    if not (window is None or (_is_count(window) and window > 0)):
        raise DamagedEvents(reason="the window of a BlockStored is not a positive integer")


def _is_name(name: Any) -> bool:
    if isinstance(name, bytes):
        return 0 < len(name) <= NAME_BYTES_MAX
    return isinstance(name, int) and not isinstance(name, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
