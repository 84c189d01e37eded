# SPDX-License-Identifier: Apache-2.0
"""kvcore as the shadow of vLLM's manager: it decides nothing, and reports the first difference."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import kvcore_vllm
from kvcore_vllm import NotServed
from kvcore_vllm.blocks import Blocks
from kvcore_vllm.later_calls import LaterCalls, is_same_block
from kvcore_vllm.shadow import Shadow, logger
from kvcore_vllm.short_ways import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as Own

from tests.engines.vllm.engine import make_engine, make_request, run

pytestmark = pytest.mark.vllm
PREFIX = list(range(16))
PROMPTS = {f"r{number}": [*PREFIX, number, 5, 6] for number in range(6)}


@pytest.fixture(autouse=True)
def shadow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCORE_SHADOW", "1")


def make_shadow(**options: Any) -> tuple[Any, Shadow]:
    """Return a scheduler, and the two managers in it."""
    scheduler = make_engine(kvcore_vllm.Scheduler, **options)
    manager = scheduler.kv_cache_manager
    assert isinstance(manager, Shadow)
    assert type(manager.own) is Own
    assert type(manager.kvcore) is KVCacheManager
    return scheduler, manager


def test_both_managers_hit_evict_and_place_the_same() -> None:
    scheduler, manager = make_shadow(max_num_seqs=2)
    for turn in range(8):
        prompts = {f"{name}-{turn}": [*tokens, turn] for name, tokens in PROMPTS.items()}
        assert run(scheduler, prompts) == dict.fromkeys(prompts, 3)
    assert manager.tally.difference is None
    assert manager.tally.same_ids
    for counted in (manager.tally.hit_tokens, manager.tally.num_evictions):
        assert counted["vLLM"] == counted["kvcore"] > 0
    manager.catch_up()  # with the last requests, which are given back before the next call
    assert manager.own.usage == manager.kvcore.usage == 0.0
    seen = manager.tally
    report = seen.report()
    assert f"{seen.num_calls} calls in {seen.num_steps} steps, no difference" in report
    assert f"{seen.hit_tokens['vLLM']} and {seen.hit_tokens['kvcore']} hit tokens" in report


def test_the_first_difference_is_told_and_vllm_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, manager = make_shadow(max_num_seqs=1)
    ours, requested = manager.kvcore, []

    def finds_nothing(request: Any, *_: Any) -> Any:
        requested.append(request.request_id)
        return ours.empty_kv_cache_blocks, 0, 0

    monkeypatch.setattr(ours, "get_computed_blocks", finds_nothing)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    assert requested == ["r0", "r1"], "kvcore is not asked after the first difference"
    assert manager.tally.difference is not None
    assert "get_computed_blocks of request 'r1' gave ([4] blocks, 16, 0) with vLLM's manager" in (
        manager.tally.difference
    )
    assert "and ([0] blocks, 0, 0) with kvcore" in manager.tally.difference
    assert "parted" in manager.tally.report()
    assert manager.allocate_slots == manager.own.allocate_slots, "nothing stands before it any more"


def test_calls_by_keyword_reach_both_managers() -> None:
    scheduler, manager = make_shadow()
    run(scheduler, PROMPTS)
    manager.catch_up()
    num_calls = manager.tally.num_calls
    manager.remove_skipped_blocks(request_id="r0", processed_computed_tokens=0)
    assert manager.tally.num_calls == num_calls + 1
    assert manager.tally.difference is None


def test_a_shadow_that_is_dropped_says_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    said: list[str] = []
    monkeypatch.setattr(logger, "info", lambda text, *given: said.append(text % given))
    scheduler, manager = make_shadow()
    run(scheduler, PROMPTS)
    manager.catch_up()
    num_calls = manager.tally.num_calls
    del scheduler, manager
    gc.collect()
    reports = [text for text in said if "in the shadow" in text]
    assert [f"manager: {num_calls} calls in " in text for text in reports] == [True]


@pytest.mark.parametrize("names", [["allocate_slots"], ["allocate_slots", "get_block_ids"]])
def test_an_error_of_kvcore_reaches_no_request(
    names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, manager = make_shadow()

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a defect")

    for name in names:
        monkeypatch.setattr(manager.kvcore, name, fails)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    reported = manager.tally.difference
    assert reported is not None
    assert "RuntimeError('a defect') with kvcore" in reported
    assert ("it cannot tell what it holds" in reported) == ("get_block_ids" in names)


@pytest.mark.parametrize("name", ["new_step_starts", "take_new_block_ids"])
def test_an_error_of_kvcore_between_timed_steps_reaches_no_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, manager = make_shadow()
    call = getattr(manager.kvcore, name)

    def fails_later() -> Any:
        if manager.tally.num_steps > 2:
            raise RuntimeError("a defect")
        return call()

    monkeypatch.setattr(manager.kvcore, name, fails_later)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    reported = manager.tally.difference
    assert reported is not None
    assert f", step 3: {name} gave " in reported
    assert "RuntimeError('a defect') with kvcore" in reported


def test_an_error_of_kvcore_in_a_run_of_tokens_reaches_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, manager = make_shadow()

    def fails(_: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(manager.kvcore.compat, "append_within_blocks", fails)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    reported = manager.tally.difference
    assert reported is not None
    assert "allocate_slots gave None with vLLM's manager" in reported
    assert "RuntimeError('a defect') with kvcore" in reported


def test_copies_that_kvcore_does_not_make_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, manager = make_shadow()
    assert manager.take_kv_cache_block_copies() == ([], [])
    assert manager.tally.difference is None
    copies: tuple[Any, Any] = [SimpleNamespace(block_id=1)], []
    monkeypatch.setattr(manager.own, "take_kv_cache_block_copies", lambda: copies)
    assert manager.take_kv_cache_block_copies() is copies
    assert manager.tally.difference is not None
    assert "take_kv_cache_block_copies gave " in manager.tally.difference
    assert " and ([], []) with kvcore" in manager.tally.difference
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)


def test_asking_for_copies_leaves_tokens_of_a_step_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, manager = make_shadow()
    asked = []
    take = manager.own.take_kv_cache_block_copies

    def seen() -> Any:
        asked.append(len(manager._later))
        return take()

    monkeypatch.setattr(manager.own, "take_kv_cache_block_copies", seen)
    pool = manager.kvcore.block_pool
    monkeypatch.setattr(pool, "free_blocks", lambda _: pytest.fail("it makes the core settle"))
    run(scheduler, {"r": PREFIX})
    assert asked == [0, 1, 1], "one token is put off until the step ends"


def test_only_every_so_many_steps_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for every in (1, 1000):
        monkeypatch.setenv("KVCORE_SHADOW_EVERY", str(every))
        scheduler, manager = make_shadow()
        run(scheduler, PROMPTS)
        monkeypatch.setattr(manager.kvcore, "reset_prefix_cache", lambda: False)
        assert manager.reset_prefix_cache()
        seen[every] = manager.tally.difference
    assert seen[1] is not None
    assert "reset_prefix_cache gave True with vLLM's manager" in seen[1]
    assert seen[1000] is None


def test_tokens_that_are_asked_for_when_a_step_has_them_all_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, manager = make_shadow()
    allocate = manager.kvcore.allocate_slots

    def refuses_later(*args: Any, **options: Any) -> Any:
        return None if manager.tally.num_steps > 2 else allocate(*args, **options)

    monkeypatch.setattr(manager.kvcore, "allocate_slots", refuses_later)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    reported = manager.tally.difference
    assert reported is not None
    assert ", step 3: allocate_slots of request 'r0' gave " in reported
    assert " and None with kvcore " in reported
    assert manager.tally.num_timed == 1, "the clock is read in few steps"
    assert "(of 1 steps that were timed, times " in manager.tally.report()


def test_kvcore_is_asked_to_publish_if_a_block_may_be_full() -> None:
    later, published, request = LaterCalls(object(), 4), [], SimpleNamespace(request_id="r")
    at_once: Any = SimpleNamespace(allocate_slots=None, free=None, frees_later=None)
    calls = later.noting(list, lambda _, count: published.append(count), list, at_once)
    for count, num_noted in ((5, 1), (6, 1), (7, 1), (8, 2), (9, 2), (13, 3), (15, 3)):
        calls["cache_blocks"](request, count)
        assert len(later) == num_noted, count
    later.forget("r")  # its keys may have gone meanwhile
    calls["cache_blocks"](request, 15)
    assert len(later) == 4
    assert published == [5, 6, 7, 8, 9, 13, 15, 15]


def test_finished_requests_are_given_back_to_kvcore_before_its_next_call() -> None:
    scheduler, manager = make_shadow()
    run(scheduler, PROMPTS)
    assert manager.own.usage == 0.0 < manager.kvcore.usage
    assert len(manager._later) == 2, "four ran at a time, so these ended last"
    assert manager.reset_prefix_cache(), "both hold nothing"
    assert manager.kvcore.usage == 0.0
    assert manager.tally.difference is None


def test_a_preempted_request_is_given_back_at_once() -> None:
    scheduler, manager = make_shadow()
    for name, tokens in PROMPTS.items():
        scheduler.add_request(make_request(name, tokens, max_tokens=3))
    scheduler.schedule()
    request = scheduler.running[-1]
    manager.free(request)
    assert not len(manager._later)
    assert manager.kvcore.get_block_ids(request.request_id) == ([],)
    assert manager.own.usage == manager.kvcore.usage > 0.0


def test_an_error_of_kvcore_when_it_gives_back_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, manager = make_shadow()

    def fails(_: Any) -> None:
        raise RuntimeError("it cannot give back")

    monkeypatch.setattr(manager.kvcore, "free", fails)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    manager.catch_up()
    assert manager.own.usage == 0.0
    assert manager.tally.difference is not None
    assert "free of request 'r0' gave None with vLLM's manager" in manager.tally.difference
    assert "it cannot give back" in manager.tally.difference


def test_one_block_at_the_same_place_needs_no_further_comparison() -> None:
    def mine(*groups: list[int]) -> Any:
        return SimpleNamespace(
            blocks=[[SimpleNamespace(block_id=i) for i in ids] for ids in groups]
        )

    def theirs(*groups: list[int]) -> Blocks:
        return Blocks(groups, lambda _: pytest.fail("no block is made"))

    assert is_same_block(mine([7]), theirs([7]))
    for own, ours in (([7], [8]), ([7], []), ([], [7]), ([], []), ([7, 8], [7, 8]), ([7], [7, 8])):
        assert not is_same_block(mine(own), theirs(ours)), (own, ours)
    assert not is_same_block(mine([7], [8]), theirs([7], [8])), "groups are compared one by one"
    assert not is_same_block(None, theirs([7]))
    assert not is_same_block(mine([7]), None)


def test_an_answer_that_cannot_be_compared_reaches_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, manager = make_shadow()
    compat = manager.kvcore.compat
    monkeypatch.setattr(compat, "append", lambda _: SimpleNamespace(blocks=None))
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    reported = manager.tally.difference
    assert reported is not None
    assert "TypeError" in reported
    assert " with kvcore (" in reported


def test_what_vllm_is_to_keep_of_a_window_is_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, manager = make_shadow()
    look_up, boundary = manager.own.get_computed_blocks, len(PREFIX)

    def with_boundary(*args: Any) -> Any:
        return *look_up(*args)[:2], boundary

    monkeypatch.setattr(manager.own, "get_computed_blocks", with_boundary)
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    assert manager.tally.difference is None
    assert manager.tally.hit_tokens["kvcore"] > 0


def test_a_block_that_kvcore_alone_takes_for_a_token_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, manager = make_shadow()
    compat = manager.kvcore.compat
    monkeypatch.setattr(compat, "append", lambda _: compat.create_kv_cache_blocks([[9]]))
    assert run(scheduler, PROMPTS) == dict.fromkeys(PROMPTS, 3)
    reported = manager.tally.difference
    assert reported is not None
    assert "allocate_slots of request 'r0' gave [0] blocks with vLLM's manager" in reported
    assert " and [1] blocks with kvcore" in reported


def test_blocks_that_a_connector_holds_are_held_in_both() -> None:
    scheduler, manager = make_shadow()
    run(scheduler, {"r": PREFIX})
    pool, ours = manager.block_pool, manager.kvcore.block_pool
    held = [pool.blocks[number] for number in (1, 2)]
    free = pool.get_num_free_blocks()
    pool.touch(held)
    assert pool.get_num_free_blocks() == ours.get_num_free_blocks() == free - 2
    pool.free_blocks(held)
    assert pool.get_num_free_blocks() == ours.get_num_free_blocks() == free
    assert manager.tally.difference is None


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("KVCORE_SHADOW_EVERY", "0", "KVCORE_SHADOW_EVERY='0' is not a number of steps, 1 or more"),
        ("KVCORE_SHADOW", "on", "KVCORE_SHADOW='on' is neither 0 nor 1"),
    ],
)
def test_a_wrong_variable_stops_the_engine_when_it_starts(
    variable: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(NotServed, match=f"^{text}$"):
        make_shadow()
