# SPDX-License-Identifier: Apache-2.0
"""SAN-SOUND: no false alarm on the pure core. SAN-ORDER: checking late finds what checking at issue
finds. SAN-COMPLETE: seeded bugs of the core are found by its commands alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore.check.mutants import MUTANTS, Patcher
from kvcore.check.simulate.play import Play
from kvcore.check.simulate.runs import simulate
from kvcore.check.simulate.setting import Fixed
from kvcore.oracle.device import DeviceSize
from kvcore.sanitizer import CacheGroup
from kvcore.sanitizer.engines.kvcore import Observer
from kvcore.sanitizer.sanitizer import Sanitizer
from tests.sanitizer.queues import Observation, Queue, play
from tests.sanitizer.test_equal import GROUPS

SEEDS = 6
STEPS = 40


def observed(seeds: range, steps: int) -> tuple[int, int]:
    """Simulate runs of the pure core beside two sanitizers, one of which reads everything at each
    step; how many steps each checked.
    """
    num_steps = [0, 0]
    for seed in seeds:
        observers: list[Observer] = []

        def make(plan: DeviceSize, made: list[Observer] = observers) -> Observer:
            made.append(Observer(plan.config, full=bool(made)))
            return made[-1]

        run = simulate(seed, steps, backend="python", devices=[make, make])
        assert run.failure is None, f"seed {seed}: {run.failure}"
        for full, observer in enumerate(observers):
            assert observer.sanitizer.findings == []
            assert observer.sanitizer.suspicions == []
            num_steps[full] += observer.num_steps
    return num_steps[0], num_steps[1]


def test_the_pure_core_raises_no_alarm() -> None:
    assert min(observed(range(SEEDS), STEPS)) > SEEDS * STEPS / 2


@pytest.mark.slow
def test_the_pure_core_raises_no_alarm_in_long_runs() -> None:
    assert min(observed(range(1000, 1400), 100)) > 400 * 100 / 2


FOUND = {
    "m_no_cow": range(20, 30),
    "m_cow_no_copy": range(10),
    "m_full_shared_block_written_in_place": range(20, 30),
    "m_evicted_block_counts_as_computed": range(10, 20),
    "m_cancel_keeps_keys": range(40, 50),
}
"""Seeded bugs of wrong reads, and seeds of runs of which at least one shows each."""


@pytest.mark.parametrize("name", FOUND)
def test_a_seeded_bug_of_the_core_is_found_by_its_commands(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [mutant] = [each for each in MUTANTS if each.patch.__name__ == name]
    assert "KV-READ" in mutant.broken
    plain = Play.__init__

    def watched_first(self: Play, *args: Any) -> None:
        plain(self, *args)
        self.devices.append(self.devices.pop(0))  # else the oracle ends the run

    monkeypatch.setattr(Play, "__init__", watched_first)
    observers: list[Observer] = []

    def make(plan: DeviceSize) -> Observer:
        observers.append(Observer(plan.config))
        return observers[-1]

    fixed = Fixed(num_blocks=10, num_requests=4)
    with Patcher() as patcher:
        mutant.patch(patcher)
        for seed in FOUND[name]:
            simulate(seed, STEPS, backend="python", devices=[make], fixed=fixed)
    assert any(observer.sanitizer.findings for observer in observers)


def early(moves: list[Observation]) -> list[Observation]:
    """Return the same moves, with each step completed as soon as it is issued."""
    reported: list[Observation] = []
    for what, arguments in moves:
        if what not in ("complete", "cancel"):
            reported.append((what, arguments))
        if what == "issue":
            reported.append(("complete", arguments[:1]))
    return reported


@pytest.mark.parametrize("name", GROUPS)
def test_checking_late_finds_what_checking_at_issue_finds(name: str) -> None:
    found = 0
    for seed in range(60):
        queue = Queue(random.Random(seed), GROUPS[name], 8, 0.05, late=True)
        moves = queue.make(40)
        late, at_issue = Sanitizer(GROUPS[name], 8), Sanitizer(GROUPS[name], 8)
        play(moves, late)
        play(early(moves), at_issue)
        assert [each.line for each in late.findings] == [each.line for each in at_issue.findings]
        found += len(late.findings)
    assert found > 20


@pytest.mark.slow
def test_long_queues_over_many_blocks_are_equal() -> None:
    groups = [CacheGroup(block_size=4), CacheGroup(block_size=4, window=6, num_null=1)]
    for seed in range(20):
        moves = Queue(random.Random(seed), groups, 1000, 0.001, most_live=40).make(12_000)
        kinds = [("python", True), ("python", False), ("rust", False)]
        sides = [Sanitizer(groups, 1000, full=full, backend=kind) for kind, full in kinds]
        found = [play(moves, side) for side in sides]
        assert found[0] == found[1] == found[2], f"seed {seed}"
