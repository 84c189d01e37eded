# SPDX-License-Identifier: Apache-2.0
"""Whole engines made from seeds: the cores hold, seeded bugs do not, failures are made small."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvcore import _twin
from kvcore.check.cli import simulate as command
from kvcore.check.mutants import MUTANTS, Patcher
from kvcore.check.simulate import runs
from kvcore.check.simulate.as_trace import trace_text
from kvcore.check.simulate.runs import BackendName, Run, again, simulate
from kvcore.check.simulate.setting import Fixed
from kvcore.check.simulate.shrink import shrink
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.trace import trace_file
from kvcore.transitions import requests
from kvcore.types.config import Config
from kvcore.types.extra_inputs import MEDIA, ExtraKey, ExtraKeys
from kvcore.types.groups import Group
from tests.helpers.amount import examples

BACKEND: BackendName = "both" if _twin.available() else "python"
SMALL = Fixed(num_blocks=12, num_requests=5)
PLAIN = Fixed(num_blocks=12, num_requests=5, states=False, further=())
NUM_SEEDS, NUM_STEPS = 6, 60
REACHED = (
    *("append", "cancel", "complete", "fork", "load", "store", "swap_out", "swap_in", "truncate"),
    *("accept", "rewind", "refused later", "refused never", "complete_operation", "pin"),
    "add_block_hashes",
)
REACHED_BY_STATES = ("checkpoint_stop", "state marked", "state hit")
REACHED_BY_DRAFTS = (
    *("accept", "cancel", "free", "swap_out", "truncate", "StaleOutput"),
    *("token to come", "draft to come beside states", "begun anew"),
)
FOUND = {
    "m_no_cow": {"CACHE-KEY", "DRAFT", "KV-READ", "NO-ALIAS", "WRITE-EXCL"},
    "m_cow_no_copy": {"KV-READ", "ZEROED"},
    "m_preempt_keeps_open_batch_keys": {"CACHE-KV", "KV-READ"},
    "m_publishes_the_key_before": {"CACHE-KEY", "CACHE-KV"},
    "m_hash_without_parent": {"REQ-HASH", "HASH-INJ"},
    "m_extra_ignored": {"HASH-INJ", "REQ-HASH"},
    "m_evict_keeps_index": {"IDX-SOUND"},
    "m_touch_not_dequeued": {"PARTITION", "REF"},
    "m_hits_cost_no_capacity": {"NOCRASH"},
    "m_free_forgets_a_block": {"REF", "DRAIN"},
    "m_free_not_reported": {"OWNER-MIRROR"},
    "m_needs_one_block_less": {"ADMIT-EXACT", "NOCRASH"},
    "m_lookup_misses": {"HIT-LONGEST"},
    "m_remove_keeps_row": {"ROWS"},
    "m_swap_out_no_copy": {"KV-READ"},
    "m_swap_in_no_copy": {"KV-READ"},
    "m_failed_load_stays_findable": {"CACHE-KV", "KV-READ"},
    "m_operation_holds_no_block": {"OPERATIONS"},
    "m_no_table_delta": {"TABLE-MIRROR"},
    "m_encoder_blocks_stay": {"CROSS"},
    "m_encoder_blocks_cut_with_tokens": {"KV-READ"},
    "m_window_one_block_short": {"NULL-PREFIX", "KV-READ", "GROUP-AGREE"},
}
"""Seeded bugs that this many short runs find, and by what."""
STATEFUL = Fixed(
    num_requests=4,
    config=Config(
        15, groups=(Group(2), Group(4, kind="state")), hash_seed=b"simulate", max_in_flight=1
    ),
)
DRAFTING = Fixed(
    num_requests=4,
    further=("ahead",),
    config=Config(
        20,
        groups=(Group(2), Group(4, kind="state", draft_states=3)),
        hash_seed=b"simulate",
        max_in_flight=2,
        num_host_blocks=8,
    ),
)
INSIDE = Fixed(
    num_requests=4,
    config=Config(
        20,
        groups=(Group(8), Group(4, kind="sliding_window", window=5)),
        hash_block_size=2,
        hash_seed=b"simulate",
        max_in_flight=1,
        num_host_blocks=8,
    ),
)
FOUND_INSIDE = {
    "m_tail_keyed_by_the_call": {"KV-READ", "CACHE-KV"},
    "m_tail_no_copy": {"KV-READ", "CACHE-KV"},
}
FOUND_OF_STATES = {
    "m_state_no_copy": {"STATE-READ"},
    "m_state_no_zero": {"STATE-READ"},
    "m_keyed_state_in_place": {"STATE-KEY"},
    "m_state_keyed_inside_a_block": {"STATE-KEY"},
    "m_state_keyed_by_preempted_request": {"STATE-KEY"},
    "m_truncate_keeps_state": {"STATE-READ", "STATE-LIVE"},
    "m_cancel_keeps_state_count": {"STATE-READ"},
}
"""The same, if the engines' models have recurrent states."""
FOUND_OF_DRAFTS = {
    "m_accept_keeps_running_state": {"STATE-READ"},
    "m_accept_keeps_last_draft_state": {"STATE-READ"},
    "m_rejected_states_stay": {"STATE-LIVE", "STATE-READ"},
    "m_draft_states_cost_nothing": {"NOCRASH"},
}
"""The same, if the engines' drafts have states, too."""


def first_failure(fixed: Fixed = PLAIN) -> Run | None:
    """Return the first run in which the seeded bug shows."""
    for seed in range(NUM_SEEDS):
        run = simulate(seed, NUM_STEPS, backend="python", fixed=fixed, every=1)
        if run.failure is not None:
            return run
    return None


def test_small_and_crowded_engines_hold_in_both_cores() -> None:
    goals: Counter[str] = Counter()
    for seed in range(examples(20)):
        goals += held(simulate(seed, NUM_STEPS, backend=BACKEND, fixed=SMALL, every=5))
    assert [name for name in REACHED if not goals[name]] == []


def test_engines_whose_models_have_states_hold_in_both_cores() -> None:
    goals: Counter[str] = Counter()
    for seed in range(6):
        goals += held(simulate(seed, NUM_STEPS, backend=BACKEND, fixed=STATEFUL, every=5))
    assert [name for name in REACHED_BY_STATES if not goals[name]] == []


def test_engines_whose_drafts_have_states_hold_in_both_cores() -> None:
    goals: Counter[str] = Counter()
    for seed in range(examples(8)):
        goals += held(simulate(seed, NUM_STEPS, backend=BACKEND, fixed=DRAFTING, every=5))
    assert [name for name in REACHED_BY_DRAFTS if not goals[name]] == []


@pytest.mark.parametrize("name", FOUND_OF_DRAFTS)
def test_only_runs_whose_drafts_have_states_find_a_seeded_bug_of_these(name: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    with Patcher() as patcher:
        mutant.patch(patcher)
        run = first_failure(DRAFTING)
        other = first_failure(STATEFUL)
    assert run is not None
    assert run.failure is not None
    assert run.failure.name in FOUND_OF_DRAFTS[name]
    assert other is None


def test_short_runs_find_output_that_was_sampled_behind_a_rejected_draft() -> None:
    with Patcher() as patcher:
        patcher.during(
            requests, "_begin_anew", RequestState, "awaiting_none", lambda request, _: request
        )
        run = first_failure(DRAFTING)
    assert run is not None
    assert run.failure is not None
    assert run.failure.name == "OUTPUT-ONCE"


def test_engines_whose_hits_end_inside_blocks_hold_in_both_cores() -> None:
    goals: Counter[str] = Counter()
    for seed in range(6):
        goals += held(simulate(seed, NUM_STEPS, backend=BACKEND, fixed=INSIDE, every=5))
    assert goals["hit inside a block"] > 0


@pytest.mark.parametrize("name", FOUND_INSIDE)
def test_short_runs_find_a_seeded_bug_of_hits_inside_blocks(name: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    with Patcher() as patcher:
        mutant.patch(patcher)
        run = first_failure(INSIDE)
    assert run is not None
    assert run.failure is not None
    assert run.failure.name in FOUND_INSIDE[name]


def test_engines_of_all_sizes_hold_in_both_cores() -> None:
    for seed in range(8):
        held(simulate(seed, 40, backend=BACKEND, every=20))


@pytest.mark.slow
def test_engines_hold_for_thousands_of_steps() -> None:
    for seed in range(40):
        held(simulate(seed, 3000, backend=BACKEND))


def held(run: Run) -> Counter[str]:
    """Return the notes of a run that broke nothing."""
    assert run.failure is None, (run.seed, run.failure.name, run.failure.detail)
    return run.goals


def test_one_number_makes_the_same_run_again() -> None:
    one, other = (simulate(7, 40, backend="python") for _ in range(2))
    assert (one.config, one.num_calls, one.goals) == (other.config, other.num_calls, other.goals)


@pytest.mark.parametrize("name", [*FOUND, *FOUND_OF_STATES])
def test_short_runs_find_a_seeded_bug(name: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    with Patcher() as patcher:
        mutant.patch(patcher)
        run = first_failure(PLAIN if name in FOUND else STATEFUL)
    assert run is not None
    assert run.failure is not None
    assert run.failure.name in {**FOUND, **FOUND_OF_STATES}[name]


def test_short_runs_find_keys_without_media(monkeypatch: pytest.MonkeyPatch) -> None:
    of_block = ExtraKeys.of_block

    def without_media(self: ExtraKeys, *place: int) -> tuple[ExtraKey, ...]:
        return tuple(each for each in of_block(self, *place) if each[0] != MEDIA)

    monkeypatch.setattr(ExtraKeys, "of_block", without_media)
    run = first_failure()
    assert run is not None
    assert run.failure is not None
    assert run.failure.name == "HASH-INJ"


def test_short_runs_find_hashes_of_an_engine_that_are_mixed_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reverse(tx: Transaction, request: RequestState, hashes: list[bytes]) -> RequestState:
        return extend_hashes(tx, request, hashes[::-1])

    extend_hashes = requests.extend_hashes
    monkeypatch.setattr(requests, "extend_hashes", reverse)
    run = first_failure()
    assert run is not None
    assert run.failure is not None
    assert run.failure.name == "CACHE-KV"


def test_a_failure_is_shrunk_to_a_trace_that_both_backends_read() -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_preempt_keeps_open_batch_keys")
    with Patcher() as patcher:
        mutant.patch(patcher)
        run = first_failure()
        assert run is not None
        assert run.failure is not None
        small = shrink(run.failure, backend="python", num_seconds=20)
        assert small is not None
        play, _ = again(small.config, small.moves, backend="python", ends=False)
    assert small.name == run.failure.name
    assert len(play.calls) <= 6 < run.num_calls
    text = trace_text(small, small.config, play.calls, f"seed {run.seed}")
    story = trace_file.parse_trace(text, source="shrunk")
    for backend in runs.managers(BACKEND):
        trace_file.replay(story, "rust" if backend[0] == "rust" else "python")
    _, held = again(small.config, small.moves, backend="python")
    assert held is None


def test_the_command_says_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--seed", "3", "--steps", "20", "--runs", "2", "--backend", BACKEND, "--json"]
    assert command.main(arguments) == command.FINE
    said = json.loads(capsys.readouterr().out)
    assert (said["runs"], said["steps"], said["failure"]) == (2, 40, None)
    monkeypatch.setenv("COLUMNS", "70")
    assert command.main(arguments[:-1]) == command.FINE
    first, *table, last = capsys.readouterr().out.splitlines()
    assert first.startswith("2 runs, 40 steps")
    assert last == "no property was broken"
    assert max(map(len, table)) <= 70
    cells = re.findall(r"(\d+) (\S+(?: \S+)*)", "\n".join(table))
    assert {name: int(number) for number, name in cells} == said["goals"]


def test_the_command_tells_a_failure_with_its_trace_and_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_publishes_the_key_before")
    arguments = ["--seed", "1", "--steps", "30", "--blocks", "12", "--requests", "5"]
    arguments += ["--backend", "python"]
    with Patcher() as patcher:
        mutant.patch(patcher)
        code = command.main([*arguments, "--trace", str(tmp_path / "found.trace")])
    assert code == command.FAILED
    said = capsys.readouterr().out
    assert "again: kvcore simulate --seed 1 --steps 30 --blocks 12 --requests 5" in said
    found = trace_file.read_trace(tmp_path / "found.trace")
    assert [call.verb for call in found.calls][:1] == ["add_request"]


def test_an_interrupted_command_says_what_was_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []

    def interrupted(seed: int, *args: Any, **options: Any) -> Run:
        if done:
            raise KeyboardInterrupt
        done.append(seed)
        return simulate(seed, *args, **options)

    monkeypatch.setattr(command, "simulate", interrupted)
    arguments = ["--steps", "10", "--runs", "5", "--backend", "python"]
    assert command.main(arguments) == command.INTERRUPTED
    reported = capsys.readouterr().out
    assert "interrupted: 1 run, 10 steps" in reported
    assert "was cut off in step" in reported


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "must be an integer from 1"),
        (["--seed", "-1"], "must be an integer from 0"),
        (["--time", "never"], "must be a number from 1e-09"),
        (["--runs", "2", "--time", "1"], "--runs and --time each say when to end"),
        (["--trace", "no/such/folder/x.trace"], "there is no folder for no/such/folder/x.trace"),
        (["--blocks", "2000000000"], " blocks need "),
    ],
)
def test_bad_options_are_refused_in_one_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = command.main([*arguments, "--backend", "python"])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == command.USAGE_ERROR
    assert said in capsys.readouterr().err
