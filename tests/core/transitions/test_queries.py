# SPDX-License-Identifier: Apache-2.0
"""Queries: what they say, and that they change nothing."""

from __future__ import annotations

import pytest

from kvcore import Config, Group, Hit, KVCacheBlocks, KVCacheManager, Status
from kvcore.state.state import make_state
from kvcore.transitions.queries import get_num_common_prefix_blocks, usage
from kvcore.types.errors import InvalidKey, UnknownBlock, WrongArgument
from tests.conftest import Backend
from tests.helpers.stories import add, blocks, drop, make, serve, step, unchanged


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Let "a" and "b" share blocks 1 and 2 and have block 3 and 4 to themselves."""
    made = make(backend, num_host_blocks=4)
    serve(made, "a", [0, 1, 2, 3, 4])
    serve(made, "b", [0, 1, 2, 3, 5])
    step(made)
    return made


@pytest.mark.seed("S000-45", "S004-13")
def test_no_query_changes_the_state(manager: KVCacheManager) -> None:
    add(manager, "c", [0, 1, 2])
    with unchanged(manager):
        for name in "abc":
            manager.get_computed_blocks(name)
            manager.get_blocks(name)
            manager.get_block_ids(name)
            manager.get_num_common_prefix_blocks(name)
            manager.num_tokens(name)
            manager.num_computed_tokens(name)
            manager.get_row(name)
            manager.status(name)
        manager.can_allocate("c", 3)
        manager.state()
        manager.check()
        assert (manager.num_free_blocks, manager.num_free_host_blocks) == (5, 4)


@pytest.mark.seed("S000-56", "S001-84", "X-07")
def test_usage_leaves_the_null_block_out(manager: KVCacheManager, backend: Backend) -> None:
    # Four of nine usable blocks; an idle pool is at zero.
    assert manager.usage == pytest.approx(4 / 9)
    drop(manager, "a")
    assert manager.usage == pytest.approx(3 / 9)
    drop(manager, "b")
    assert manager.usage == 0.0
    assert make(backend, 2).usage == 0.0
    assert usage(make_state(Config(4, null_block=False))) == 0.0


@pytest.mark.seed("S000-43", "S001-85")
def test_the_common_prefix_is_what_every_request_with_blocks_holds(
    manager: KVCacheManager,
) -> None:
    assert manager.get_num_common_prefix_blocks("a") == [2]
    assert manager.get_num_common_prefix_blocks("b") == [2]
    add(manager, "c", [0, 1, 9])  # waits, so it does not count
    assert manager.get_num_common_prefix_blocks("a") == [2]
    assert manager.get_num_common_prefix_blocks("c") == [0]
    manager.allocate_slots("c", 1, manager.get_computed_blocks("c"))
    assert manager.get_num_common_prefix_blocks("a") == [1]
    # One that shares nothing leaves nothing in common.
    serve(manager, "d", [70])
    assert manager.get_num_common_prefix_blocks("a") == [0]


@pytest.mark.seed("S000-43")
def test_alone_all_blocks_of_a_request_are_common(manager: KVCacheManager) -> None:
    manager.swap_out(["b"])
    assert manager.get_num_common_prefix_blocks("a") == [3]
    assert manager.get_num_common_prefix_blocks("b") == [0]
    assert get_num_common_prefix_blocks(manager.state(), "a") == [3]


def test_a_status_follows_the_blocks(manager: KVCacheManager) -> None:
    add(manager, "c", [7])
    assert [manager.status(name) for name in "ac"] == [Status.RUNNING, Status.WAITING]
    manager.swap_out(["a"])
    assert manager.status("a") is Status.SWAPPED
    manager.free("a")
    assert manager.status("a") is Status.WAITING


@pytest.mark.seed("S000-48", "S000-52")
def test_blocks_come_as_one_list_a_group(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(2)))
    serve(manager, "a", [0, 1, 2])
    assert manager.get_blocks("a") == KVCacheBlocks(((1, 2), (3, 4)))
    assert manager.get_block_ids("a") == ([1, 2], [3, 4])
    add(manager, "b", [9])
    assert manager.get_block_ids("b") == ([], [])
    assert manager.get_computed_blocks("b") == Hit(KVCacheBlocks(((), ())), 0)


def test_blocks_are_added_group_by_group() -> None:
    left, right = KVCacheBlocks(((1,), (2,))), KVCacheBlocks(((3, 4), ()))
    assert left + right == KVCacheBlocks(((1, 3, 4), (2,)))
    with pytest.raises(ValueError, match="shorter"):
        left + KVCacheBlocks(((1,),))


def test_a_row_stays_and_the_last_given_back_is_the_next_given(manager: KVCacheManager) -> None:
    assert add(manager, "c", [1]) == 2
    assert [manager.get_row(name) for name in "abc"] == [0, 1, 2]
    drop(manager, "a")
    drop(manager, "c")
    assert manager.get_row("b") == 1
    assert add(manager, "held", [1]) == 3
    step(manager)
    assert [add(manager, name, [1]) for name in "def"] == [2, 0, 4]


def test_a_list_that_was_handed_out_is_the_callers(manager: KVCacheManager) -> None:
    with unchanged(manager):
        manager.get_block_ids("a")[0].clear()
    assert blocks(manager, "a") == [1, 2, 3]


def test_owners_are_tables_pins_and_operations(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2])
    manager.take_batch()
    manager.fork("a", "b")
    assert [manager.num_owners(block) for block in range(4)] == [0, 2, 2, 0]
    manager.pin([1])
    (operation,) = manager.store([1])
    assert manager.num_owners(1) == 4
    manager.take_batch()
    manager.complete_operation(operation, True)
    manager.free("b")
    assert (manager.num_owners(1), manager.num_owners(2)) == (2, 1)
    for block in (-1, manager.config.num_blocks, "1"):
        with unchanged(manager), pytest.raises(UnknownBlock):
            manager.num_owners(block)  # type: ignore[arg-type] # also what is no number


def test_a_block_and_its_key_find_each_other(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", range(4))
    add(manager, "b", range(4))
    assert manager.allocate_slots("b", 4)  # without a look-up: the same keys again
    manager.take_batch()
    ((first, second),) = manager.get_block_keys("a")
    assert [manager.get_block_key(block) for block in range(5)] == [
        *(None, first, second),  # the null block has none, though it counts as found
        *(first, second),
    ]
    assert [manager.get_cached_block(key) for key in (first, second)] == [1, 2]
    manager.evict_blocks([1])
    assert (manager.get_block_key(1), manager.get_cached_block(first)) == (None, 3)
    assert manager.get_cached_block(second[:-1] + b"\1") is None, "of another group"
    for block in (-1, manager.config.num_blocks, "1"):
        with unchanged(manager), pytest.raises(UnknownBlock):
            manager.get_block_key(block)  # type: ignore[arg-type] # also what is no number
    with unchanged(manager), pytest.raises(InvalidKey, match="36 bytes, not 32"):
        manager.get_cached_block(first[:32])
    with unchanged(manager), pytest.raises(WrongArgument, match="key must be a bytes"):
        manager.get_cached_block(bytearray(first))  # type: ignore[arg-type] # the misuse


def test_an_empty_manager_has_everything_free(backend: Backend) -> None:
    manager = make(backend, 6)
    assert (manager.num_free_blocks, manager.num_free_host_blocks) == (5, 0)
    assert manager.usage == 0.0
    manager.check()


@pytest.mark.seed("S000-37")
def test_freeing_what_holds_nothing_is_no_change(manager: KVCacheManager) -> None:
    add(manager, "c", [1])
    with unchanged(manager):
        manager.free("c")
    manager.free("a")
    with unchanged(manager):
        manager.free("a")
