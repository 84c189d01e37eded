# SPDX-License-Identifier: Apache-2.0
"""Windows: what they skip, give back and look for, and what the gate makes of it.

Blocks hold two tokens; a fresh pool gives 1, 2, 3, ... A window of three: the query at position n
sees n - 2, n - 1 and n, so before the query at 8 the positions up to 5 are skipped, three blocks.
"""

from __future__ import annotations

from typing import Any, Literal

import pytest

from kvcore import Free, Group, Hit, KVCacheBlocks, KVCacheManager, Reason, Refused, SetTable
from kvcore.types.groups import skipped_blocks, skipped_tokens
from tests.conftest import Backend
from tests.helpers.stories import (
    add,
    admit,
    blocks,
    drop,
    keyed,
    make,
    owners,
    queue,
    serve,
    step,
    unchanged,
)

THREE = Group(2, kind="sliding_window", window=3)
FIVE = Group(2, kind="sliding_window", window=5)
ONE = Group(2, kind="sliding_window", window=1)
CHUNK = Group(2, kind="chunked_local", window=4)


def cached(backend: Backend, group: Group, num_tokens: int, **options: Any) -> KVCacheManager:
    """Cache tokens from 0 on in blocks 1, 2, ..., all of them free; "b" has one more."""
    manager = make(backend, 20, groups=(group,), **options)
    serve(manager, "a", range(num_tokens))
    step(manager)
    drop(manager, "a")
    add(manager, "b", range(num_tokens + 1))
    step(manager)
    return manager


@pytest.mark.seed("S000-40", "S001-80")
@pytest.mark.parametrize(
    ("window", "computed", "tokens", "num_blocks"),
    [(3, 0, 0, 0), (3, 2, 0, 0), (3, 3, 1, 0), (3, 4, 2, 1), (3, 8, 6, 3), (1, 5, 5, 2)],
)
def test_what_a_window_skips(window: int, computed: int, tokens: int, num_blocks: int) -> None:
    # The query itself is one of the window's tokens.
    group = Group(2, kind="sliding_window", window=window)
    assert skipped_tokens(group, computed) == tokens
    assert skipped_blocks(group, computed) == num_blocks


@pytest.mark.seed("S000-39", "S000-40", "S001-80", "X-11")
def test_skipped_blocks_give_way_to_null_the_highest_first(backend: Backend) -> None:
    manager = make(backend, groups=(THREE,))
    serve(manager, "a", range(8))
    step(manager)
    manager.remove_skipped_blocks("a", 8)
    assert blocks(manager, "a") == [0, 0, 0, 4]
    assert queue(manager) == [5, 6, 7, 8, 9, 3, 2, 1]
    commands = step(manager)
    assert [each for each in commands if isinstance(each, Free)] == [
        Free(3, True),
        Free(2, True),
        Free(1, True),
    ]
    tables = [each for each in commands if isinstance(each, SetTable)]
    assert sorted(tables, key=lambda each: each.position) == [
        SetTable(0, 0, position, 0) for position in range(3)
    ]
    # The window moves on by two: one block more, down to the first null.
    manager.add_tokens("a", [8, 9])
    manager.allocate_slots("a", 2)
    step(manager)
    manager.remove_skipped_blocks("a", 10)
    assert (blocks(manager, "a"), queue(manager)[-4:]) == ([0, 0, 0, 0, 5], [3, 2, 1, 4])
    with unchanged(manager):
        manager.remove_skipped_blocks("a", 10)


@pytest.mark.seed("S000-39", "S000-60")
def test_the_null_block_is_neither_freed_nor_counted_with_its_request(backend: Backend) -> None:
    manager = make(backend, groups=(THREE,))
    serve(manager, "a", range(8))
    step(manager)
    manager.remove_skipped_blocks("a", 8)
    assert manager.num_free_blocks == 8
    drop(manager, "a")
    assert queue(manager) == [5, 6, 7, 8, 9, 3, 2, 1, 4]
    assert owners(manager, 0) == 0
    assert 0 not in keyed(manager)


@pytest.mark.seed("S000-16", "S001-80")
def test_the_trim_makes_room_for_the_call_that_makes_it(backend: Backend) -> None:
    manager = make(backend, 5, groups=(THREE,))
    serve(manager, "a", range(8))
    step(manager)
    assert manager.num_free_blocks == 0
    manager.add_tokens("a", range(8, 14))
    # Three blocks fall behind the window of the query at 8, and six more tokens need three. The
    # one that went first comes first.
    assert manager.allocate_slots("a", 6) == KVCacheBlocks(((3, 2, 1),))
    assert blocks(manager, "a") == [0, 0, 0, 4, 3, 2, 1]


@pytest.mark.seed("S000-15", "X-05")
def test_who_is_refused_keeps_the_trim_and_nothing_else(backend: Backend) -> None:
    refusing, trimming = (make(backend, 7, groups=(THREE,)) for _ in range(2))
    for manager in (refusing, trimming):
        serve(manager, "a", range(8))
        serve(manager, "b", range(50, 53))
        step(manager)
        manager.add_tokens("a", range(8, 16))
        assert manager.num_free_blocks == 0
    # Sixteen slots are eight blocks, four are held; three come out of the trim.
    assert refusing.allocate_slots("a", 8) == Refused(Reason.LATER, needed=4, available=3)
    assert (blocks(refusing, "a"), queue(refusing)) == ([0, 0, 0, 4], [3, 2, 1])
    assert refusing.num_computed_tokens("a") == 8
    trimming.remove_skipped_blocks("a", 8)
    assert refusing.encode() == trimming.encode()
    assert step(refusing) == step(trimming)
    # So the next try needs no more than it says.
    assert refusing.allocate_slots("a", 6) == KVCacheBlocks(((3, 2, 1),))


@pytest.mark.seed("S000-10")
def test_whom_the_gate_refuses_keeps_even_its_window(backend: Backend) -> None:
    manager = make(backend, 5, groups=(THREE,))
    serve(manager, "a", range(8))
    step(manager)
    manager.add_tokens("a", range(8, 16))
    with unchanged(manager):
        refused = manager.allocate_slots("a", 1, full_sequence_must_fit=True)
        assert isinstance(refused, Refused)
        assert refused.available == 0  # what the trim would give does not count yet
    assert manager.allocate_slots("a", 1)


SLIDING: Literal["sliding_window"] = "sliding_window"
CHUNKED: Literal["chunked_local"] = "chunked_local"


@pytest.mark.seed("S000-11", "S000-13")
@pytest.mark.parametrize(
    ("group", "batched", "longest", "needed"),
    [
        (Group(2, kind=SLIDING, window=3), 4, 16, 4),  # 2 + 4 tokens are 3 blocks, and one
        (Group(2, kind=SLIDING, window=5), 4, 16, 5),  # 4 + 4 are 4, and one
        (Group(2, kind=SLIDING, window=3), 5, 16, 5),  # 2 + 5 are 4, and one
        (Group(2, kind=SLIDING, window=9), 4, 8, 4),  # 8 tokens are 4, though the cap is 5
        (Group(2, kind=CHUNKED, window=4), 4, 16, 4),  # 4 + 4 are 4
        (Group(2, kind=CHUNKED, window=4), 1, 16, 3),  # 4 + 1 are 3
        (Group(2, kind=CHUNKED, window=8), 9, 12, 6),  # 17 are more than the longest, 12
        (Group(2), 4, 16, 8),  # full attention keeps all 16
    ],
)
def test_the_gate_counts_what_a_request_holds_at_once(
    backend: Backend, group: Group, batched: int, longest: int, needed: int
) -> None:
    manager = make(
        backend, 12, groups=(group,), max_num_batched_tokens=batched, max_model_len=longest
    )
    for other in range(11):
        serve(manager, f"other {other}", [100 + other])
    add(manager, "a", range(16))
    refused = manager.allocate_slots("a", 2, full_sequence_must_fit=True)
    assert refused == Refused(Reason.LATER, needed=needed, available=0)
    step(manager)
    for other in range(needed):
        assert not manager.allocate_slots("a", 2, full_sequence_must_fit=True)
        drop(manager, f"other {other}")
    assert manager.allocate_slots("a", 2, full_sequence_must_fit=True)


@pytest.mark.seed("S000-11")
def test_a_step_is_not_capped(backend: Backend) -> None:
    manager = make(backend, 6, groups=(THREE,), max_num_batched_tokens=4, max_model_len=16)
    add(manager, "a", range(16))
    # The gate says four blocks, and five are free; but all in one step are eight.
    with unchanged(manager):
        refused = manager.allocate_slots("a", 16)
        assert refused == Refused(Reason.NEVER, needed=8, available=5)
    assert manager.allocate_slots("a", 4, full_sequence_must_fit=True)


@pytest.mark.seed("S000-12")
def test_without_a_batch_size_the_cap_is_what_the_model_takes(backend: Backend) -> None:
    # Two tokens before and sixteen in a step are clipped to sixteen: eight blocks, and one. So the
    # cap takes nothing off the eight that the tokens need.
    refusals = []
    for batched in (None, 16):
        manager = make(
            backend, 12, groups=(THREE,), max_num_batched_tokens=batched, max_model_len=16
        )
        serve(manager, "other", range(100, 110))
        add(manager, "a", range(16))
        refusals.append(manager.allocate_slots("a", 2, full_sequence_must_fit=True))
    assert refusals == [Refused(Reason.LATER, needed=8, available=6)] * 2


@pytest.mark.seed("S000-24", "S001-79")
def test_hits_behind_the_window_are_null_and_the_others_are_touched(backend: Backend) -> None:
    manager = cached(backend, THREE, 8)
    hit = manager.get_computed_blocks("b")
    # The query at 8 sees the fourth block alone.
    assert hit == Hit(KVCacheBlocks(((0, 0, 0, 4),)), 8)
    assert manager.allocate_slots("b", 1, hit) == KVCacheBlocks(((5,),))
    assert blocks(manager, "b") == [0, 0, 0, 4, 5]
    assert [owners(manager, block) for block in range(6)] == [0, 0, 0, 0, 1, 1]
    # What was not needed stays where it was freed, and can still be hit.
    assert (queue(manager)[-3:], keyed(manager)) == ([3, 2, 1], [1, 2, 3, 4])


@pytest.mark.seed("S000-19")
def test_hits_behind_the_window_cost_nothing(backend: Backend) -> None:
    manager = cached(backend, THREE, 8)
    serve(manager, "other", range(50, 80))  # fifteen blocks, all but the four of the hit
    assert queue(manager) == [4, 3, 2, 1]
    manager.pin([3, 2])
    # One new block and the fourth of the hit: the two that are left, one of them the hit.
    assert manager.num_free_blocks == 2
    assert manager.allocate_slots("b", 1, manager.get_computed_blocks("b")) == KVCacheBlocks(
        ((1,),)
    )


@pytest.mark.seed("S000-24")
def test_hits_that_external_tokens_push_behind_the_window_are_null(backend: Backend) -> None:
    manager = cached(backend, FIVE, 10)
    manager.add_tokens("b", range(50, 56))
    hit = manager.get_computed_blocks("b")
    assert hit == Hit(KVCacheBlocks(((0, 0, 0, 4, 5),)), 10)
    # Behind ten hit tokens two come from elsewhere; the query at 12 sees 8 to 11 before it.
    grown = manager.allocate_slots("b", 1, hit, num_external_computed_tokens=2)
    assert grown == KVCacheBlocks(((7,),))
    assert blocks(manager, "b") == [0, 0, 0, 0, 5, 6, 7]
    assert [owners(manager, block) for block in (4, 5)] == [0, 1]


@pytest.mark.seed("S000-24")
def test_external_tokens_behind_the_window_get_no_blocks(backend: Backend) -> None:
    manager = make(backend, groups=(THREE,))
    add(manager, "a", range(12))
    # Eight tokens come from elsewhere, of which the query at 8 sees two.
    grown = manager.allocate_slots("a", 1, num_external_computed_tokens=8)
    assert grown == KVCacheBlocks(((2,),))
    assert blocks(manager, "a") == [0, 0, 0, 1, 2]
    assert manager.num_free_blocks == 7


@pytest.mark.seed("S000-17")
@pytest.mark.parametrize("group", [Group(2), THREE])
def test_external_tokens_past_the_model_length_change_nothing(
    backend: Backend, group: Group
) -> None:
    encoded = []
    for external in (8, 9, 10**9):
        manager = make(backend, groups=(group,), max_model_len=8)
        add(manager, "a", range(12))
        manager.allocate_slots("a", 0, num_external_computed_tokens=external)
        encoded.append(manager.encode())
    assert encoded[0] == encoded[1] == encoded[2]


@pytest.mark.seed("S000-44")
def test_windows_have_no_common_prefix(backend: Backend) -> None:
    manager = make(backend, 20, groups=(Group(2), FIVE, CHUNK))
    for name, token in (("a", 50), ("b", 60)):
        add(manager, name, [0, 1, token])
        admit(manager, name)
        step(manager)
    # Both hold the first block of every group.
    assert [ids[0] for ids in manager.get_block_ids("a")] == [
        ids[0] for ids in manager.get_block_ids("b")
    ]
    assert manager.get_num_common_prefix_blocks("a") == [1, 0, 0]


@pytest.mark.seed("S000-44")
def test_without_caching_there_is_no_common_prefix(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    serve(manager, "a", [0, 1, 2])
    assert manager.get_num_common_prefix_blocks("a") == [0]


@pytest.mark.seed("S001-79")
def test_a_window_finds_the_last_run_that_is_long_enough(backend: Backend) -> None:
    # A window of five sees four tokens before the query: two blocks in a row.
    manager = cached(backend, FIVE, 10)
    found = manager.get_computed_blocks("b")
    assert found == Hit(KVCacheBlocks(((0, 0, 0, 4, 5),)), 10)
    manager.evict_blocks([4])
    # Block 5 alone is too short a run, 2 and 3 are not.
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((0, 2, 3),)), 6)
    manager.evict_blocks([2])
    # So are 5 and 3 alone. Block 1 is no run of two either, but nothing is before it.
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1,),)), 2)
    manager.evict_blocks([1])
    with unchanged(manager):
        assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((),)), 0)


@pytest.mark.seed("S001-81")
def test_a_window_of_one_needs_no_block_before_the_last(backend: Backend) -> None:
    manager = cached(backend, ONE, 8)
    manager.evict_blocks([1, 2, 4])
    # The query at 6 sees itself alone. Block 3 is all that is left of the way there.
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((0, 0, 0),)), 6)
    manager.evict_blocks([3])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((),)), 0)


@pytest.mark.seed("S000-40")
def test_a_chunk_skips_all_chunks_before_it(backend: Backend) -> None:
    manager = make(backend, groups=(CHUNK,))
    add(manager, "a", range(7))
    manager.allocate_slots("a", 7)
    step(manager)
    manager.remove_skipped_blocks("a", 7)  # the query at 7 is in the chunk of 4 to 7
    assert blocks(manager, "a") == [0, 0, 3, 4]
    manager.add_tokens("a", [7, 8])
    manager.allocate_slots("a", 1)
    step(manager)
    manager.allocate_slots("a", 1)  # the query at 8 is the first of its chunk
    assert blocks(manager, "a") == [0, 0, 0, 0, 5]
