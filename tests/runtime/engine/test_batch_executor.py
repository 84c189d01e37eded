# SPDX-License-Identifier: Apache-2.0
"""The executor without a model: batches in order, none after an error, the effect of a clear."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.transfers import Finished
from kvcore_runtime.engine import batch_executor
from kvcore_runtime.engine.batch_executor import BatchExecutor
from kvcore_runtime.engine.errors import NotExecuted
from kvcore_runtime.engine.forward import Computed, Forward, StepInputs

from kvcore import Batch
from kvcore.types.commands import close


class Broken(RuntimeError):
    """The error that a batch raises on demand."""


class Machine:
    """Stands for the runtime and the forward pass: notes calls, and ends one store per batch.

    broken: batches that fail after their store has ended; unready: those whose step cannot be set
    up. gates: batches that say that they began, and wait. log: a file, since processes write it.
    """

    def __init__(self, log: Path) -> None:
        self.cache = SimpleNamespace(device=torch.device("cpu"))
        self.log = log
        self.broken: set[int] = set()
        self.unready: set[int] = set()
        self.gates: dict[int, Event] = {}
        self.began = multiprocessing.Event()
        self._finished: list[Finished] = []

    @property
    def calls(self) -> list[tuple[str, int]]:
        lines = self.log.read_text().split("\n")[:-1]
        return [(line.split()[0], int(line.split()[1])) for line in lines]

    def note(self, call: str, number: int) -> None:
        with self.log.open("a") as file:
            file.write(f"{call} {number}\n")

    def apply(self, batch: Batch) -> None:
        if batch.number in self.gates:
            self.began.set()
            assert self.gates[batch.number].wait(30)
        self.note("apply", batch.number)
        self._finished.append(Finished(batch.number))
        if batch.number in self.broken:
            raise Broken

    def begin(self, inputs: StepInputs) -> int:
        (number,) = inputs.reads[0]
        if number in self.unready:
            raise Broken
        return number

    def compute(self, inputs: Any) -> Computed:
        self.note("compute", inputs)
        return Computed(logits=torch.zeros(1), tokens=[inputs])

    def skip(self, next_number: int) -> None:
        self.note("skip", next_number)

    def take_finished(self) -> list[Finished]:
        finished, self._finished = self._finished, []
        return finished


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "calls")


@pytest.fixture(params=["process", "thread"])
def executor(
    request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BatchExecutor]:
    if request.param == "thread":
        monkeypatch.setattr(batch_executor, "runs_in_fork", lambda _device: False)
    yield BatchExecutor(cast(Runtime, machine), cast(Forward, machine))
    for gate in machine.gates.values():
        gate.set()


def submit(executor: BatchExecutor, number: int, *, computes: bool = True) -> None:
    if computes:
        executor.announce(StepInputs(b"", (), ([number], [], [], [], []), ([], [], []), ()))
    executor.submit(close(number, []))


def operations(finished: list[Finished]) -> list[int]:
    return [each.operation for each in finished]


def test_batches_run_in_order_each_with_its_pass(executor: BatchExecutor, machine: Machine) -> None:
    for number in range(3):
        submit(executor, number, computes=number != 1)
    assert executor.drain()
    assert machine.calls == [
        ("apply", 0),
        ("compute", 0),
        ("apply", 1),
        ("apply", 2),
        ("compute", 2),
    ]
    for number in range(3):
        done = executor.wait()
        assert operations(done.finished) == [number]
        assert (None if done.computed is None else done.computed.tokens) == (
            None if number == 1 else [number]
        )


@pytest.mark.parametrize(
    ("fault", "calls", "ended"),
    [("broken", ["apply", "compute", "apply"], [1]), ("unready", ["apply", "compute"], [])],
)
def test_nothing_runs_behind_an_error_until_it_is_cleared(
    executor: BatchExecutor, machine: Machine, fault: str, calls: list[str], ended: list[int]
) -> None:
    """A batch fails after its store has ended and is reported, or its step cannot be set up."""
    getattr(machine, fault).add(1)
    for number in range(3):
        submit(executor, number)
    assert not executor.drain()
    assert operations(executor.wait().finished) == [0]
    with pytest.raises(Broken):
        executor.wait()
    submit(executor, 3)
    assert not executor.drain()
    assert [call for call, _ in machine.calls] == calls
    assert operations(executor.clear(5)) == ended
    assert machine.calls[-1] == ("skip", 5)
    submit(executor, 5)
    assert executor.drain()
    assert operations(executor.wait().finished) == [5]


def test_who_waits_for_a_batch_behind_an_error_is_told_which_it_is(
    executor: BatchExecutor, machine: Machine
) -> None:
    machine.broken.add(0)
    submit(executor, 0)
    submit(executor, 1)
    executor.drain()
    executor._submitted.popleft()
    with pytest.raises(NotExecuted, match="batch 1 was not run: one before it failed") as caught:
        executor.wait()
    assert caught.value.number == 1


def test_a_clear_hands_out_what_ended_and_lets_nothing_else_begin(
    executor: BatchExecutor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch 0 has run, batch 1 runs while the executor is cleared, batch 2 has not begun."""
    machine.gates[1] = multiprocessing.Event()
    for number in range(3):
        submit(executor, number)
    assert machine.began.wait(30)
    drain = executor.drain

    def open_then_drain() -> bool:
        machine.gates[1].set()
        return drain()

    monkeypatch.setattr(executor, "drain", open_then_drain)
    assert operations(executor.clear(4)) == [0, 1]
    assert ("apply", 2) not in machine.calls
    assert machine.calls[-1] == ("skip", 4)
    monkeypatch.undo()
    assert executor.drain(), "nothing is on its way any more"
    submit(executor, 4)
    done = executor.wait()
    assert operations(done.finished) == [4]
    assert done.computed is not None
    assert done.computed.tokens == [4]
