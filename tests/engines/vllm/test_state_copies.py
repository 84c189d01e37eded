# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker copies states between the blocks of its rows: each step reads the right one.

The worker here does what `preprocess_mamba` of vLLM does with the rows, under vLLM's scheduler over
kvcore; a block holds the tokens that its state stands for. With hits inside blocks it also makes
the copies that the scheduler asks for, and a worker for attention reads every token of its prefix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from kvcore_vllm.parts import Parts
from kvcore_vllm.states import States
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from benches.vllm.compare import KINDS, MAX_MODEL_LEN, MODEL, Side, make_config, send, world_of
from benches.vllm.traffic import Traffic

pytestmark = pytest.mark.vllm
NUM_STEPS = 80


class Worker:
    """Keeps the rows of one group and what its blocks hold.

    rows: request -> blocks. columns: request -> column of its state. held: block -> tokens, of a
    state all those that it stands for.
    """

    def __init__(self, size: int, group_id: int) -> None:
        self.size, self.group_id = size, group_id
        self.rows: dict[str, list[int]] = {}
        self.columns: dict[str, int] = {}
        self.held: dict[int, list[int]] = {}
        self.num_asked = self.num_copied = self.num_resumed = 0

    def run(self, planned: Any, requests: dict[str, Any]) -> None:
        """Update the rows, copy, and compute a step. Raises AssertionError for wrong content."""
        begun = self._update(planned)
        copies = planned.kv_cache_block_copies or []
        asked = [(each.dst_block_id, self.held.get(each.src_block_id)) for each in copies]
        self.held |= {target: list(tokens) for target, tokens in asked if tokens is not None}
        self.num_asked += len(copies)
        self._compute(begun, planned.num_scheduled_tokens, requests)

    def _update(self, planned: Any) -> dict[str, int]:
        """Update the rows. Returns where each request begins."""
        cached = planned.scheduled_cached_reqs
        begun = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in {*planned.finished_req_ids, *(planned.preempted_req_ids or ())}:
            self.columns.pop(name, None)
        for name, grown in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.rows[name] = list(grown[self.group_id])
                self.columns.pop(name, None)
            elif grown:
                self.rows[name] += grown[self.group_id]
        for new in planned.scheduled_new_reqs:
            self.rows[new.req_id] = list(new.block_ids[self.group_id])
            begun[new.req_id] = new.num_computed_tokens
        return begun

    def _compute(self, begun: dict[str, int], counts: dict[str, int], requests: Any) -> None:
        """Check what a step reads, and write what it computes."""
        raise NotImplementedError  # each kind of group has a worker of its own


class AttentionWorker(Worker):
    """A step reads every token before it."""

    def _compute(self, begun: dict[str, int], counts: dict[str, int], requests: Any) -> None:
        for name in counts:
            self.num_resumed += begun[name] > 0
            assert self._read(name, begun[name]) == requests[name].all_token_ids[: begun[name]]
        for name, count in counts.items():
            for at in range(begun[name], begun[name] + count):
                block = self.held.setdefault(self.rows[name][at // self.size], [])
                assert self.rows[name][at // self.size] != 0
                block[at % self.size :] = [requests[name].all_token_ids[at]]

    def _read(self, name: str, count: int) -> list[int]:
        found: list[int] = []
        for block in self.rows[name][: -(-count // self.size)]:
            found += self.held[block]
        return found[:count]


class StateWorker(Worker):
    """A step reads the state before it, which it copies to the position of the state after it."""

    def _compute(self, begun: dict[str, int], counts: dict[str, int], requests: Any) -> None:
        for name, count in counts.items():
            self._copy(name, begun[name], begun[name] + count)
        for name, count in counts.items():
            block, tokens = self.rows[name][self.columns[name]], requests[name].all_token_ids
            assert block != 0
            assert not begun[name] or self.held[block] == tokens[: begun[name]]
            self.held[block] = tokens[: begun[name] + count]

    def _copy(self, name: str, before: int, after: int) -> None:
        row, target = self.rows[name], (after - 1) // self.size
        if name not in self.columns:
            self.num_resumed += before > 0
        source = self.columns.get(name, (before - 1) // self.size)
        self.columns[name] = target
        if source not in (-1, target):
            self.held[row[target]] = self.held[row[source]]
            self.num_copied += 1


def run(folder: Path, seed: int, mode: str = "sync-states") -> list[Worker]:
    """Run random traffic with a worker for each group: of attention, and two with states."""
    init_none_hash(sha256)
    (folder / "config.json").write_text(json.dumps(MODEL))
    world = world_of(mode, seed)
    side = Side(KINDS[False][1], world, make_config(world, str(folder)), seed)
    workers = [
        AttentionWorker(world.attention_size, 0),
        *(StateWorker(world.block_size, group) for group in (1, 2)),
    ]
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
    attention, *states = run(tmp_path, seed)
    assert attention.num_resumed > 0
    for worker in states:
        assert worker.num_copied > 0
        assert worker.num_resumed > 0


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 18])
def test_each_step_reads_its_own_prefix_behind_hits_inside_blocks(
    seed: int, tmp_path: Path
) -> None:
    for worker in run(tmp_path, seed, "sync-parts"):
        assert worker.num_asked > 0
        assert worker.num_resumed > 0


def test_blocks_that_do_not_change_places_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parts, "_exchange", lambda *_: None)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run(tmp_path, 5, "sync-parts")


def test_rows_without_null_blocks_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(States, "with_nulls", lambda _, grown, *__: grown)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        run(tmp_path, 0)
