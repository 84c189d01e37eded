# SPDX-License-Identifier: Apache-2.0
"""Events as bytes: the msgpack form in which vLLM publishes its own, for routers that read those.

Fields and their order are those of vLLM 0.33 (`vllm/distributed/kv_events.py`), but for the salt
below. A batch is an array of timestamp, events and data-parallel rank, which Dynamo demands; None
leaves it out. An event is a map of its fields with the class's name under "type"; before vLLM's
change 42892 it was an array, the name first, which "array" gives. A field at its default is left
out, in an array only behind the last that is not. Extra keys go without their tags: an adapter's
name, (identifier, offset) of a media item, a salt, a digest; for a cut item (identifier, offset,
end), for cut embeddings (digest, rows left). None stands for a block without any. The salt of an
event's first block also is a field `cache_salt` of its map, where Dynamo looks for it, and an epoch
above 0 is its field `epoch`. vLLM's own
`lora_id`, which it calls deprecated, is always None.
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
    """The bytes of one batch of events.

    timestamp: seconds since the epoch. groups: those of the configuration, if stored events are
    to name a group's kind and sliding window. whole_hashes: hashes as their 32 bytes, not as the
    low 64 bits (vLLM: VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0). Raises WrongArgument for arguments of
    another kind, an unknown form, and an event of a group that `groups` lacks.
    """
    events = read_list("events", events, "a list of events")
    groups = read_list("groups", groups, "a list of Group")
    _check("timestamp", timestamp, isinstance(timestamp, float | int), "a number of seconds")
    rank = read_int(data_parallel_rank)
    fits = rank is None or (isinstance(rank, int) and 0 <= rank < 2**64)
    _check("data_parallel_rank", rank, fits, "an integer or None")
    _check("form", form, isinstance(form, str) and form in get_args(Form), "map or array")
    _check("events", events, all(isinstance(each, Event) for each in events), "a list of events")
    _check("groups", groups, all(isinstance(each, Group) for each in groups), "a list of Group")
    whole_hashes = read_flag("whole_hashes", whole_hashes)

    def name(block_hash: bytes) -> int | bytes:
        return block_hash if whole_hashes else external_hash(block_hash)

    def lay_out(event: Event) -> dict[str, Any] | list[Any]:
        match event:
            case BlockStored():
                required: dict[str, Any] = {
                    "block_hashes": [name(each) for each in event.block_hashes],
                    "parent_block_hash": event.parent_hash and name(event.parent_hash),
                    "token_ids": event.tokens,
                    "block_size": event.block_size,
                    "lora_id": None,
                    "medium": event.medium,
                    "lora_name": event.lora_name,
                }
                keys = event.extra_keys or ((),) * len(event.block_hashes)
                optional: dict[str, Any] = {
                    "extra_keys": [_untagged(each) for each in keys],
                    "group_idx": event.group_id,
                }
                if groups:
                    optional |= _spec(groups, event.group_id)
                if form == "map":
                    optional |= {"cache_salt": _salt(keys), "epoch": event.epoch or None}
            case BlockRemoved():
                required = {"block_hashes": [name(event.block_hash)], "medium": event.medium}
                optional = {"group_idx": event.group_id}
            case AllBlocksCleared():
                required, optional = {}, {}
        return _fields(type(event).__name__, required, optional, form)

    batch = [float(timestamp), [lay_out(event) for event in events]]
    return _encoder.encode(batch if rank is None else [*batch, rank])


def _check(name: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise WrongArgument(name=name, expected=expected, value=value)


def _salt(keys: Sequence[Sequence[ExtraKey]]) -> str | None:
    """The salt among the extra keys of the first block."""
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


def _fields(
    kind: str, required: dict[str, Any], optional: dict[str, Any], form: Form
) -> dict[str, Any] | list[Any]:
    """One event. optional: fields of which None is the default."""
    if form == "map":
        given = {name: value for name, value in optional.items() if value is not None}
        return {"type": kind, **required, **given}
    values = [kind, *required.values(), *optional.values()]
    while len(values) > 1 + len(required) and values[-1] is None:
        del values[-1]
    return values


def _untagged(extra_keys: Sequence[ExtraKey]) -> list[Any] | None:
    """A block's extra keys as vLLM publishes them."""
    keys = [vllm_key(tag, value) for tag, value in extra_keys]
    whole = ("mm", "mm cut", "prompt_embeds cut")
    return [key[1:] if key[0] in whole else key[1] for key in keys] or None
