# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: vLLM's manager and the adapter's give the same answers and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from kvcore_vllm.short_ways import KVCacheManager

from tests.engines.vllm.both import STATE, WINDOW, Both, make
from tests.engines.vllm.engine import FULL, make_request

pytestmark = pytest.mark.vllm
PROMPT = list(range(14))


def compute(both: Both, name: str, count: int) -> tuple[list[int], ...] | None:
    """Schedule a request's next tokens in a step of its own. Returns what its rows grow by."""

    def answer(manager: Any, requests: dict[str, Any]) -> tuple[list[int], ...] | None:
        manager.new_step_starts()
        got = manager.allocate_slots(requests[name], count)
        manager.take_new_block_ids()
        requests[name].num_computed_tokens += count
        grown: tuple[list[int], ...] | None = got and got.get_block_ids()
        return grown

    grown: tuple[list[int], ...] | None = both.ask(answer)
    return grown


def look_up(both: Both, name: str) -> tuple[int, int]:
    """Return a request's hit in tokens, and the boundary of the prefix that it shares."""

    def answer(manager: Any, requests: dict[str, Any]) -> tuple[int, int]:
        _, num_hit, boundary = manager.get_computed_blocks(requests[name])
        return num_hit, boundary

    found: tuple[int, int] = both.ask(answer)
    return found


def test_rows_grow_by_null_blocks_and_the_new_state() -> None:
    both = Both(FULL, STATE, STATE)
    both.add("r", PROMPT)
    both.admit("r", 4)
    assert compute(both, "r", 8) == ([4, 5], [0, 6], [0, 7])
    both.ask(lambda manager, _: manager.get_block_ids_for_computed_tokens("r", 4))
    compute(both, "r", 2)
    for token in range(8):
        both.decode("r", token)
    both.free("r")


@pytest.mark.parametrize("groups", [(FULL, STATE), (FULL, WINDOW, STATE), (STATE,)])
def test_a_hit_ends_at_a_state_that_a_step_left(groups: tuple[Any, ...]) -> None:
    both = Both(*groups)
    both.add("r", PROMPT)
    both.admit("r", 8)
    compute(both, "r", 6)
    both.add("s", [*PROMPT[:13], 99])
    assert both.admit("s") == 8
    both.free("r")
    both.free("s")


def test_the_boundary_of_a_shared_prefix_is_where_full_attention_ends() -> None:
    both = Both(FULL, WINDOW, STATE)
    both.add("r", PROMPT)
    both.admit("r")
    both.add("s", [*PROMPT[:9], 99, 99])
    assert look_up(both, "s") == (0, 8)
    both.admit("s", 8)
    both.add("t", [*PROMPT[:10], 77])
    assert look_up(both, "t") == (8, 0)


def test_a_request_waits_for_a_state_of_the_same_step() -> None:
    both = Both(FULL, STATE)
    both.add("r", PROMPT)
    both.add("s", [*PROMPT[:9], 99])

    def answer(manager: Any, requests: dict[str, Any]) -> list[bool]:
        manager.new_step_starts()
        admitted = []
        for name in ("r", "s"):
            hit, num_hit, _ = manager.get_computed_blocks(requests[name])
            got = manager.allocate_slots(requests[name], 8 - num_hit or 2, num_hit, hit)
            admitted.append(got is not None)
        manager.take_new_block_ids()
        requests["r"].num_computed_tokens = 8
        return admitted

    assert both.ask(answer) == [True, False]
    assert both.admit("s", 2) == 8


def test_the_blocks_of_a_request_are_counted_as_vllm_does() -> None:
    both = Both(FULL, STATE)
    both.add("r", PROMPT)
    both.admit("r", 8)
    both.add("s", PROMPT)

    def answer(manager: Any, requests: dict[str, Any]) -> list[int]:
        manager.new_step_starts()
        hit, num_hit, _ = manager.get_computed_blocks(requests["s"])
        count = manager.coordinator.get_num_blocks_to_allocate
        call = (14, hit.blocks, 0, num_hit, num_hit, 14)
        nothing = manager.empty_kv_cache_blocks.blocks
        return [
            count("s", *call, apply_admission_cap=True),
            count("r", 13, nothing, 0, 8, 8, 13),
            count("r", 8, nothing, 0, 8, 8, 8),
        ]

    assert both.ask(answer) == [3, 3, 0]


def test_without_caching_one_block_holds_the_state_of_a_request() -> None:
    state = replace(STATE, block_size=64, mamba_cache_mode="none")
    both = Both(FULL, state, enable_caching=False, scheduler_block_size=64)
    both.add("r", PROMPT)
    both.admit("r", 8)
    compute(both, "r", 6)
    for token in range(3):
        both.decode("r", token)
    both.free("r")


def test_a_request_that_leaves_its_step_leaves_no_state() -> None:
    manager = make(KVCacheManager, FULL, STATE)
    given = make_request("r", PROMPT)
    manager.new_step_starts()
    manager.allocate_slots(given, 8)
    manager.free(given)
    manager.take_new_block_ids()
    manager.new_step_starts()
    assert manager.get_computed_blocks(make_request("s", PROMPT))[1] == 0
