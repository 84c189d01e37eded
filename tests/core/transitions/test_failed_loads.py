# SPDX-License-Identifier: Apache-2.0
"""Failed external loads: nothing computed from them is found or counted, whichever request held
it.

Blocks hold two tokens, the null block is 0. "a" loads four tokens and computes one; "b" hits the
four and computes five behind. A rewind of "a" reports that the load failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcore import KVCacheManager, Status
from kvcore.types.errors import (
    BeyondComputed,
    HeldByOthers,
    LoadUnconfirmed,
    LoadUnfinished,
    SwappedOut,
)
from tests.conftest import Backend
from tests.helpers.stories import add, admit, drop, make

TOKENS = range(9)


def loaded(backend: Backend, num_tokens: int = 4, **options: Any) -> KVCacheManager:
    """Return a manager whose taken batch 0 has the load of "a" and the slots of "b"."""
    manager = make(backend, num_host_blocks=8, **options)
    add(manager, "a", TOKENS)
    manager.allocate_slots("a", 1, num_external_computed_tokens=num_tokens)
    add(manager, "b", TOKENS)
    admit(manager, "b")
    manager.take_batch()
    return manager


def hit_length(manager: KVCacheManager) -> int:
    """Return the hit of a new request with the same tokens."""
    add(manager, "new", TOKENS)
    found = manager.get_computed_blocks("new").num_tokens
    manager.remove_request("new")
    return found


def child_of_b(manager: KVCacheManager) -> None:
    manager.fork("b", "child")
    manager.free("b")


def hit_again(manager: KVCacheManager) -> None:
    manager.free("b")
    admit(manager, "b")


def is_known(manager: KVCacheManager, request_id: str) -> bool:
    return request_id in manager.state().requests


LEAVING: dict[str, Callable[[KVCacheManager], object]] = {
    "stays": lambda _: None,
    "free": lambda manager: manager.free("b"),
    "remove": lambda manager: drop(manager, "b"),
    "truncate": lambda manager: manager.truncate("b", 4),
    "swap_out": lambda manager: manager.swap_out(["b"]),
    "swap back": lambda manager: (manager.swap_out(["b"]), manager.swap_in(["b"])),
    "fork": child_of_b,
    "hit again": hit_again,
    "computes on": lambda manager: manager.append(["b"], [9]),
    "loader free": lambda manager: manager.free("a"),
    "loader swap": lambda manager: manager.swap_out(["a"]),
}


@pytest.mark.parametrize("max_in_flight", [0, 2])
@pytest.mark.parametrize("leave", LEAVING)
def test_nothing_computed_from_a_failed_load_is_found_or_counted(
    backend: Backend, leave: str, max_in_flight: int
) -> None:
    manager = loaded(backend, max_in_flight=max_in_flight)
    LEAVING[leave](manager)
    known = [name for name in ("a", "b", "child") if is_known(manager, name)]
    before = [manager.num_computed_tokens(name) for name in known]
    fell = manager.rewind(["a"], 0)
    assert set(fell) == {name for name, count in zip(known, before, strict=True) if count}
    assert [manager.num_computed_tokens(name) for name in known] == [0] * len(known)
    assert hit_length(manager) == 0
    manager.take_batch()
    for number in manager.in_flight:
        manager.complete(number)
    manager.check()
    assert hit_length(manager) == 0


def test_what_came_of_a_failed_load_stays(backend: Backend) -> None:
    manager = loaded(backend)
    assert manager.rewind(["a"], 2) == ("a", "b")
    assert [manager.num_computed_tokens(name) for name in "ab"] == [2, 2]
    assert hit_length(manager) == 2


def test_what_was_computed_before_the_load_stays_with_those_that_share_it(
    backend: Backend,
) -> None:
    manager = make(backend)
    for name in ("first", "a", "b"):
        add(manager, name, TOKENS)
    manager.allocate_slots("first", 2)
    manager.take_batch()
    hit = manager.get_computed_blocks("a")
    manager.allocate_slots("a", 1, hit, num_external_computed_tokens=4)
    admit(manager, "b")
    manager.take_batch()
    with pytest.raises(HeldByOthers, match=r"requests \['b', 'first'\] also count blocks"):
        manager.rewind(["a"], 0)
    assert manager.rewind(["a"], 2) == ("a", "b")
    assert [manager.num_computed_tokens(name) for name in ("first", "a", "b")] == [2, 2, 2]


def test_a_request_that_rests_on_a_load_reports_it_when_its_loader_is_gone(
    backend: Backend,
) -> None:
    manager = loaded(backend)
    manager.free("a")
    manager.remove_request("a")
    assert manager.rewind(["b"], 0) == ("b",)
    assert hit_length(manager) == 0


def test_a_later_request_by_the_name_of_a_loader_reports_nothing(backend: Backend) -> None:
    manager = loaded(backend)
    manager.free("a")
    manager.remove_request("a")
    add(manager, "a", TOKENS)
    assert manager.rewind(["a"], 0) == ()
    assert hit_length(manager) == 8


def test_a_load_is_confirmed_when_the_batch_after_its_own_is_taken(backend: Backend) -> None:
    manager = loaded(backend)
    with pytest.raises(LoadUnconfirmed, match="block 1 rests on external tokens"):
        manager.store([1])
    manager.take_batch()
    manager.store([1])
    with pytest.raises(HeldByOthers):
        manager.rewind(["a"], 0)
    manager.swap_out(["b"])
    assert manager.rewind(["a"], 0) == ("a",)
    assert manager.num_computed_tokens("b") == 9


def test_a_load_in_flight_is_confirmed_when_its_batch_completes(backend: Backend) -> None:
    manager = loaded(backend, max_in_flight=2)
    manager.take_batch()
    with pytest.raises(LoadUnconfirmed):
        manager.store([1])
    manager.complete(0)
    manager.store([1])


def test_a_load_whose_batch_is_cancelled_is_no_load(backend: Backend) -> None:
    manager = loaded(backend, max_in_flight=2)
    manager.cancel(0)
    with pytest.raises(BeyondComputed, match="has 0 computed tokens"):
        manager.rewind(["a"], 1)


def test_a_load_that_leaves_the_open_batch_is_no_load(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", TOKENS)
    manager.allocate_slots("a", 1, num_external_computed_tokens=4)
    manager.free("a")
    before = manager.encode()
    with pytest.raises(BeyondComputed):
        manager.rewind(["a"], 1)
    assert manager.encode() == before


def test_a_report_in_mid_step_takes_the_spoilt_out_of_the_open_batch(backend: Backend) -> None:
    manager = loaded(backend)
    manager.add_tokens("a", [9])
    manager.allocate_slots("a", 1)
    add(manager, "late", TOKENS)
    admit(manager, "late")
    add(manager, "apart", [50, 51])
    manager.allocate_slots("apart", 2)
    assert manager.rewind(["b"], 3) == ("b", "a", "late")
    assert [manager.num_computed_tokens(each) for each in ("a", "b", "late", "apart")] == [
        3,
        3,
        0,
        2,
    ]
    assert hit_length(manager) == 2


def test_a_swapped_request_reports_what_it_counts_and_waits_again(backend: Backend) -> None:
    manager = loaded(backend)
    manager.swap_out(["b"])
    with pytest.raises(SwappedOut):
        manager.rewind(["b"], 4)  # no report: "b" counts four loaded tokens
    assert manager.status("b") is Status.SWAPPED
    assert manager.rewind(["b"], 3) == ("b", "a")
    assert manager.status("b") is Status.WAITING


def test_a_request_with_unfinished_loads_reports_what_was_not_reported_before(
    backend: Backend,
) -> None:
    manager = loaded(backend)
    assert manager.rewind(["a"], 2) == ("a", "b")
    operations = manager.load("a", 4)
    assert isinstance(operations, tuple)
    for num_tokens in (2, 3):  # no report: the loaded tokens end at two
        with pytest.raises(LoadUnfinished):
            manager.rewind(["a"], num_tokens)
    assert manager.rewind(["a"], 0) == ("a", "b")
    manager.allocate_slots("a", 3)
    manager.take_batch()
    for operation in operations:
        manager.complete_operation(operation, True)
    assert manager.num_computed_tokens("a") == 3
    manager.check()


@pytest.mark.parametrize(("ended", "kept", "counted"), [(0, 2, 0), (1, 3, 2), (1, 1, 1)])
def test_what_a_reporter_still_loads_is_not_counted(
    backend: Backend, ended: int, kept: int, counted: int
) -> None:
    manager = make(backend, block_size=2, max_in_flight=2)
    add(manager, "a", TOKENS)
    manager.allocate_slots("a", 0, num_external_computed_tokens=4)
    manager.take_batch()
    manager.free("a")
    operations = manager.load("a", 4)  # two blocks by key, in the batch behind
    assert isinstance(operations, tuple)
    manager.take_batch()
    for operation in operations[:ended]:
        manager.complete_operation(operation, True)
    assert manager.rewind(["a"], kept) == ("a",)
    assert manager.num_computed_tokens("a") == counted
    for operation in operations[ended:]:
        manager.complete_operation(operation, False)
    assert manager.num_computed_tokens("a") == counted
    manager.check()


def test_a_duplicate_that_merges_onto_a_loaded_block_rests_on_the_load(backend: Backend) -> None:
    manager = make(backend, duplicates="merge")
    add(manager, "own", TOKENS)
    manager.allocate_slots("own", 1)
    add(manager, "a", TOKENS)
    manager.take_batch()
    manager.allocate_slots("a", 1, num_external_computed_tokens=2)
    manager.allocate_slots("own", 3)  # fills a block whose content "a" loads
    manager.take_batch()
    assert manager.get_block_ids("own")[0][0] == manager.get_block_ids("a")[0][0]
    assert manager.rewind(["a"], 0) == ("a", "own")
    assert hit_length(manager) == 0


def test_those_that_load_nothing_add_nothing_to_the_state(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "a", TOKENS)
    manager.allocate_slots("a", 5)
    manager.take_batch()
    assert manager.state().loads == ()
    with_load = loaded(backend)
    assert with_load.state().loads
    with_load.take_batch()
    assert with_load.state().loads == ()
