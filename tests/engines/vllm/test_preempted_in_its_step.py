# SPDX-License-Identifier: Apache-2.0
"""The cause of what the sanitizer finds in vLLM's priority scheduling: a request that is preempted
in the step that scheduled its chunk leaves keys of blocks that nothing has written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from vllm.v1.core.sched.scheduler import Scheduler

from kvcore.sanitizer.engines.vllm.hunt import Adapter, source
from kvcore.sanitizer.hunter.run import run
from kvcore.sanitizer.hunter.world import world_from_json

pytestmark = pytest.mark.vllm

source()  # before a run, whose time is limited
FOUND = Path(__file__).parents[2] / "sanitizer" / "found"


def withdraw_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a preempted request lose the keys of the blocks behind its computed tokens."""
    preempt = Scheduler._preempt_request

    def careful(self: Any, request: Any, *args: Any, **options: Any) -> None:
        cache, unwritten = self.kv_cache_manager, set[int]()
        tables = cache.get_block_ids(request.request_id)
        for table, group in zip(tables, cache.coordinator.single_type_managers, strict=True):
            unwritten |= {*table[request.num_computed_tokens // group.block_size :]}
        cache.evict_blocks(unwritten - {0})
        preempt(self, request, *args, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", careful)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("vllm_preempted_in_its_step.json", "unwritten-read"),
        ("vllm_state_of_a_preempted_chunk.json", "wrong-kv"),
    ],
)
def test_the_found_run_is_clean_if_the_keys_are_withdrawn(
    file: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_from_json(json.loads((FOUND / file).read_text())["world"])
    found = run(Adapter, world).found
    assert found is not None
    assert found.name == name
    withdraw_unwritten(monkeypatch)
    assert run(Adapter, world).found is None
