# SPDX-License-Identifier: Apache-2.0
"""Floors: what a tenant has cached stays, up to its floor, whoever else needs blocks."""

from __future__ import annotations

import pytest

from kvcore import KVCacheManager, Request
from kvcore.explain.refusal import Holder
from kvcore.types.config import EVICTIONS
from kvcore.types.values import Reason, Refused
from tests.conftest import Backend
from tests.helpers.stories import admit, blocks, drop, make, queue, step

PROMPT = list(range(8))


@pytest.fixture(params=EVICTIONS)
def manager(backend: Backend, request: pytest.FixtureRequest) -> KVCacheManager:
    """Eight usable blocks of two tokens; tenant "a" has four of them cached and a floor of two."""
    made = make(backend, 9, eviction=request.param, floors={"a": 2}, max_model_len=8)
    serve(made, "r0", PROMPT, "a")
    step(made)
    drop(made, "r0")
    return made


def serve(
    manager: KVCacheManager, request_id: str, tokens: list[int], salt: str | None = None
) -> list[int]:
    """Add a request of a tenant and schedule all its tokens; returns its blocks."""
    manager.add_request(Request(request_id, tokens, cache_salt=salt))
    return admit(manager, request_id)


def test_others_leave_what_a_floor_keeps_under_every_policy(manager: KVCacheManager) -> None:
    serve(manager, "r1", [50 + each for each in range(8)])
    manager.add_request(Request("r2", [70 + each for each in range(8)]))
    assert manager.allocate_slots("r2", 8) == Refused(Reason.LATER, 4, 2)
    assert manager.allocate_slots("r2", 4)
    step(manager)
    manager.add_request(Request("r3", PROMPT, cache_salt="a"))
    assert manager.get_computed_blocks("r3").num_tokens == 4


def test_a_tenant_takes_its_own_blocks(manager: KVCacheManager) -> None:
    serve(manager, "r1", [50 + each for each in range(8)])
    manager.add_request(Request("r2", [70 + each for each in range(8)], cache_salt="a"))
    assert manager.allocate_slots("r2", 8)
    step(manager)
    assert sorted(blocks(manager, "r2")) == [1, 2, 3, 4]


def test_what_a_tenant_holds_counts_for_its_floor(backend: Backend) -> None:
    manager = make(backend, 9, floors={"a": 2}, max_model_len=8)
    serve(manager, "r0", [0, 1, 2, 3], "a")
    serve(manager, "r1", [4, 5, 6, 7], "a")
    step(manager)
    drop(manager, "r0")
    serve(manager, "r2", PROMPT)
    manager.add_request(Request("r3", [8, 9, 10, 11]))
    assert manager.allocate_slots("r3", 4)
    assert blocks(manager, "r3") == [2, 1]


def test_the_next_that_may_be_taken_is_taken(backend: Backend) -> None:
    manager = make(backend, 9, floors={"a": 2}, max_model_len=8)
    serve(manager, "r0", [0, 1, 2, 3], "a")
    serve(manager, "r1", PROMPT)
    step(manager)
    drop(manager, "r0")
    drop(manager, "r1")
    assert queue(manager) == [7, 8, 2, 1, 6, 5, 4, 3]
    assert serve(manager, "r2", [20, 21, 22, 23, 24, 25]) == [7, 8, 6]
    step(manager)
    assert queue(manager) == [2, 1, 5, 4, 3]


def test_a_floor_keeps_content_and_no_empty_block(backend: Backend) -> None:
    manager = make(backend, 9, floors={"a": 4}, max_model_len=8)
    serve(manager, "r0", [0, 1], "a")
    step(manager)
    drop(manager, "r0")
    serve(manager, "r1", PROMPT)
    manager.add_request(Request("r2", [20 + each for each in range(8)]))
    assert manager.allocate_slots("r2", 8) == Refused(Reason.LATER, 4, 3)
    assert manager.allocate_slots("r2", 6)


def test_what_nobody_finds_is_not_kept(manager: KVCacheManager) -> None:
    manager.advance_epoch()
    serve(manager, "r1", [50 + each for each in range(8)])
    serve(manager, "r2", [70 + each for each in range(8)])
    step(manager)


def test_requests_of_several_tenants_come_back_without_what_each_keeps(backend: Backend) -> None:
    floors = {"a": 1, "b": 1}
    manager = make(backend, 7, num_host_blocks=4, floors=floors, max_model_len=8)
    for name, salt in (("r0", "a"), ("r1", "b")):
        serve(manager, f"x{name}", [9, 9], salt)
        serve(manager, name, [0, 1], salt)
    step(manager)
    manager.swap_out(["r0", "r1"])
    drop(manager, "xr0")
    drop(manager, "xr1")
    step(manager)
    manager.evict_blocks([2, 4])
    serve(manager, "r2", [3, 3, 3, 3])
    manager.take_batch()
    swapped = manager.swap_in(["r0", "r1"])
    assert swapped
    assert (blocks(manager, "r0"), blocks(manager, "r1")) == ([2], [4])
    manager.check()


def test_a_refusal_names_the_floor(backend: Backend) -> None:
    manager = make(backend, 7, floors={"a": 1, "b": 1}, max_model_len=8)
    for name in "ab":
        serve(manager, name, [0, 1], name)
        step(manager)
        drop(manager, name)
    serve(manager, "r0", [0, 1])
    manager.add_request(Request("r1", PROMPT))
    why = manager.explain_refusal("r1", 8)
    assert (why.needed, why.available) == (4, 3)
    assert why.holders == (
        Holder(kind="request", name="r0", blocks=1, alone=1),
        Holder(kind="floor", name="a", blocks=1, alone=1),
        Holder(kind="floor", name="b", blocks=1, alone=1),
    )
    manager.add_request(Request("r2", PROMPT, cache_salt="b"))
    assert [each.name for each in manager.explain_refusal("r2", 8).holders] == []


def test_a_snapshot_knows_whose_blocks_are_whose(manager: KVCacheManager) -> None:
    again = KVCacheManager(manager.config, manager.backend)
    again.restore(manager.encode())
    assert again.encode() == manager.encode()
    for each in (manager, again):
        serve(each, "r1", [50 + token for token in range(8)])
        each.add_request(Request("r2", [70 + token for token in range(8)]))
        assert each.allocate_slots("r2", 8) == Refused(Reason.LATER, 4, 2)
