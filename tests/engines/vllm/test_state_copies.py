# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker copies states between the blocks of its rows: each step reads the right one.

The worker here does what `preprocess_mamba` of vLLM does with the rows, under vLLM's scheduler over
kvcore; a block holds the tokens that its state stands for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from kvcore_vllm.states import States
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benches.vllm.compare import KINDS, MAX_MODEL_LEN, MODEL, Side, make_config, send, world_of
from benches.vllm.traffic import Traffic

pytestmark = pytest.mark.vllm
NUM_STEPS = 80


class StateWorker:
    """Keeps the rows of one group and the states in its blocks.

    rows: request -> blocks. columns: request -> column of its state. states: block -> tokens.
    """

    def __init__(self, size: int, group: int) -> None:
        self.size, self.group = size, group
        self.rows: dict[str, list[int]] = {}
        self.columns: dict[str, int] = {}
        self.states: dict[int, list[int]] = {}
        self.num_copied = self.num_resumed = 0

    def run(self, planned: Any, requests: dict[str, Any]) -> None:
        """Update the rows, copy, and compute a step. Raises AssertionError for a wrong state."""
        cached = planned.scheduled_cached_reqs
        begun = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in {*planned.finished_req_ids, *(planned.preempted_req_ids or ())}:
            self.columns.pop(name, None)
        for name, grown in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.rows[name] = list(grown[self.group])
                self.columns.pop(name, None)
            elif grown:
                self.rows[name] += grown[self.group]
        for new in planned.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[self.group])
            begun[new.req_id] = new.num_computed_tokens
        for name, count in planned.num_scheduled_tokens.items():
            self._copy(name, begun[name], begun[name] + count)
        for name, count in planned.num_scheduled_tokens.items():
            block, tokens = self.rows[name][self.columns[name]], requests[name].all_token_ids
            assert block != 0
            assert not begun[name] or self.states[block] == tokens[: begun[name]]
            self.states[block] = tokens[: begun[name] + count]

    def _copy(self, name: str, before: int, after: int) -> None:
        row, target = self.rows[name], (after - 1) // self.size
        if name not in self.columns:
            self.num_resumed += before > 0
        source = self.columns.get(name, (before - 1) // self.size)
        self.columns[name] = target
        if source not in (-1, target):
            self.states[row[target]] = self.states[row[source]]
            self.num_copied += 1


def run(folder: Path, seed: int) -> list[StateWorker]:
    """Run random traffic with a worker for each of the two groups with states."""
    init_none_hash(sha256)
    (folder / "config.json").write_text(json.dumps(MODEL))
    world = world_of("sync-states", seed)
    side = Side(KINDS[False][1], world, make_config(world, str(folder)), seed)
    workers = [StateWorker(world.block_size, group) for group in (1, 2)]
    schedule = side.scheduler.schedule

    def scheduled() -> Any:
        planned = schedule()
        for worker in workers:
            worker.run(planned, side.scheduler.requests)
        return planned

    side.scheduler.schedule = scheduled
    traffic = Traffic(seed, MAX_MODEL_LEN)
    for number in range(1, NUM_STEPS + 1):
        send(traffic, number, [side])
        side.step(number)
    return workers


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_each_step_reads_the_state_of_its_own_prefix(seed: int, tmp_path: Path) -> None:
    for worker in run(tmp_path, seed):
        assert worker.num_copied > 0
        assert worker.num_resumed > 0


def test_rows_without_null_blocks_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(States, "with_nulls", lambda _, grown, *__: grown)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run(tmp_path, 0)
