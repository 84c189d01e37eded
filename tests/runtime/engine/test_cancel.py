# SPDX-License-Identifier: Apache-2.0
"""After batches that fail or are cancelled, executed or not, everything that follows is right."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
from kvcore_runtime.cache.layer_groups import make_groups
from kvcore_runtime.engine.drafts import PromptLookup
from kvcore_runtime.engine.engine import Engine, EngineOptions
from kvcore_runtime.engine.errors import ExecutorDied, ExecutorNotStarted
from kvcore_runtime.engine.forked_worker import ForkedWorker
from kvcore_runtime.engine.forward import Begun, Computed
from kvcore_runtime.engine.sequence import Completion
from kvcore_runtime.model.model import Llama

from kvcore import Batch, Config, Group, Status
from tests.conftest import Backend, need_twin
from tests.runtime.engine.flights import Flights
from tests.runtime.far.kept import keep_in, settled
from tests.runtime.model.questions import (
    MODELS,
    answer,
    assert_drained,
    assert_same_answers,
    model_of,
    references,
    requests,
)

OPTIONS = EngineOptions(token_budget=64, guard=True, keep_logits=True)
WORLDS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "all fits": ("full", 120, 0, {}),
    "swaps": ("full", 19, 40, {}),
    "both": ("full", 16, 9, {"token_budget": 40}),
    "windows": ("windowed", 30, 60, {}),
    "drafts": ("windowed", 60, 30, {"drafter": PromptLookup()}),
}


@pytest.fixture
def backend(backend_of_engine: Backend) -> Backend:
    """Return the twin; `make explore` has Python, too."""
    return backend_of_engine


class Broken(RuntimeError):
    """The error that a forward pass raises on demand."""


def model(name: str = "full") -> Llama:
    return model_of(MODELS[name])


def make_engine(backend: Backend, world: str = "both", **options: Any) -> Engine:
    name, num_blocks, num_host_blocks, changed = WORLDS[world]
    exchange, observe = options.pop("exchange", None), options.pop("observe", None)
    config = Config(
        num_blocks,
        groups=make_groups(MODELS[name], 16),
        num_host_blocks=num_host_blocks,
        max_num_batched_tokens=64,
        **{"max_in_flight": 1, **options},
    )
    chosen = attrs.evolve(OPTIONS, backend=backend, **changed)
    return Engine(model(name), config, chosen, exchange=exchange, observe=observe)


class Breaking:
    """Makes some forward passes of an engine fail, after they spoilt what they were to write.

    numbers: of the passes, from 0. before: whether the batch is not even applied.
    """

    def __init__(self, engine: Engine, numbers: set[int], *, before: bool = False) -> None:
        self.num_calls = 0
        self._engine = engine
        self._numbers = numbers
        self._compute = engine.forward.compute
        self._apply = engine.runtime.apply
        if before:
            engine.runtime.apply = self.apply  # type: ignore[method-assign, assignment] # broken
        else:
            engine.forward.compute = self.compute  # type: ignore[method-assign] # broken

    def compute(self, begun: Begun) -> Computed:
        self.num_calls += 1
        if self.num_calls - 1 not in self._numbers:
            return self._compute(begun)
        tables, cache = self._engine.runtime.tables, self._engine.runtime.cache
        reads = begun.reads
        counts = [end - start for start, end in zip(reads.starts, reads.ends, strict=True)]
        for group_id, size in enumerate(tables.block_sizes):
            slots = tables.slot_mapping(reads.rows, reads.starts, counts, group_id=group_id).long()
            cache.groups[group_id].data[slots // size, :, :, slots % size] = math.nan
        raise Broken(f"pass {self.num_calls - 1}")

    def apply(self, batch: Batch) -> None:
        self.num_calls += 1
        if self.num_calls - 1 in self._numbers:
            raise Broken(f"batch {self.num_calls - 1}")
        self._apply(batch)


def run(engine: Engine, num_requested: int = 7) -> tuple[dict[str, Completion], int]:
    """Return the answers to the first of `requests`, and how often a step raised Broken."""
    for request in requests()[:num_requested]:
        engine.add_request(request)
    done, num_broken = [], 0
    while not engine.is_idle:
        try:
            done += engine.step()
        except Broken:
            num_broken += 1
            engine.manager.check()
            assert engine.manager.in_flight == ()
    return {f"{each.request_id}#{each.sample}": each for each in done}, num_broken


@pytest.mark.parametrize("world", WORLDS)
def test_a_batch_that_fails_is_computed_anew(backend: Backend, world: str) -> None:
    for max_in_flight, publish, before in ((1, "scheduled", True), (3, "completed", False)):
        engine = make_engine(backend, world, max_in_flight=max_in_flight, publish=publish)
        Breaking(engine, {0, 3, 4, 9, 16, 17, 18, 25}, before=before)
        completions, num_broken = run(engine)
        assert num_broken >= 6
        assert engine.metrics.num_cancelled >= num_broken
        assert_same_answers(completions, references(model(WORLDS[world][0])))
        assert_drained(engine)


@pytest.mark.parametrize("number", range(0, 24, 5))
def test_any_one_pass_may_fail(backend: Backend, number: int) -> None:
    engine = make_engine(backend, max_in_flight=2)
    Breaking(engine, {number})
    completions, num_broken = run(engine, 4)
    assert num_broken == 1
    assert_same_answers(completions, references(model()), requests()[:4])
    assert_drained(engine)


class Mirror:
    """An observer that lets each batch finish and compares the tables with the manager's."""

    def __init__(self) -> None:
        self.num_compared = 0

    def __call__(self, engine: Engine, _batch: Batch) -> None:
        assert engine._executor is not None
        engine._executor.drain()
        for sequence in engine.scheduler.unfinished():
            name = sequence.sequence_id
            swapped = engine.manager.status(name) is Status.SWAPPED
            for group_id, held in enumerate(engine.manager.get_block_ids(name)):
                found = engine.runtime.tables.row_blocks(sequence.row, group_id)
                assert found == ([] if swapped else held), name
                self.num_compared += 1


@pytest.mark.parametrize(
    ("world", "publish"), list(zip(WORLDS, ["scheduled", "completed"] * 3, strict=False))
)
def test_all_in_flight_may_be_taken_back_at_any_step(
    backend: Backend, world: str, publish: str
) -> None:
    mirror, chance = Mirror(), random.Random(world)
    engine = make_engine(backend, world, max_in_flight=2, publish=publish, observe=mirror)
    done = []
    for request in requests():
        engine.add_request(request)
    while not engine.is_idle:
        done += engine.step()
        if chance.random() < 0.4:
            engine.cancel()
            engine.manager.check()
            assert engine.manager.in_flight == ()
    completions = {f"{each.request_id}#{each.sample}": each for each in done}
    assert_same_answers(completions, references(model(WORLDS[world][0])))
    assert_drained(engine)
    assert engine.metrics.num_cancelled > 10
    assert mirror.num_compared > 100


def test_what_is_aborted_between_a_pass_and_its_failure_stays_so(backend: Backend) -> None:
    engine = make_engine(backend, max_in_flight=2)
    Breaking(engine, {2, 5})
    for request in requests():
        engine.add_request(request)
    engine.step()
    engine.step()
    for name in ("r0", "r1", "r6"):
        engine.abort(name)
    done = []
    while not engine.is_idle:
        try:
            done += engine.step()
        except Broken:
            engine.abort("r2")
    kept = requests()[3:6]
    completions = {f"{each.request_id}#{each.sample}": each for each in done}
    assert_same_answers(completions, references(model()), kept)
    assert_drained(engine)


@pytest.mark.skipif(sys.platform != "linux", reason="batches run in a process on Linux only")
def test_an_engine_whose_process_died_says_so_whenever_it_runs(backend: Backend) -> None:
    engine = make_engine(backend)
    for request in requests():
        engine.add_request(request)
    engine.step()
    assert engine._executor is not None
    worker = engine._executor._worker
    assert isinstance(worker, ForkedWorker)
    os.kill(worker.process_id, signal.SIGKILL)
    for _ in range(3):
        with pytest.raises(ExecutorDied, match="has ended, with exit code -9"):
            engine.run()
        engine.manager.check()
        assert engine.manager.in_flight == ()


@pytest.mark.skipif(sys.platform != "linux", reason="batches run in a process on Linux only")
def test_an_engine_without_a_process_says_so_and_can_try_again(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    engine = make_engine(backend)
    for request in requests():
        engine.add_request(request)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        for _ in range(2):
            with pytest.raises(ExecutorNotStarted, match="temporarily unavailable"):
                engine.step()
    assert_same_answers(answer(engine, ()), references(model()))


@pytest.mark.parametrize("before", [False, True], ids=["in the pass", "before it is applied"])
def test_stores_and_loads_of_cancelled_batches_are_given_up(
    backend: Backend, before: bool, tmp_path: Path
) -> None:
    for numbers in ({0, 2, 4, 5, 8, 12, 13}, {1, 3, 5, 6, 7, 9, 14}):
        engine = make_engine(
            backend,
            "windows",
            exchange=partial(keep_in, tmp_path),
            hash_seed=b"seed",
            max_in_flight=2,
        )
        Breaking(engine, numbers, before=before)
        completions, num_broken = run(engine)
        assert num_broken >= len(numbers) / 2
        assert_same_answers(completions, references(model("windowed")))
        assert settled(engine).num_failed == 0
        assert_drained(engine)


def test_without_batches_in_flight_an_error_is_the_callers(backend: Backend) -> None:
    engine = make_engine(backend, max_in_flight=0)
    Breaking(engine, {1})
    for request in requests():
        engine.add_request(request)
    engine.step()
    with pytest.raises(Broken):
        engine.step()
    engine.cancel()  # there is nothing to take back
    assert engine.metrics.num_cancelled == 0


GROUPS = {
    "one group": (Group(2),),
    "three groups": (
        Group(2),
        Group(2, kind="sliding_window", window=3),
        Group(4, kind="chunked_local", window=4),
    ),
}


def make_flights(backend: Backend, groups: str, publish: str, seed: int) -> Flights:
    chance = random.Random(seed)
    config = Config(
        chance.choice([9, 14]) * len(GROUPS[groups]),
        groups=GROUPS[groups],
        num_host_blocks=8 * len(GROUPS[groups]),
        max_model_len=14,
        duplicates=chance.choice(["keep", "merge"]),
        eviction=chance.choice(["lru", "uncached_first"]),
        hash_seed=b"flights",
        max_in_flight=chance.choice([1, 2, 4]),
        publish=publish,  # type: ignore[arg-type] # of a test's parameters
    )
    return Flights(config, backend, seed)


@pytest.mark.parametrize("publish", ["scheduled", "completed"])
@pytest.mark.parametrize("groups", GROUPS)
def test_reads_and_tables_are_right_whatever_is_cancelled(
    backend: Backend, groups: str, publish: str
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        flights = make_flights(backend, groups, publish, seed)
        for _ in range(150):
            flights.move()
        flights.manager.check()
        seen += flights.seen
    assert all(
        seen[what]
        for what in (
            *("cancelled, executed", "cancelled, not executed", "completed late", "pending"),
            *("swapped in", "swapped out", "transfers run", "drafts"),
        )
    ), seen


@pytest.mark.parametrize("groups", GROUPS)
def test_both_backends_cancel_alike(groups: str) -> None:
    need_twin()
    for seed, publish in ((7, "scheduled"), (8, "completed")):
        sides = [make_flights(each, groups, publish, seed) for each in ("python", "rust")]
        for _ in range(120):
            for side in sides:
                side.move()
            assert sides[0].manager.encode() == sides[1].manager.encode()
            assert [each.batch for each in sides[0].taken] == [
                each.batch for each in sides[1].taken
            ]
