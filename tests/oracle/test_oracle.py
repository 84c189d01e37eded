# SPDX-License-Identifier: Apache-2.0
"""Engines over the public API find nothing wrong in either language, and find what is seeded."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from pathlib import Path

import pytest

import kvcore
from kvcore import KVCacheManager
from kvcore.check.mutants import MUTANTS
from tests.conftest import need_twin
from tests.oracle.run import Run, run, run_text, shorten
from tests.oracle.seeded import hunt, main
from tests.test_tidy import imports

NUM_CALLS = 40_000
"""Seeded bugs are found within 6,000 calls, and the last of them within 40,000."""
NUM_CALLS_EXPLORED = int(os.environ.get("KVCORE_ORACLE_CALLS", "10000000"))
FIRST_EXPLORED = 1_000_000
"""The first seed of the long run, behind all those of the short one."""
REACHED = (
    *("append", "add_tokens", "accept", "add_block_hashes", "cache_blocks", "cancel"),
    *("complete", "evict_blocks", "unschedule"),
    *("complete_operation", "fork", "load", "store", "pin", "unpin", "rewind", "truncate"),
    *("remove_skipped_blocks", "reset_prefix_cache", "swap_in", "swap_out", "take_new_block_ids"),
    *("Refused", "HitInOpenBatch", "HeldByOthers", "StaleHits", "InOpenBatch", "LoadUnfinished"),
)
OUTSIDE = ("test_oracle.py", "test_states.py", "seeded.py")
"""The files that may import seeded bugs."""
SEEDED = (
    *("m_cow_no_copy", "m_free_keeps_count", "m_findable_block_freed_for_good"),
    *("m_prefill_starts_at_zero", "m_full_block_published_late", "m_hash_without_parent"),
    *("m_extra_ignored", "m_eviction_not_announced", "m_superseded_key_comes_back"),
    *("m_cancel_forgets_copies", "m_cancel_keeps_counts", "m_cancel_leaves_tables"),
    *("m_free_forgets_a_block", "m_quarantine_never_ends", "m_eviction_not_reported"),
    *("m_lookup_misses", "m_leaving_keeps_count", "m_no_table_delta", "m_no_zero_on_reuse"),
    *("m_touch_not_dequeued", "m_operation_holds_no_block", "m_removed_request_stays_marked"),
    *("m_child_does_not_rest_on_a_load", "m_only_the_loaders_blocks_rest"),
    "m_freed_request_cannot_report",
)
CALLS_SEEDED = 60_000
FIRST_SEEDS = {"m_cancel_forgets_copies": 290}
"""Where a hunt begins that takes tens of thousands of calls from the first seed on."""


def checked_run(seed: int) -> Run:
    """Make a run; if it has a finding, fail with its seed and its shortened calls."""
    made = run(seed)
    assert made.wrong is None, run_text(shorten(made))
    return made


def check_many(seeds: range) -> tuple[int, Counter[str]]:
    """Check these runs; return their calls, and what they reached."""
    made = [checked_run(seed) for seed in seeds]
    reached: Counter[str] = sum((each.reached for each in made), Counter())
    return sum(each.num_calls for each in made), reached


def test_engines_find_nothing_wrong() -> None:
    need_twin()
    num_calls, reached = 0, Counter[str]()
    for seed in count():
        made = checked_run(seed)
        num_calls, reached = num_calls + made.num_calls, reached + made.reached
        if num_calls >= NUM_CALLS:
            break
    assert num_calls >= NUM_CALLS
    assert not set(REACHED) - set(reached)


@pytest.mark.slow
def test_engines_find_nothing_wrong_in_millions_of_calls() -> None:
    need_twin()
    num_calls, size = 0, 250
    with ProcessPoolExecutor() as pool:
        seeds = count(FIRST_EXPLORED, size)
        while num_calls < NUM_CALLS_EXPLORED:
            chunks = [range(first, first + size) for first, _ in zip(seeds, range(8), strict=False)]
            num_calls += sum(made for made, _ in pool.map(check_many, chunks))
    assert num_calls >= NUM_CALLS_EXPLORED


def test_a_run_is_determined_by_its_seed() -> None:
    need_twin()
    assert [run(seed) for seed in range(5)] == [run(seed) for seed in range(5)]


@pytest.mark.parametrize("name", SEEDED)
def test_seeded_bug_is_found(name: str) -> None:
    mutant = next(each for each in MUTANTS if each.name == name)
    num_calls, wrong = hunt(mutant, CALLS_SEEDED, FIRST_SEEDS.get(name, 0))
    assert wrong is not None, f"{name} lives after {num_calls} calls"


def test_a_seeded_bug_that_does_not_exist_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["seeded", "m_no_cow", "nosuch"])
    with pytest.raises(SystemExit, match="2"):
        main()
    out, err = capsys.readouterr()
    assert not out
    assert f"no seeded bug nosuch; the seeded bugs are {MUTANTS[0].name}, " in err


def test_a_finding_has_its_seed_and_a_program_that_makes_its_calls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_twin()
    monkeypatch.setattr(KVCacheManager, "num_computed_tokens", lambda _, __: 1)
    found = shorten(run(7, languages=("python",)), languages=("python",))
    assert len(found.moves) == 1
    reported = run_text(found)
    assert "# seed 7, moves (" in reported
    monkeypatch.undo()
    exec(reported, {})
    assert capsys.readouterr().out.startswith("add_request 0\nadd_request 0\n")


def test_the_oracle_imports_the_public_names_alone() -> None:
    public = {"kvcore", *(f"kvcore.{name}" for name in kvcore.__all__)}
    for path in Path(__file__).parent.glob("*.py"):
        named = {each for each in imports(path) if each.split(".")[0] == "kvcore"}
        inner = {each for each in named - public if not each.startswith("kvcore.types.errors")}
        assert not inner or path.name in OUTSIDE, f"{path.name} imports {inner}"
