# SPDX-License-Identifier: Apache-2.0
"""The older managers in small worlds: all states, both backends, and bugs that must be found."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from typing import Any

import pytest

from kvcore.check.cli.command import main
from kvcore.check.facades.model import FacadeModel
from kvcore.check.facades.mutants import LONGEST_RUN, MUTANTS, FacadeMutant, hunt
from kvcore.check.facades.profiles import FACADES, make_engine
from kvcore.check.properties.facts import FAR_PROPERTIES
from kvcore.check.properties.registry import PROPERTIES
from kvcore.check.search.report import Report
from kvcore.check.search.search import check
from kvcore.check.stories.story import render
from kvcore.legacy.v0.block_manager import SelfAttnBlockSpaceManager as CachingManager
from kvcore.legacy.v0_3.block_space_manager import BlockSpaceManager as SpaceManager
from tests.conftest import MaxStates, need_twin

COUNTS = {
    ("v0.3", "plain"): (533, 2355),
    ("v0.3", "watermark"): (277, 1193),
    ("v0.3", "siblings"): (716, 3058),
    ("v0.3", "window"): (1725, 5599),
    ("v0.3", "ring"): (217, 893),
    ("v0.3", "prefix"): (536, 2167),
    ("v0.3", "swap"): (445, 2287),
    ("v0", "caching"): (3265, 16346),
    ("v0", "swap"): (3980, 18380),
    ("v0", "window"): (277, 700),
    ("v0", "promoted"): (117, 327),
    ("v0", "naive"): (2070, 8748),
    ("v0", "exchange"): (1476, 5932),
    ("v0", "watermark"): (138, 522),
    ("v0", "lookahead"): (270, 1500),
    ("v0", "passed"): (820, 3120),
}
"""States and edges of each world: a change of a facade's or an engine's rules changes them."""


FACT = re.compile(r"S00[0-4]-\d\d|X-\d\d")
OF_THE_CHECKER = {"POLICY", "SCHEDULER", "MANAGER", "DETERMINISM", "REFINE", "EVT-COPY", "CROSS"}
OF_THE_CHECKER |= {"EPOCHS", "EPOCH-FIRST", "WISHES", "RANK-ORDER", "LEVEL-CHAIN"}
OF_THE_CHECKER |= {"NAMED-PINS", "PIN-HIT", "FLOOR", "TAIL-SOUND", *FAR_PROPERTIES}
"""What no fact lifts: users bring it, other tests check it, or no fact speaks of it."""


def explore(
    facade: str, world: str, max_states: MaxStates | None = None, backend: str = "python"
) -> Report:
    """Explore all states of a facade's world, or up to `max_states`; assert that nothing is
    broken.

    If all were explored, the counts are the pinned ones.
    """
    most = max_states and max_states(*COUNTS[facade, world])
    report = explored(facade, world, most, backend)
    assert report.violation is None, report.violation
    if most is None:
        assert report.verdict == "complete"
        assert (report.num_states, report.num_edges) == COUNTS[facade, world]
    return report


@cache
def explored(facade: str, world: str, max_states: int | None, backend: str) -> Report:
    """Return the first states of a facade's world; None: all."""
    known = FACADES[facade]
    make = partial(make_engine, known.worlds[world], backend)
    return check(FacadeModel(make, known.known), max_states=max_states)


def test_every_world_has_its_counts() -> None:
    worlds = {(name, world) for name, each in FACADES.items() for world in each.worlds}
    assert set(COUNTS) == worlds


@pytest.mark.parametrize(("facade", "world"), COUNTS)
def test_nothing_is_broken_in_any_state(facade: str, world: str, max_states: MaxStates) -> None:
    explore(facade, world, max_states)


@pytest.mark.parametrize(
    ("facade", "world"),
    [("v0.3", "swap"), ("v0.3", "ring"), ("v0", "swap"), ("v0", "window"), ("v0", "lookahead")],
)
def test_the_twin_has_the_same_states(facade: str, world: str, max_states: MaxStates) -> None:
    need_twin()
    explore(facade, world, max_states, "rust")


@pytest.mark.parametrize("name", FACADES)
def test_each_move_and_each_refusal_is_reached(name: str, max_states: MaxStates) -> None:
    notes = {
        key
        for world in FACADES[name].worlds
        for key, count in explore(name, world, max_states).notes.items()
        if count
    }
    append = {"v0.3": "append_token", "v0": "append_tokens"}[name]
    wanted = {
        "admit: done",
        "admit: refused",
        f"{append}: done",
        f"{append}: refused",
        "fork_sequence: done",
    }
    wanted |= {
        "move_out: done",
        "move_in: done",
        "free_sequence: done",
        "reset: done",
        "move_out: refused",
    }
    assert {("call", each) for each in wanted} <= notes
    assert {("command", each) for each in ("CopyOnWrite", "SwapOut", "SwapIn", "Free")} <= notes


@pytest.mark.parametrize("name", FACADES)
def test_every_property_is_checked_or_lifted_with_a_reason(name: str) -> None:
    facade = FACADES[name]
    assert not set(facade.checked) & set(facade.reasons)
    assert set(facade.checked) | set(facade.reasons) >= set(PROPERTIES)
    assert set(facade.reasons) <= set(PROPERTIES)
    no_fact = {name for name, reason in facade.reasons.items() if not FACT.search(reason)}
    assert no_fact == OF_THE_CHECKER


def test_every_answer_of_can_allocate_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, manager in (("v0.3", SpaceManager), ("v0", CachingManager)):
        seen: set[Any] = set()
        can_allocate: Any = manager.can_allocate

        def requested(*args: Any, ask: Any = can_allocate, said: set[Any] = seen) -> Any:
            answer = ask(*args)
            said.add(answer.name)
            return answer

        monkeypatch.setattr(manager, "can_allocate", requested)
        facade = FACADES[name]
        make = partial(make_engine, facade.worlds["watermark"])
        check(FacadeModel(make, facade.known), max_states=200)
        assert seen == {"OK", "LATER", "NEVER"}


def test_the_catalogues_rows_of_these_managers_have_a_bug_each() -> None:
    assert {row for each in MUTANTS for row in each.rows} >= {1, 17, 22, 24, 41, 63, 66}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_seeded_bug_is_found_in_a_short_run(mutant: FacadeMutant) -> None:
    report = hunt(mutant)
    found = report.violation
    assert found is not None, report.verdict
    assert found.name == mutant.broken, found.detail
    assert len(found.calls) <= LONGEST_RUN


def test_a_swap_out_that_comes_late_copies_what_came_in() -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_swaps_out_last")
    found = hunt(mutant).violation
    assert found is not None
    assert "1 reads device block" in found.detail
    # Sequence 0 samples token 10 and sequence 1 token 11.
    assert found.detail.endswith("it holds 10, not 11")


def test_a_counterexample_shows_each_call_and_each_block() -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_fork_owns_nothing")
    facade = FACADES[mutant.facade]
    report = hunt(mutant)
    assert report.violation is not None
    make = partial(make_engine, facade.worlds[mutant.world])
    text = render(report.violation, FacadeModel(make, facade.known), colour=False)
    assert "REF (wrong KV) does not hold after 2 calls" in text
    assert "1 admit 0 1 1" in text
    assert "2 fork_sequence 0 1" in text
    assert "RUNNING" in text


def test_the_command_explores_a_facade(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--facade", "v0.3", "--profile", "watermark", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["worlds"]["watermark"]["states"] == COUNTS["v0.3", "watermark"][0]
    assert main(["--facade", "v0.3", "--blocks", "2", "--requests", "1", "--tokens", "2"]) == 0
    said = capsys.readouterr().out
    assert "num_blocks 2" in said
    assert "complete: no property is broken" in said
    assert "NO-ALIAS: a ring names one block at several places (S003-14)" in said
    assert main(["--facade", "v0.3", "--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == list(FACADES["v0.3"].worlds)
    assert "copy_reused True" in listed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--facade", "v1"], "there is no facade 'v1'; there are v0.3, v0"),
        (["--facade", "v0", "--events"], "--facade does not take --events"),
        (["--facade", "v0", "--profile", "plain"], "v0 has no world 'plain'; it has caching"),
        (["--facade", "v0", "--backend", "both"], "one backend at a time"),
        (["--facade", "v0.3", "--letters", "2"], "tokens do not matter to v0.3"),
        (["--facade", "v0.3", "--blocks", "0"], "--blocks must be at least 1"),
        (["--facade", "v0", "--properties", "REF"], "omit --properties"),
    ],
)
def test_what_a_facade_has_not_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
