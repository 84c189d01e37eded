# SPDX-License-Identifier: Apache-2.0
"""Simulated engines that run ahead, change weights, pin, wish, unschedule and hit inside blocks.

The cores hold, and each kind of these draws finds seeded bugs that others do not.
"""

from __future__ import annotations

from collections import Counter

import pytest

from kvcore import _twin
from kvcore.check.mutants import MUTANTS, Patcher
from kvcore.check.simulate.as_trace import trace_text
from kvcore.check.simulate.further import FURTHER
from kvcore.check.simulate.runs import BackendName, Failure, again, managers, simulate
from kvcore.check.simulate.setting import Fixed
from kvcore.trace import trace_file
from kvcore.types.config import Config
from kvcore.types.groups import Group
from tests.helpers.amount import examples

BACKEND: BackendName = "both" if _twin.available() else "python"
NUM_SEEDS, NUM_STEPS = 3, 60
REACHED = (
    *("advance_epoch", "stale request", "extend_retention", "tick", "pin_prefix", "unpin_prefix"),
    *("unschedule", "token to come", "drafts to come", "output taken", "hit inside a block"),
    *("StaleOutput", "BeforeOpenBatch", "InOpenBatch", "NothingToPin", "StaleRequest"),
)
"""What the further moves do, and the misuse that is drawn."""
FOUND = {
    "ahead": {
        "m_cut_takes_old_output": {"OUTPUT-ONCE"},
        "m_scheduled_anew_takes_old_output": {"OUTPUT-ONCE"},
    },
    "epochs": {
        "m_keys_outlive_their_epoch": {"CACHE-KV", "EPOCH-FIRST"},
        "m_epoch_stays_after_a_preemption": {"EPOCH-HIT"},
    },
    "inside": {
        "m_hit_counts_to_the_end_of_its_block": {"HIT-LONGEST"},
        "m_same_write_keeps_a_wrong_tail": {"CACHE-KEY"},
    },
    "pins": {
        "m_pin_of_a_prefix_owns_nothing": {"NAMED-PINS", "PINS"},
        "m_unpinned_prefix_stays_held": {"DRAIN", "PINS"},
    },
    "retention": {
        "m_level_overrides": {"WISHES"},
        "m_taken_block_keeps_its_wishes": {"WISHES"},
    },
    "shorten": {"m_unschedule_keeps_keys": {"CACHE-KV"}},
}
"""Seeded bugs that short runs find only with draws of this kind, and by what."""
STATEFUL = Config(
    19,
    groups=(Group(2), Group(4, kind="state"), Group(2, kind="sliding_window", window=3)),
    hash_seed=b"simulate",
    hash_block_size=1,
    num_host_blocks=8,
    max_in_flight=1,
)


def small(*further: str) -> Fixed:
    """Fix a small pool, and draws of these kinds."""
    return Fixed(num_blocks=12, num_requests=5, states=False, further=further)


def first_failure(fixed: Fixed) -> Failure | None:
    """Return the failure of the first run that fails."""
    for seed in range(NUM_SEEDS):
        run = simulate(seed, NUM_STEPS, backend="python", fixed=fixed, every=2)
        if run.failure is not None:
            return run.failure
    return None


def test_all_draws_together_hold_in_both_cores() -> None:
    goals: Counter[str] = Counter()
    for seed in range(examples(8)):
        fixed = Fixed(num_blocks=12, num_requests=5, further=tuple(FURTHER))
        run = simulate(seed, NUM_STEPS, backend=BACKEND, fixed=fixed, every=10)
        assert run.failure is None, (seed, run.failure.name, run.failure.detail)
        goals += run.goals
    assert [name for name in REACHED if not goals[name]] == []


@pytest.mark.parametrize("publish", ["scheduled", "completed"])
def test_all_draws_hold_over_states_windows_and_tails(publish: str) -> None:
    config = Config(
        STATEFUL.num_blocks,
        groups=STATEFUL.groups,
        hash_seed=STATEFUL.hash_seed,
        hash_block_size=1,
        num_host_blocks=8,
        max_in_flight=2,
        publish=publish,  # type: ignore[arg-type] # one of both
    )
    goals: Counter[str] = Counter()
    for seed in range(4):
        fixed = Fixed(num_requests=4, config=config, further=tuple(FURTHER))
        run = simulate(seed, NUM_STEPS, backend=BACKEND, fixed=fixed, every=10)
        assert run.failure is None, (seed, run.failure.name, run.failure.detail)
        goals += run.goals
    assert goals["token to come"] > 0
    assert goals["advance_epoch"] > 0


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in FOUND.items() for name in names]
)
def test_only_runs_with_these_draws_find_a_seeded_bug(kind: str, name: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    others = [each for each in FURTHER if each != kind]
    with Patcher() as patcher:
        mutant.patch(patcher)
        found = first_failure(small(kind))
        without = first_failure(small(*others[:2]))
    assert found is not None
    assert found.name in FOUND[kind][name]
    assert without is None, (without.name, without.detail)


def test_moves_make_the_same_run_again() -> None:
    fixed = Fixed(num_blocks=12, num_requests=5, further=tuple(FURTHER))
    run = simulate(3, NUM_STEPS, backend="python", fixed=fixed)
    other = simulate(3, NUM_STEPS, backend="python", fixed=fixed)
    assert (run.config, run.num_calls, run.goals) == (other.config, other.num_calls, other.goals)


def test_a_failure_of_an_engine_that_runs_ahead_is_made_again_by_its_moves() -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_cut_takes_old_output")
    with Patcher() as patcher:
        mutant.patch(patcher)
        found = first_failure(small("ahead"))
        assert found is not None
        play, repeated = again(found.config, found.moves, backend="python")
    assert repeated is not None
    assert repeated.name == found.name
    text = trace_text(found, found.config, play.calls, "a test")
    for backend in managers(BACKEND):
        story = trace_file.parse_trace(text, source="further")
        trace_file.replay(story, "rust" if backend[0] == "rust" else "python")
