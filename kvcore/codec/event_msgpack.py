# SPDX-License-Identifier: Apache-2.0
"""Encodes events in vLLM's msgpack form, for routers that read it.

Fields and their order are those of vLLM 0.33 (`vllm/distributed/kv_events.py`), except for the salt
below. A batch is an array of timestamp, events and data-parallel rank, which Dynamo requires; None
omits it. An event is a map of its fields with the class's name under "type"; before vLLM's change
42892 it was an array that began with the name; the form "array" writes that. A field at its default
is omitted, in an array only after the last field that differs. Extra keys have no tags: an
adapter's name, (identifier, offset) of a media item, a salt, a digest; for a cut item (identifier,
offset, end), for cut embeddings (digest, rows left). None stands for a block without extra keys.
The salt of an event's first block is also the field `cache_salt` of its map, where Dynamo expects
it, and an epoch above 0 is the field `epoch`. vLLM's deprecated `lora_id` is always None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import msgspec

from kvcore.hashing.extra_keys import vllm_key
from kvcore.types.arguments import read_flag, read_int, read_list
from kvcore.types.errors import WrongArgument
from kvcore.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.types.extra_inputs import CACHE_SALT, ExtraKey
from kvcore.types.groups import Group, Kind
from kvcore.types.keys import external_hash

Form = Literal["map", "array"]
EventMap = dict[str, Any]
"""An event as a map of its fields on the wire, with the class's name under "type"."""

OPTIONAL = ("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
ARRAY_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", *OPTIONAL),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The order of the fields in the array form. Those in `OPTIONAL` are omitted at the end."""

_SPEC_KINDS: dict[Kind, str] = {
    "full_attention": "full_attention",
    "mla": "mla_attention",
    "sliding_window": "sliding_window",
    "chunked_local": "chunked_local_attention",
    "cross_attention": "cross_attention",
}
_encoder = msgspec.msgpack.Encoder()


def encode_events(
    events: Iterable[Event],
    timestamp: float,
    data_parallel_rank: int | None = 0,
    *,
    groups: Sequence[Group] = (),
    form: Form = "map",
    whole_hashes: bool = False,
) -> bytes:
    """Encode one batch of events.

    timestamp: seconds since the epoch. groups: those of the configuration; with them, stored events
    name a group's kind and sliding window. whole_hashes: write all 32 bytes of a hash, not the low
    64 bits (vLLM: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0). Raises WrongArgument for arguments of the
    wrong type, an unknown form, and an event of a group that `groups` lacks.
    """
    _check("timestamp", timestamp, isinstance(timestamp, float | int), "a number of seconds")
    rank = read_int(data_parallel_rank)
    fits = rank is None or (isinstance(rank, int) and 0 <= rank < 2**64)
    _check("data_parallel_rank", rank, fits, "an integer or None")
    _check("form", form, isinstance(form, str) and form in get_args(Form), "map or array")
    maps = event_maps(events, groups=groups, whole_hashes=whole_hashes)
    return encode_maps(maps, timestamp, rank, form)


def encode_maps(
    maps: Iterable[EventMap], timestamp: float, data_parallel_rank: int | None, form: Form
) -> bytes:
    """Encode one batch of events that `event_maps` or a decoder returned, without checks."""
    laid_out = list(maps) if form == "map" else [_as_array(each) for each in maps]
    batch = [float(timestamp), laid_out]
    rank = data_parallel_rank
    return _encoder.encode(batch if rank is None else [*batch, rank])


def event_maps(
    events: Iterable[Event], *, groups: Sequence[Group] = (), whole_hashes: bool = False
) -> list[EventMap]:
    """Return the events as maps of their fields on the wire; see `encode_events`."""
    events = read_list("events", events, "a list of events")
    groups = read_list("groups", groups, "a list of Group")
    _check("events", events, all(isinstance(each, Event) for each in events), "a list of events")
    _check("groups", groups, all(isinstance(each, Group) for each in groups), "a list of Group")
    whole_hashes = read_flag("whole_hashes", whole_hashes)

    def name(block_hash: bytes) -> int | bytes:
        return block_hash if whole_hashes else external_hash(block_hash)

    def lay_out(event: Event) -> EventMap:
        match event:
            case BlockStored():
                required: EventMap = {
                    "block_hashes": [name(each) for each in event.block_hashes],
                    "parent_block_hash": event.parent_hash and name(event.parent_hash),
                    "token_ids": event.tokens,
                    "block_size": event.block_size,
                    "lora_id": None,
                    "medium": event.medium,
                    "lora_name": event.lora_name,
                }
                keys = event.extra_keys or ((),) * len(event.block_hashes)
                optional: EventMap = {
                    "extra_keys": [_untagged(each) for each in keys],
                    "group_idx": event.group_id,
                }
                if groups:
                    optional |= _spec(groups, event.group_id)
                optional |= {"cache_salt": _salt(keys), "epoch": event.epoch or None}
            case BlockRemoved():
                required = {"block_hashes": [name(event.block_hash)], "medium": event.medium}
                optional = {"group_idx": event.group_id}
            case AllBlocksCleared():
                required, optional = {}, {}
        given = {key: value for key, value in optional.items() if value is not None}
        return {"type": type(event).__name__, **required, **given}

    return [lay_out(event) for event in events]


def _check(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise WrongArgument(name=name, expected=expected, value=value)


def _salt(keys: Sequence[Sequence[ExtraKey]]) -> str | None:
    """Return the salt among the extra keys of the first block."""
    salts = (value.decode() for tag, value in (*keys, ())[0] if tag == CACHE_SALT)
    return next(salts, None)


def _spec(groups: Sequence[Group], number: int) -> dict[str, Any]:
    if number >= len(groups):
        expected = f"at least {number + 1} groups"
        raise WrongArgument(name="groups", expected=expected, value=len(groups))
    group = groups[number]
    window = group.window if group.kind == "sliding_window" else None
    return {
        "kv_cache_spec_kind": _SPEC_KINDS[group.kind],
        "kv_cache_spec_sliding_window": window,
    }


def _as_array(event: EventMap) -> list[Any]:
    """Return an event in the form of vLLM's older releases: its name, then its fields in order."""
    kind = event["type"]
    values = [kind, *map(event.get, ARRAY_FIELDS[kind])]
    while (
        len(values) > 1 and values[-1] is None and ARRAY_FIELDS[kind][len(values) - 2] in OPTIONAL
    ):
        del values[-1]
    return values


def _untagged(extra_keys: Sequence[ExtraKey]) -> list[Any] | None:
    """Return a block's extra keys as vLLM publishes them."""
    keys = [vllm_key(tag, value) for tag, value in extra_keys]
    whole = ("mm", "mm cut", "prompt_embeds cut")
    return [key[1:] if key[0] in whole else key[1] for key in keys] or None
