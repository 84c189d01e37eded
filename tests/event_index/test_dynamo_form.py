# SPDX-License-Identifier: Apache-2.0
"""Events in the form of Dynamo's router, on paper.

Hashes of contents were computed by `compute_block_hash_for_seq` of ai-dynamo-runtime 1.6.1;
tests/runtime/events/test_dynamo_tree.py asks its radix tree.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Config, KVCacheManager, LoRA, Request
from kvcore.codec.event_msgpack import EventMap, encode_events, encode_maps, event_maps
from kvcore.event_index import DamagedEvents, DynamoForm, decode_events
from kvcore.types.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.types.keys import external_hash
from tests.conftest import Backend

ROOT, CHILD = b"\1" * 32, b"\2" * 32
ONE_TO_FOUR = 14643705804678351452
OF_ADAPTER = 9962148675397031925
"""The same tokens with the adapter "ada"."""
OF_NAMESPACE = 5728354201622468629
"""The same tokens in the cache namespace "s"."""


def stored(tokens: list[int], **options: Any) -> BlockStored:
    return BlockStored((CHILD,), ROOT, tuple(tokens), 4, 0, **options)


@pytest.mark.parametrize("whole_hashes", [False, True])
def test_stored_removed_and_cleared(whole_hashes: bool) -> None:
    events: list[Event] = [stored([1, 2, 3, 4]), BlockRemoved(CHILD, 0), AllBlocksCleared()]
    payload = encode_events(events, 0.0, whole_hashes=whole_hashes)
    form, child = DynamoForm(rank=2), external_hash(CHILD)
    block = {"block_hash": child, "tokens_hash": ONE_TO_FOUR}
    assert [form.as_dynamo(event, 7) for event in decode_events(payload).events] == [
        {"event_id": 7, "data": data, "dp_rank": 2}
        for data in (
            {"stored": {"parent_hash": external_hash(ROOT), "blocks": [block]}},
            {"removed": {"block_hashes": [child]}},
            "cleared",
        )
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"lora": LoRA("ada")}, OF_ADAPTER), ({"cache_salt": "s"}, OF_NAMESPACE)],
)
def test_adapter_and_salt_are_in_the_hash_of_the_content(
    backend: Backend, options: dict[str, Any], expected: int
) -> None:
    manager = KVCacheManager(Config(9, 4, enable_events=True), backend=backend)
    manager.add_request(Request("r", [1, 2, 3, 4, 5], **options))
    manager.allocate_slots("r", 5)
    (event,) = event_maps(manager.take_events())
    form = DynamoForm().as_dynamo(event, 1)
    assert form is not None
    assert form["data"]["stored"]["blocks"][0]["tokens_hash"] == expected
    assert form["data"]["stored"]["parent_hash"] is None


def test_later_blocks_have_the_salt_of_their_prompt_as_long_as_it_is_cached() -> None:
    first, later = event_maps([stored([1, 2, 3, 4]), stored([1, 2, 3, 4])])
    first |= {"parent_block_hash": None, "block_hashes": [1], "cache_salt": "s"}
    later |= {"parent_block_hash": 1, "block_hashes": [2]}
    form = DynamoForm()

    def content(event: EventMap) -> int:
        reported = form.as_dynamo(event, 1)
        assert reported is not None
        return int(reported["data"]["stored"]["blocks"][0]["tokens_hash"])

    assert [content(first), content(later)] == [OF_NAMESPACE] * 2
    assert content(later | {"parent_block_hash": 2, "block_hashes": [3]}) == OF_NAMESPACE
    for end in ({"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}):
        assert content(first) == OF_NAMESPACE
        form.as_dynamo({"medium": "GPU", "group_idx": 0} | end, 1)
        assert content(later) == ONE_TO_FOUR


@pytest.mark.parametrize(
    "other",
    [
        {"group_idx": 1},
        {"medium": "CPU"},
        {"extra_keys": [[["image", 0]]]},
        {"extra_keys": [["not the salt"]], "cache_salt": "salt"},
        {"type": "BlockMoved"},
    ],
)
def test_what_dynamo_cannot_hold_or_tell_apart_is_left_out(other: dict[str, Any]) -> None:
    (event,) = event_maps([stored([1, 2, 3, 4])])
    assert DynamoForm().as_dynamo(event | other, 1) is None


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, "4"], [1, 2, 3, 2**32]])
def test_tokens_that_do_not_fill_the_blocks_are_refused(tokens: list[Any]) -> None:
    (event,) = event_maps([stored([1, 2, 3, 4])])
    with pytest.raises(DamagedEvents, match=r"the token_ids of 1 blocks of 4"):
        DynamoForm().as_dynamo(event | {"token_ids": tokens}, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"lora_name": 5},
        {"cache_salt": b"salt"},
        {"extra_keys": 5},
        {"extra_keys": {"a": 1}},
        {"extra_keys": [5]},
        {"block_size": 2**60},
    ],
)
def test_what_a_bad_sender_writes_is_refused_by_name(other: dict[str, Any]) -> None:
    (event,) = event_maps([stored([1, 2, 3, 4])])
    (read,) = decode_events(encode_maps([event | other], 0.0, 0, "map")).events
    with pytest.raises(DamagedEvents):
        DynamoForm().as_dynamo(read, 1)
