# SPDX-License-Identifier: Apache-2.0
"""The sanitizer follows the recurrent states of a hybrid model in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from vllm.v1.core.single_type_kv_cache_manager import MambaManager

from kvcore.sanitizer.engines.vllm.hunt import Adapter, source
from kvcore.sanitizer.hunter.run import Found, run
from kvcore.sanitizer.hunter.world import Generator

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
    found = (run(Adapter(), made.next()).found for _ in range(NUM_RUNS))
    return next((each for each in found if each is not None), None)


def test_the_scheduler_as_it_is_has_no_finding() -> None:
    made, reached, steps = worlds(policy="fcfs"), set[str](), 0
    while steps < NUM_STEPS:
        outcome = run(Adapter(), made.next())
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
