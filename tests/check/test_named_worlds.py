# SPDX-License-Identifier: Apache-2.0
"""The named worlds of `kvcore check`: each is complete, and shows what it is for."""

from __future__ import annotations

import json
from collections import Counter

import attrs
import pytest

from kvcore import _twin
from kvcore.check.cli import command
from kvcore.check.cli.options import USUAL, backend_of, make_parser, profile_of
from kvcore.check.mutants import MUTANTS
from kvcore.check.mutants.seeding import Patcher
from kvcore.check.profiles.profile import Profile
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.coverage import missed, needless
from tests.check.test_command import run
from tests.conftest import need_twin

SLOW = [
    name
    for name, each in PROFILES.items()
    if each.slow
    or each.num_edges > 1_000_000
    or (each.num_states > 10_000 and not name.startswith("ahead"))
]
"""The worlds that the twin does not explore in a second; of these `make test` sees the first
states, among which each bug that is seeded for such a world shows.
"""


def test_the_named_worlds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--list")
    assert (code, err) == (command.FINE, "")
    _, again, err = run(capsys, "--list", "--blocks", "3", "--groups", "full")
    assert again == out
    assert err == "kvcore check: --list shows every named world: --blocks, --groups ignored\n"
    assert all(name in out and each.sentence in out for name, each in PROFILES.items())
    head, *rows = out.splitlines()
    column = head.index("what it has")
    for row, each in zip(rows, PROFILES.values(), strict=True):
        assert row[column - 2 :] == f"  {each.sentence}"  # the columns before it keep their width


def language(name: str) -> str:
    """Return the faster backend that explores a named world."""
    return "rust" if PROFILES[name].world.far is None else "python"


def check_named(capsys: pytest.CaptureFixture[str], name: str, *backends: str) -> None:
    """Explore a named world completely; assert its pinned counts and what it is meant to show."""
    wanted = PROFILES[name]
    for backend in backends:
        words = ("--profile", name, "--json", "--backend", backend, "--workers", "1")
        code, out, _ = run(capsys, *words)
        found = json.loads(out)
        assert (code, found["verdict"], found["missed"]) == (command.FINE, "complete", []), out
        assert (found["states"], found["edges"]) == (wanted.num_states, wanted.num_edges)
        notes = Counter({("call", call): count for call, count in found["calls"].items()})
        notes += Counter({("command", kind): count for kind, count in found["commands"].items()})
        notes += Counter({("goal", goal): count for goal, count in found["goals"].items()})
        assert not needless(wanted, notes)


@pytest.mark.parametrize("name", [name for name in PROFILES if name not in SLOW])
def test_a_named_world_is_complete_and_right(capsys: pytest.CaptureFixture[str], name: str) -> None:
    if twin_is_there():
        check_named(capsys, name, language(name))
    elif PROFILES[name].backend != "rust":
        check_named(capsys, name, "python")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_slow_named_world_is_complete_and_right(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    need_twin()
    check_named(capsys, name, language(name))


@pytest.mark.slow
def test_both_languages_agree_on_every_edge_of_the_usual_world(
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_twin()
    check_named(capsys, USUAL, "both")


@pytest.mark.parametrize("name", ["states-cut", "states-drafts-moved", "tails-append"])
def test_both_languages_agree_on_every_edge_beside_states_and_inside_blocks(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    need_twin()
    check_named(capsys, name, "both")


def test_closure_is_judged_alike_where_a_parent_waits_to_be_merged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of a batch, a request evicts what another is to be merged with."""
    need_twin()
    check_named(capsys, "states-merge-two", "python", "rust")


LARGE_WITH_STATES = (
    *("states-pairs", "tails-states", "tails-states-fork", "tails-states-cut"),
    "states-drafts-three",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE_WITH_STATES)
def test_both_languages_agree_on_every_edge_of_large_worlds_with_states(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    need_twin()
    check_named(capsys, name, "both")


def test_the_usual_world_finds_keys_that_stay_when_a_request_leaves_the_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mutant = next(each for each in MUTANTS if each.name == "m_preempt_keeps_open_batch_keys")
    with Patcher() as patcher:
        mutant.patch(patcher)
        code, out, _ = run(capsys)
        assert (code, out.startswith("violation of ")) == (command.VIOLATED, True)
        code, out, _ = run(capsys, "--backend", "python")
        assert out.startswith("violation of CACHE-KV after 3 calls")


def test_the_usual_world_is_explored_on_both_backends_where_both_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = make_parser().parse_args([])
    usual = profile_of(options)
    assert usual is PROFILES["3x2x4"]
    monkeypatch.setattr(_twin, "available", lambda: True)
    assert backend_of(options, usual) == "both"
    monkeypatch.setattr(_twin, "available", lambda: False)
    assert backend_of(options, usual) == "python"
    assert backend_of(options, PROFILES["4x2x4"]) == "rust"
    assert backend_of(make_parser().parse_args(["--backend", "rust"]), usual) == "rust"


def test_a_world_that_does_not_show_what_it_is_for_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = PROFILES["uncached"].world
    requested = ("call free: HitInOpenBatch", "command Zero", "goal sharing")
    monkeypatch.setitem(PROFILES, "poor", Profile("shows little", world, 0, 0, shows=requested))
    backends = ["python", "rust"] if twin_is_there() else ["python"]
    for backend in backends:
        code, out, _ = run(capsys, "--profile", "poor", "--backend", backend)
        assert code == command.SHOWS_TOO_LITTLE
        assert out.startswith(
            "complete, but the world did not show what it is for: "
            "call free: HitInOpenBatch, command Zero\n"
        )
    code, out, _ = run(capsys, "--profile", "poor", "--depth", "2", "--json")
    assert (code, json.loads(out)["missed"]) == (command.FINE, [])


def test_a_reason_for_what_is_shown_or_not_asked_for_is_needless() -> None:
    reasons = {"goal sharing": "it is", "command Zero": "it is not asked for"}
    profile = attrs.evolve(PROFILES["uncached"], not_shown=reasons)
    assert needless(profile, Counter()) == ("command Zero",)
    assert needless(profile, Counter({("goal", "sharing"): 1})) == tuple(reasons)
    assert "goal sharing" not in missed(profile, Counter())
    assert "goal full hit" in missed(profile, Counter())


def twin_is_there() -> bool:
    """Tell whether the compiled twin can be used."""
    return _twin.available()
