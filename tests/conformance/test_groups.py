# SPDX-License-Identifier: Apache-2.0
"""Several groups: the hit that they agree on, the block that eagle drops, and a step's data of
them.

A fresh pool gives 1, 2, 3, ...
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Group, Hit, KVCacheBlocks, KVCacheManager
from tests.conftest import Backend
from tests.helpers.stories import add, drop, make, serve, step

FULL = Group(2)
THREE = Group(2, kind="sliding_window", window=3)
FIVE = Group(2, kind="sliding_window", window=5)
NONE = KVCacheBlocks(((),))


def cached(
    backend: Backend, groups: tuple[Group, ...], num_tokens: int, **options: Any
) -> KVCacheManager:
    """Cache tokens from 0 on in blocks 1, 2, ...; "b" has one token more."""
    manager = make(backend, 40, groups=groups, **options)
    add(manager, "a", range(num_tokens))
    manager.allocate_slots("a", num_tokens)
    step(manager)
    drop(manager, "a")
    add(manager, "b", range(num_tokens + 1))
    step(manager)
    return manager


@pytest.mark.seed("S000-58")
def test_a_hit_is_a_multiple_of_all_block_sizes(backend: Backend) -> None:
    # Blocks of 2 are 1 to 6, blocks of 3 are 7 to 10; hits are 6 or 12 tokens.
    manager = cached(backend, (Group(2), Group(3)), 12)
    found = manager.get_computed_blocks("b")
    assert found == Hit(KVCacheBlocks(((1, 2, 3, 4, 5, 6), (7, 8, 9, 10))), 12)
    shorter = Hit(KVCacheBlocks(((1, 2, 3), (7, 8))), 6)
    manager.evict_blocks([10])  # tokens 9 to 11: nine tokens are found there, which 6 is under
    assert manager.get_computed_blocks("b") == shorter
    manager.evict_blocks([4])
    assert manager.get_computed_blocks("b") == shorter
    manager.evict_blocks([3])  # tokens 4 and 5
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((), ())), 0)


@pytest.mark.seed("S000-58")
def test_a_hit_leaves_a_token_to_compute_in_every_group(backend: Backend) -> None:
    manager = cached(backend, (Group(2), Group(3)), 12)
    add(manager, "same", range(12))
    assert manager.get_computed_blocks("same").num_tokens == 6


@pytest.mark.seed("S000-58")
def test_one_groups_miss_shortens_all_until_all_agree(backend: Backend) -> None:
    # Full attention has blocks 1 to 6, the window of five 7 to 12.
    manager = cached(backend, (FULL, FIVE), 12)
    assert manager.get_computed_blocks("b") == Hit(
        KVCacheBlocks(((1, 2, 3, 4, 5, 6), (0, 0, 0, 0, 11, 12))), 12
    )
    # Full attention ends at 10. There the window needs blocks 10 and 11, and 10 is gone; at 8 it
    # needs 9 and 10; at 6 it has 8 and 9.
    manager.evict_blocks([6, 10])
    agreed = Hit(KVCacheBlocks(((1, 2, 3), (0, 8, 9))), 6)
    assert manager.get_computed_blocks("b") == agreed
    # The order of the groups is no matter.
    other = cached(backend, (FIVE, FULL), 12)
    other.evict_blocks([12, 4])
    assert other.get_computed_blocks("b") == Hit(KVCacheBlocks(((0, 2, 3), (7, 8, 9))), 6)


@pytest.mark.seed("S000-58")
def test_a_group_that_agreed_is_asked_again_about_a_shorter_length(backend: Backend) -> None:
    # Two windows that need two blocks in a row, 1 to 6 and 7 to 12.
    manager = cached(backend, (FIVE, FIVE), 12)
    # The first agrees to 12, the second only to 8, where the first lacks block 4; both have what 6
    # needs.
    manager.evict_blocks([11, 12, 4])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((0, 2, 3), (0, 8, 9))), 6)


@pytest.mark.seed("S000-57", "S001-78")
def test_eagle_drops_the_last_hit_block_once(backend: Backend) -> None:
    manager = cached(backend, (FULL,), 6, use_eagle=True)
    # Three blocks match, and leave a token; the draft model needs the third computed again.
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1, 2),)), 4)
    # Of three full blocks exactly the full-hit rule leaves two, of which one is dropped.
    add(manager, "same", range(6))
    assert manager.get_computed_blocks("same") == Hit(KVCacheBlocks(((1,),)), 2)
    # Of one block none is left.
    add(manager, "short", range(3))
    assert manager.get_computed_blocks("short") == Hit(NONE, 0)


@pytest.mark.seed("S000-57")
def test_without_eagle_nothing_is_dropped(backend: Backend) -> None:
    manager = cached(backend, (FULL,), 6)
    assert manager.get_computed_blocks("b").num_tokens == 6


@pytest.mark.seed("S000-57")
@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_several_groups_drop_one_block_together(backend: Backend, flags: tuple[bool, bool]) -> None:
    groups = tuple(Group(2, eagle=flag) for flag in flags)
    manager = cached(backend, groups, 6, use_eagle=True)
    # Each group finds three blocks. Whether one or both drop their last, it is one that is lost.
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1, 2), (4, 5))), 4)


@pytest.mark.seed("S000-57")
def test_only_flagged_groups_must_find_the_block_that_is_dropped(backend: Backend) -> None:
    groups = (Group(2, eagle=True), Group(2))
    manager = cached(backend, groups, 6, use_eagle=True)
    manager.evict_blocks([6])  # the last block of the group without the flag
    assert manager.get_computed_blocks("b").num_tokens == 4
    manager.evict_blocks([3])  # that of the flagged one
    assert manager.get_computed_blocks("b").num_tokens == 2


@pytest.mark.seed("S000-57", "S001-79")
def test_a_window_with_eagle_looks_for_one_block_more_and_drops_it(backend: Backend) -> None:
    # A window of three needs one block before the query; with eagle two in a row, of which the
    # last is dropped.
    manager = cached(backend, (THREE,), 8, use_eagle=True)
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((0, 0, 3),)), 6)
    manager.evict_blocks([3])
    # Block 4 alone would do without eagle. Blocks 1 and 2 are the run that is left.
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((1,),)), 2)
    plain = cached(backend, (THREE,), 8)
    plain.evict_blocks([3])
    assert plain.get_computed_blocks("b") == Hit(KVCacheBlocks(((0, 0, 0, 4),)), 8)


@pytest.mark.seed("S000-50")
def test_new_ids_are_those_of_full_attention_in_the_order_of_allocation(backend: Backend) -> None:
    groups = (THREE, Group(2, kind="mla"), FULL)
    manager = make(backend, 20, groups=groups, record_new_blocks=True)
    add(manager, "a", [0, 1, 2])
    manager.allocate_slots("a", 3)
    add(manager, "b", [50, 51])
    manager.allocate_slots("b", 2)
    assert manager.get_block_ids("a") == ([1, 2], [3, 4], [5, 6])
    assert manager.get_block_ids("b") == ([7], [8], [9])
    # The two groups that keep everything, one after the other; the window's are not named.
    assert manager.take_new_block_ids() == [3, 4, 8, 5, 6, 9]
    assert manager.take_new_block_ids() == []


@pytest.mark.seed("S000-50")
def test_hits_are_not_new_and_external_blocks_are(backend: Backend) -> None:
    manager = make(backend, record_new_blocks=True)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.take_new_block_ids()
    add(manager, "b", [0, 1, 5, 6, 7])
    hit = manager.get_computed_blocks("b")
    manager.allocate_slots("b", 1, hit, num_external_computed_tokens=2)
    assert manager.get_block_ids("b") == ([1, 3, 4],)
    assert manager.take_new_block_ids() == [3, 4]


@pytest.mark.seed("S000-50")
def test_new_ids_are_kept_only_where_they_are_asked_for(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    assert manager.take_new_block_ids() == []
