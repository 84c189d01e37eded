# SPDX-License-Identifier: Apache-2.0
"""Events as vLLM's consumers read them: by msgspec structures of a consumer's own.

The structures are written from vLLM 0.33's published fields; the bytes of one batch are laid out
here by hand.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcore import BlockStored, Group
from kvcore.codec.event_msgpack import encode_events
from kvcore.types.errors import WrongArgument
from kvcore.types.events import AllBlocksCleared, BlockRemoved, Event
from kvcore.types.extra_inputs import CACHE_SALT, CUT_EMBEDS, CUT_MEDIA, LORA, MEDIA, PROMPT_EMBEDS
from tests.conftest import Backend
from tests.helpers.stories import make, serve

FIRST = bytes(24) + b"\x80" + bytes(6) + b"\x01"
SECOND = bytes(range(32))
FIRST_INT = 2**63 + 1
SECOND_INT = 0x18191A1B1C1D1E1F


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The batch as a consumer reads it first, with undecoded events."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class Stored(msgspec.Struct, tag="BlockStored"):
    """A stored event as a map; the fields without default must be there."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    """A removed event as a map."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    """Nothing is findable any more."""


class OldStored(msgspec.Struct, tag="BlockStored", array_like=True):
    """A stored event as an array, as before vLLM's change 42892."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class OldRemoved(msgspec.Struct, tag="BlockRemoved", array_like=True):
    """A removed event as an array."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class OldCleared(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    """Nothing is findable any more."""


class Maps(Batch):
    """A batch of events that are maps."""

    events: list[Stored | Removed | Cleared]


class Arrays(Batch):
    """A batch of events that are arrays."""

    events: list[OldStored | OldRemoved | OldCleared]


EVENTS: list[Event] = [
    BlockStored((FIRST, SECOND), None, (1, 2, 3, 4), 2, 0),
    BlockStored((SECOND,), FIRST, (3, 4), 2, 1, "name"),
    BlockRemoved(SECOND, 1),
    AllBlocksCleared(),
]


def read(data: bytes) -> Maps:
    """Return a batch as a consumer of vLLM 0.33 reads it."""
    return msgspec.msgpack.decode(data, type=Maps)


def test_a_consumer_reads_each_field_by_its_name() -> None:
    batch = read(encode_events(EVENTS, 2.5))
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 0)
    hashes: list[bytes | int] = [FIRST_INT, SECOND_INT]
    assert batch.events == [
        Stored(hashes, None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0),
        Stored([SECOND_INT], FIRST_INT, [3, 4], 2, None, "GPU", "name", [None], 1),
        Removed([SECOND_INT], "GPU", 1),
        Cleared(),
    ]


def test_a_consumer_of_an_older_release_reads_each_field_by_its_place() -> None:
    data = encode_events(EVENTS, 2.5, 3, form="array")
    batch = msgspec.msgpack.decode(data, type=Arrays)
    assert (batch.ts, batch.data_parallel_rank) == (2.5, 3)
    hashes: list[bytes | int] = [FIRST_INT, SECOND_INT]
    assert batch.events == [
        OldStored(hashes, None, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0),
        OldStored([SECOND_INT], FIRST_INT, [3, 4], 2, None, "GPU", "name", [None], 1),
        OldRemoved([SECOND_INT], "GPU", 1),
        OldCleared(),
    ]


def text(value: str) -> bytes:
    """Return a text of fewer than 32 bytes in msgpack."""
    return bytes([0xA0 | len(value)]) + value.encode()


def test_a_batch_is_these_bytes() -> None:
    events: list[Event] = [BlockRemoved(FIRST, 2), AllBlocksCleared()]
    # A float64, an array of two maps, of four entries and of one; a uint64; the rank.
    expected = b"\x93\xcb\x40\x04\0\0\0\0\0\0" + b"\x92"
    expected += b"\x84" + text("type") + text("BlockRemoved")
    expected += text("block_hashes") + b"\x91\xcf\x80\0\0\0\0\0\0\x01"
    expected += text("medium") + text("GPU") + text("group_idx") + b"\x02"
    expected += b"\x81" + text("type") + text("AllBlocksCleared") + b"\x07"
    assert encode_events(events, 2.5, 7) == expected


def test_hashes_can_be_whole() -> None:
    stored, later, removed, _ = read(encode_events(EVENTS, 0.0, whole_hashes=True)).events
    assert isinstance(stored, Stored)
    assert isinstance(later, Stored)
    assert isinstance(removed, Removed)
    assert stored.block_hashes == [FIRST, SECOND]
    assert stored.parent_block_hash is None
    assert later.parent_block_hash == FIRST
    assert removed.block_hashes == [SECOND]


def test_a_rank_is_left_out_on_demand_alone() -> None:
    """Dynamo reads only batches of three parts."""
    assert msgspec.msgpack.decode(encode_events([], 1.0)) == [1.0, [], 0]
    assert msgspec.msgpack.decode(encode_events([], 1.0, None)) == [1.0, []]


def test_a_salt_stands_beside_the_extra_keys_of_the_first_block() -> None:
    salted = BlockStored((FIRST,), None, (1, 2), 2, 0, None, (((CACHE_SALT, b"tenant"),),))
    behind = BlockStored((SECOND,), FIRST, (3, 4), 2, 0)
    first, second = msgspec.msgpack.decode(encode_events([salted, behind], 0.0))[1]
    assert (first["cache_salt"], first["extra_keys"]) == ("tenant", [["tenant"]])
    assert "cache_salt" not in second
    (array,) = msgspec.msgpack.decode(encode_events([salted], 0.0, form="array"))[1]
    assert array[8:] == [[["tenant"]], 0]


def test_extra_keys_go_without_their_tags() -> None:
    digest = bytes([200]) * 32
    first = (
        (LORA, b"\x04\0\0\0namepath"),
        (MEDIA, b"\xfd\xff\xff\xffimage"),
        (MEDIA, b"\x01\0\0\0sound"),
        (CACHE_SALT, b"salt"),
        (PROMPT_EMBEDS, digest),
        (CUT_MEDIA, b"\xfd\xff\xff\xff\x02\0\0\0image"),
        (CUT_EMBEDS, b"\x02\0\0\0" + digest),
    )
    event = BlockStored((FIRST, SECOND), None, (1, 2), 1, 0, "name", (first, ()))
    (stored,) = read(encode_events([event], 0.0)).events
    assert isinstance(stored, Stored)
    # A consumer's msgpack reads the pairs as lists.
    whole = ("name", ["image", -3], ["sound", 1], "salt", digest)
    assert stored.extra_keys == [(*whole, ["image", -3, 2], [digest, 2]), None]


def test_groups_are_named_as_vllm_names_them() -> None:
    groups = (
        Group(2),
        Group(2, kind="mla"),
        Group(2, kind="sliding_window", window=8),
        Group(2, kind="chunked_local", window=4),
    )
    events = [BlockStored((FIRST,), None, (1, 2), 2, group_id) for group_id in range(4)]
    found = []
    for event in read(encode_events(events, 0.0, groups=groups)).events:
        assert isinstance(event, Stored)
        found.append((event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window))
    assert found == [
        ("full_attention", None),
        ("mla_attention", None),
        ("sliding_window", 8),
        ("chunked_local_attention", None),
    ]


def test_a_default_behind_the_last_given_field_is_left_out() -> None:
    stored = BlockStored((FIRST,), None, (1, 2), 2, 0)
    (fields,) = msgspec.msgpack.decode(encode_events([stored], 0.0), type=Batch).events
    assert list(fields) == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id"),
        *("medium", "lora_name", "extra_keys", "group_idx"),
    ]
    data = encode_events([stored, AllBlocksCleared()], 0.0, form="array", groups=[Group(2)])
    values, cleared = msgspec.msgpack.decode(data, type=Batch).events
    assert values[-2:] == [0, "full_attention"]
    assert cleared == ["AllBlocksCleared"]


def test_what_a_manager_publishes_reaches_a_consumer(backend: Backend) -> None:
    manager = make(backend, enable_events=True)
    serve(manager, "a", [1, 2, 3, 4])
    hashes = manager.state().requests["a"].block_hashes
    (stored,) = read(encode_events(manager.take_events(), 0.0)).events
    assert isinstance(stored, Stored)
    assert stored.block_hashes == [int.from_bytes(each[-8:], "big") for each in hashes]
    assert stored.token_ids == [1, 2, 3, 4]


def test_a_form_or_group_that_is_not_known_is_named() -> None:
    with pytest.raises(WrongArgument, match="form must be map or array, not 'maps'"):
        encode_events([], 0.0, form="maps")  # type: ignore[arg-type] # what a typist would write
    with pytest.raises(WrongArgument, match="groups must be at least 2 groups, not 1"):
        encode_events(EVENTS, 0.0, groups=[Group(2)])
