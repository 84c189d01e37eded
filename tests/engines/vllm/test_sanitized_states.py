# SPDX-License-Identifier: Apache-2.0
"""The sanitizer follows the recurrent states of a hybrid model in vLLM's own scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from kvcore.sanitizer.engines.vllm.hunt import Adapter, source
from kvcore.sanitizer.hunter.run import Found, run
from kvcore.sanitizer.hunter.world import Arrive, Generator, HuntWorld

pytestmark = pytest.mark.vllm

source()  # before a run, whose time is limited
Patch = pytest.MonkeyPatch
NUM_STEPS = 10_000
NUM_RUNS = 100


def worlds(**fixed: Any) -> Generator:
    """Return the worlds of a hybrid model, each time the same."""
    return Generator(Adapter.AXES, 1, {"layers": "states", **fixed})


def first_found(**fixed: Any) -> Found | None:
    """Return the first finding within some runs."""
    made = worlds(**fixed)
    found = (run(Adapter, made.next()).found for _ in range(NUM_RUNS))
    return next((each for each in found if each is not None), None)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_scheduler_as_it_is_has_no_finding(policy: str) -> None:
    made, reached, steps = worlds(policy=policy), set[str](), 0
    while steps < NUM_STEPS:
        outcome = run(Adapter, made.next())
        assert outcome.found is None
        steps += outcome.num_steps
        reached |= outcome.reached
    assert {"hit", "resumed-by-a-hit", "preempted-in-flight", "evicted-keyed-block"} <= reached


def columns_of_another_group(find: Callable[..., Any]) -> Callable[..., Any]:
    """Put the state of a hit where it would stand if blocks were larger."""

    def found(_: type, *args: Any, **options: Any) -> Any:
        blocks_of_groups, length = find(*args, **options)
        for blocks in blocks_of_groups:
            blocks[:] = [*blocks[-1:], *blocks[:-1]]
        return blocks_of_groups, length

    return found


def test_a_column_in_units_of_another_group_is_found(monkeypatch: Patch) -> None:
    broken = columns_of_another_group(MambaManager.find_longest_cache_hit)
    monkeypatch.setattr(MambaManager, "find_longest_cache_hit", classmethod(broken))
    found = first_found(policy="fcfs")
    assert found is not None
    assert found.name == "null-read"


def test_a_hit_on_a_state_of_the_same_step_is_found(monkeypatch: Patch) -> None:
    needed = MambaManager.get_num_blocks_to_allocate

    def hasty(self: Any, *args: Any, **options: Any) -> int:
        self.cached_blocks_this_step.clear()
        return int(needed(self, *args, **options))

    monkeypatch.setattr(MambaManager, "get_num_blocks_to_allocate", hasty)
    found = first_found(policy="fcfs")
    assert found is not None
    assert found.name == "unwritten-read"


def squeezed() -> Iterator[HuntWorld]:
    """Yield worlds in which the last free blocks go to a chunk of a long prompt, and in the same
    step an urgent request needs more. The pool and the urgent prompt differ.
    """
    axes = {
        "block_size": 4,
        "policy": "priority",
        "async_scheduling": False,
        "layers": "states",
        "chunk_pages": 2,
        "watermark": 0.0,
        "scheduler_reserve_full_isl": False,
        "use_v2_model_runner": True,
    }
    long = tuple(1 + (place * 7 + place // 5) % 8 for place in range(64))
    for num_blocks, length in itertools.product(range(19, 23), range(1, 7)):
        urgent = tuple(5 + place % 3 for place in range(length))
        moves = (Arrive("r0", long, 1, 2), "step", Arrive("r1", urgent, 10 - length, 0))
        yield HuntWorld(axes=axes, num_blocks=num_blocks, token_budget=16, max_rows=2, moves=moves)


def test_a_chunk_preempted_in_its_step_leaves_no_state_that_is_hit() -> None:
    """Its state has a key and was never written. But in these worlds the urgent request takes the
    attention block that ends with it, which was freed first: so no hit ends there.
    """
    outcomes = [run(Adapter, each) for each in squeezed()]
    assert {each.found for each in outcomes} == {None}
    both = {"chunk-preempted-in-its-step", "resumed-by-a-hit"}
    assert any(both <= each.reached for each in outcomes)


def test_a_state_of_a_chunk_preempted_in_its_step_is_found(monkeypatch: Patch) -> None:
    """If states are freed before attention, the older one first, the urgent request takes that
    one. What it leaves is found, and its block holds another state.
    """
    free = KVCacheCoordinator.free

    def states_first(self: Any, request_id: str) -> None:
        for manager in self.single_type_managers:
            if isinstance(manager, MambaManager):
                manager.block_pool.free_blocks(manager.pop_blocks_for_free(request_id))
        free(self, request_id)

    monkeypatch.setattr(KVCacheCoordinator, "free", states_first)
    found = [run(Adapter, each).found for each in squeezed()]
    assert {each.name for each in found if each is not None} == {"wrong-kv"}
