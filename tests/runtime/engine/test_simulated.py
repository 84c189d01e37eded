# SPDX-License-Identifier: Apache-2.0
"""The torch runtime beside simulated engines agrees with their memory, and finds what is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.segments import Copying, run_program_order
from kvcore_runtime.engine.simulated import TorchDevice, make_device

from kvcore.check.simulate.runs import simulate
from kvcore.oracle.device import GROUP
from kvcore.types.commands import CopyOnWrite
from tests.conftest import Backend
from tests.runtime.backends import python_once

PROJECT = Path(__file__).parents[3] / "runtime" / "pyproject.toml"


@python_once("seed", range(5))
def test_tensors_and_simulated_memory_agree(backend: Backend, seed: int) -> None:
    run = simulate(seed, 60, backend=backend, devices=[make_device])
    assert run.failure is None, run.failure
    assert run.num_steps == 60


def test_a_runtime_that_forgets_copies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(cache: Cache, commands: list[Copying]) -> None:
        run_program_order(cache, [each for each in commands if each.kind != CopyOnWrite.kind])

    monkeypatch.setattr("kvcore_runtime.cache.apply.run_program_order", forget)
    failures = [
        simulate(seed, 120, backend="python", devices=[make_device]).failure for seed in range(2)
    ]
    found = [each for each in failures if each is not None]
    assert found
    assert {each.name for each in found} == {"KV-READ"}
    assert all(each.detail.startswith("in the tensors: step ") for each in found)


def test_the_device_is_found_by_its_entry_point() -> None:
    points = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
    assert points == {"torch": f"{TorchDevice.__module__}:{make_device.__name__}"}
