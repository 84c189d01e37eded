# SPDX-License-Identifier: Apache-2.0
"""The index answers as the managers do, whatever the network lost, doubled or reordered."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Group
from kvcore.codec.event_msgpack import EventMap, encode_maps
from kvcore.event_index import Applied, DamagedEvents, EventIndex, EventLog, Gap, Stale
from tests.event_index.fleet import FULL, HYBRID, Engine, Line


def ask_often(seeds: range, groups: tuple[Group, ...], **form: object) -> tuple[int, int]:
    """Questions asked, and those of which the answer was above 0. All must be equal."""
    requested = found = 0
    for seed in seeds:
        index = EventIndex()
        lines = [
            Line(
                f"engine {i}", Engine(2 * seed + i, ("python", "rust")[i], groups), seed + i, **form
            )
            for i in range(2)
        ]
        for _ in range(25):
            for line in lines:
                for _ in range(2):
                    line.step()
                    line.deliver(index, faults=0.3)
                line.heal(index)
            for salt in (None, "tenant"):
                tokens = lines[0].engine.prompt() + lines[1].engine.prompt()
                for line in lines:
                    hashes, expected = line.engine.ask(tokens, salt)
                    answer = index.find(hashes).get((line.name, 0), 0)
                    assert answer == expected, (seed, line.name, tokens, salt)
                    requested += 1
                    found += answer > 0
    return requested, found


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("form", [{}, {"whole_hashes": True}], ids=["short", "whole"])
def test_the_index_answers_as_the_managers(
    groups: tuple[Group, ...], form: dict[str, object]
) -> None:
    requested, found = ask_often(range(3), groups, **form)
    assert requested == 300
    assert found > 60


@pytest.mark.slow
def test_the_index_answers_ten_thousand_questions_as_the_managers() -> None:
    requested, found = ask_often(range(100, 200), FULL)
    assert requested == 10_000
    assert found > 2_000


def stored(*names: int, parent: int | None = None, **fields: object) -> bytes:
    event: EventMap = {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
    }
    event |= {"token_ids": [1] * len(names), "block_size": 1, **fields}
    return encode_maps([event], 0.0, 0, "map")


def removed(*names: int, **fields: object) -> bytes:
    event = {"type": "BlockRemoved", "block_hashes": list(names), **fields}
    return encode_maps([event], 0.0, 0, "map")


def test_a_batch_behind_a_gap_waits_for_the_missing_one() -> None:
    index = EventIndex()
    assert index.apply("a", 0, 0, stored(1)) == Applied(0)
    assert index.apply("a", 0, 2, stored(3, parent=2)) == Gap(1)
    assert index.is_partial("a", 0)
    assert index.find([1, 2, 3]) == {("a", 0): 1}
    assert index.apply("a", 0, 1, stored(2, parent=1)) == Applied(2)
    assert index.find([1, 2, 3]) == {("a", 0): 3}
    assert not index.is_partial("a", 0)
    assert index.apply("a", 0, 1, stored(9)) == Stale(3)


def test_a_block_stays_until_its_last_medium_lost_it() -> None:
    index = EventIndex()
    index.apply("a", 0, 0, stored(1, medium="GPU"))
    index.apply("a", 0, 1, stored(1, medium="CPU"))
    index.apply("a", 0, 2, removed(1, medium="GPU"))
    assert index.find([1]) == {("a", 0): 1}
    index.apply("a", 0, 3, removed(1, medium="CPU"))
    assert index.find([1]) == {}


def test_a_block_named_in_two_ways_stays_until_its_last_medium_lost_it() -> None:
    """Older releases of vLLM name blocks of an offloading connector by all bytes."""
    whole = bytes(31) + b"\x01"
    index = EventIndex()
    index.apply("a", 0, 0, stored(1, medium="GPU"))
    index.apply("a", 0, 1, stored(1, block_hashes=[whole], medium="CPU"))
    index.apply("a", 0, 2, removed(1, medium="GPU"))
    assert index.find([1]) == {("a", 0): 1}
    index.apply("a", 0, 3, removed(1, block_hashes=[whole], medium="CPU"))
    assert index.find([1]) == {}
    assert index.keys("a", 0) == set()


@pytest.mark.parametrize("window", [None, 3])
def test_a_placeholder_names_a_block_and_says_nothing_of_its_group(window: int | None) -> None:
    """So vLLM's offloading connector names what it stored, unless it is told to say more."""
    index = EventIndex()
    index.apply("a", 0, 0, stored(1, 2, 3, kv_cache_spec_sliding_window=3))
    placeholder: dict[str, Any] = {"token_ids": [], "block_size": 0, "medium": "CPU"}
    named = stored(3, kv_cache_spec_sliding_window=window, **placeholder)
    assert index.apply("a", 0, 1, named) == Applied(1)
    index.apply("a", 0, 2, removed(1, 3, medium="GPU"))
    assert index.find([1, 2, 3]) == {("a", 0): 3}  # a window of 3 tokens needs the last two
    index.apply("a", 0, 3, removed(3, medium="CPU"))
    assert index.find([1, 2, 3]) == {}


def test_ranks_are_workers_of_their_own_and_leave_with_their_engine() -> None:
    index = EventIndex()
    for worker, rank in (("a", 0), ("a", 1), ("b", 0)):
        index.apply(worker, rank, 0, stored(1))
    assert index.find([1]) == {("a", 0): 1, ("a", 1): 1, ("b", 0): 1}
    index.drop("a")
    assert index.find([1]) == {("b", 0): 1}
    assert index.is_partial("a", 0)
    index.apply("c", 0, 0, stored(2))
    assert index.find([2]) == {("c", 0): 1}


def test_a_removal_of_a_block_that_nobody_announced_changes_nothing() -> None:
    index = EventIndex()
    index.apply("a", 0, 0, removed(7, 8))
    assert index.find([7]) == {}


def test_events_of_unknown_types_are_counted_and_unknown_fields_ignored() -> None:
    index = EventIndex()
    index.apply("a", 0, 0, encode_maps([{"type": "BlockMoved", "to": 3}], 0.0, None, "map"))
    index.apply("a", 0, 1, stored(1, colour="red"))
    assert index.unknown_events == 1
    assert index.find([1]) == {("a", 0): 1}


def test_batches_held_back_are_bounded() -> None:
    index = EventIndex(held_max=2)
    for number in (1, 2, 3):
        assert index.apply("a", 0, number, stored(number)) == Gap(0)
    assert index.apply("a", 0, 0, stored(100)) == Applied(2)
    assert index.apply("a", 0, 3, stored(3)) == Applied(3)


def test_a_snapshot_names_each_block_behind_its_parent() -> None:
    log, index = EventLog(1, kept_max=1), EventIndex()
    log.begin(0.0)
    child = {"type": "BlockStored", "block_hashes": [2, 3], "parent_block_hash": 1}
    child |= {"token_ids": [5, 6], "block_size": 1, "medium": "GPU", "group_idx": 0}
    first = child | {"block_hashes": [1], "parent_block_hash": None, "token_ids": [4]}
    log.append([child], 0.0)
    log.append([first], 0.0)
    (message,) = log.replay(0, 0.0)
    assert index.apply("a", 0, message.number, message.payload) == Applied(3)
    assert index.find([1, 2, 3]) == {("a", 0): 3}
    (event,) = decode(message.payload)[1:]
    assert event["block_hashes"] == [1, 2, 3]
    assert event["token_ids"] == [4, 5, 6]
    assert event["parent_block_hash"] is None


def decode(payload: bytes) -> list[dict[str, object]]:
    import msgspec

    events: list[dict[str, object]] = msgspec.msgpack.decode(payload)[1]
    return events


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode_maps([], 0.0, 0, "map")[:-1],
        b"\x93\xcb" + bytes(8) + b"\x91\x05\x00",
        stored(1, block_size=0),
        stored(1, group_idx=-1),
        stored(1, medium=3),
        stored(1, token_ids=None),
        stored(1, kv_cache_spec_sliding_window="wide"),
        removed(1, block_hashes=None),
        encode_maps([{"type": "BlockStored"}], 0.0, 0, "map"),
        encode_maps([], 0.0, -1, "map"),
        encode_maps([], float("nan"), 0, "map")[:1] + b"\xa1x\x90\x00",
    ],
)
def test_a_damaged_batch_is_refused_and_changes_nothing(payload: bytes) -> None:
    index = EventIndex()
    index.apply("a", 0, 0, stored(1))
    with pytest.raises(DamagedEvents):
        index.apply("a", 0, 1, payload)
    assert index.expected("a", 0) == 1
    assert index.find([1]) == {("a", 0): 1}


def test_a_window_is_hit_without_the_first_blocks_until_its_engine_is_dropped() -> None:
    """A window of 2 tokens needs the last block alone, of one token."""
    index = EventIndex()
    index.apply("full", 0, 0, stored(3))
    index.apply("window", 0, 0, stored(3, kv_cache_spec_sliding_window=2))
    assert index.find([1, 2, 3]) == {("window", 0): 3}
    index.drop("window")
    assert index.find([1, 2, 3]) == {}
    assert index.find([]) == {}
    assert index.find([3]) == {("full", 0): 1}


def test_an_engine_that_restarts_without_a_group_is_found_by_the_groups_it_has() -> None:
    index = EventIndex()
    index.apply("a", 0, 0, stored(1, 2))
    index.apply("a", 0, 1, stored(1, 2, group_idx=1, kv_cache_spec_sliding_window=3))
    assert index.find([1, 2]) == {("a", 0): 2}
    index.apply("a", 0, 9, encode_maps([{"type": "AllBlocksCleared"}], 0.0, 0, "map"))
    index.apply("a", 0, 10, stored(1, 2))
    assert index.find([1, 2]) == {("a", 0): 2}
