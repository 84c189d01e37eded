# SPDX-License-Identifier: Apache-2.0
"""The twin's search finds what Python's finds: states, edges, depths and what happened on the way.

The counts of larger worlds are pinned: Python would take minutes for them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import pytest

from kvcore import Config, Group, Request, _twin
from kvcore.check import Symmetry, World, check, pytest_text, render
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.report import Report
from tests.check.test_named_worlds import SLOW, language
from tests.check.worlds import world
from tests.conftest import need_twin

SLOT = Group(1)
FIRST_STATES = {"rust": 800, "python": 200}
"""How many states of a slow named world a language explores in a moment: no seeded bug of a far
tier, which only Python explores, needs more than 162.
"""
FEW_STATES = 10_000
"""Of more than these, a state takes at most 100 bytes."""


def engine(*sizes: int, **options: Any) -> World:
    """Return a world with an engine's moves."""
    *counts, num_prompt = sizes
    num_blocks, num_requests, num_tokens = counts
    where = world(num_blocks, num_requests, num_tokens, num_prompt=num_prompt, **options)
    return attrs.evolve(where, moves="engine")


WORLDS = {
    "calls": world(2, 2, 3),
    "engine": engine(2, 2, 3, 3),
    "two calls per batch": world(2, 2, 2, duplicates="merge", moves_per_batch=2),
    "pins": world(2, 2, 2, "truncate", "pin", "unpin", "evict_blocks"),
    "loads": world(
        2, 2, 2, "load", "store", groups=(SLOT,), loads_fail=True, without=("fork", "append")
    ),
    "host tier": world(2, 2, 2, "swap_out", "swap_in", num_host_blocks=1),
    "own hashes": world(
        *(2, 2, 2, "add_block_hashes"), num_letters=1, kinds_of_requests=({"block_hashes": ()},)
    ),
    "salts": world(2, 2, 2, num_letters=1, kinds_of_requests=({}, {"cache_salt": "one"})),
}


def counted(report: Any) -> tuple[Any, ...]:
    """Return the counts that must be the same in both languages."""
    notes = {what: count for what, count in report.notes.items() if count}
    return report.verdict, report.num_states, report.num_edges, report.depths, notes


@pytest.fixture(params=[5, pytest.param(None, marks=pytest.mark.slow)])
def depth(request: pytest.FixtureRequest) -> int | None:
    """Return the depth to which Python explores; in `make explore`, all of it."""
    most: int | None = request.param
    return most


@pytest.mark.parametrize("name", WORLDS)
def test_both_searches_find_the_same(name: str, depth: int | None) -> None:
    need_twin()
    where = WORLDS[name]
    depth = depth and depth + 1 - where.moves_per_batch  # a deeper one has all but the whole world
    rust = check(where, backend="rust", max_depth=depth)
    assert counted(rust) == counted(check(where, max_depth=depth))


@pytest.mark.parametrize("off", ["requests", "blocks", "tokens"])
def test_both_searches_fold_alike_without_a_symmetry(off: str, depth: int | None) -> None:
    need_twin()
    where, symmetry = world(2, 2, 2), Symmetry(**{off: False})
    rust = check(where, backend="rust", symmetry=symmetry, max_depth=depth)
    assert counted(rust) == counted(check(where, symmetry=symmetry, max_depth=depth))


@pytest.mark.parametrize("backend", ["python", "rust"])
def test_two_workers_find_what_one_finds(backend: str) -> None:
    need_twin()
    where = engine(2, 2, 4, 4)
    assert counted(check(where, backend=backend, workers=2)) == counted(
        check(where, backend="rust")
    )


@cache
def explored(name: str) -> Report:
    """Return the twin's report on a world, for several tests."""
    return check(WORLDS[name] if name in WORLDS else PROFILES[name].world, backend="rust")


@pytest.mark.parametrize("name", ["engine", "host tier", "flight-hits"])
@pytest.mark.parametrize("workers", [1, 2])
def test_whole_names_count_as_many_states_as_fingerprints(name: str, workers: int) -> None:
    need_twin()
    where = WORLDS[name] if name in WORLDS else PROFILES[name].world
    short = explored(name)
    full = check(where, backend="rust", full_keys=True, workers=workers)
    assert counted(full) == counted(short)
    assert (short.keys, full.keys) == ("fingerprints of 128 bits", "full keys")
    assert full.memory_bytes > short.memory_bytes


def test_a_search_that_is_stopped_says_by_what() -> None:
    need_twin()
    found = check(engine(3, 2, 4, 4), backend="rust", max_depth=3)
    assert (found.verdict, found.depth) == ("bounded by depth", 3)
    found = check(engine(4, 2, 4, 4), backend="rust", max_states=5000)
    assert found.verdict == "bounded by states"
    assert 5000 <= found.num_states < 13413


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ((3, 2, 4, 4), (1917, 17751)),
        ((4, 2, 4, 4), (13413, 129040)),
        pytest.param((4, 2, 6, 5), (22972, 261907), marks=pytest.mark.slow),
        pytest.param((4, 3, 4, 3), (133103, 1377807), marks=pytest.mark.slow),
        pytest.param((5, 2, 6, 5), (196932, 2322760), marks=pytest.mark.slow),
        pytest.param((5, 3, 4, 3), (1142780, 11978538), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_world_of_an_engine_is_right_on_every_edge(
    sizes: tuple[int, ...], counts: tuple[int, int]
) -> None:
    need_twin()
    found = check(engine(*sizes), backend="rust", workers=2)
    assert (found.verdict, found.num_states, found.num_edges) == ("complete", *counts)
    if found.num_states > FEW_STATES:
        assert found.memory_bytes / found.num_states <= 100


@pytest.mark.parametrize("name", SLOW)
def test_the_first_states_of_a_slow_named_world_are_right(name: str) -> None:
    backend = language(name)
    if backend == "rust":
        need_twin()
    report = check(PROFILES[name].world, backend=backend, max_states=FIRST_STATES[backend])
    assert (report.verdict, report.violation) == ("bounded by states", None)


def test_what_the_twin_finds_is_told_as_steps_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong twin gives the names, arguments and options of each edge's calls."""
    need_twin()
    where, request = PROFILES["flight"].world, Request("0", [0])
    edges: list[tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...]] = [
        (("add_request", (request,), {}), ("allocate_slots", ("0", 1), {}), ("take_batch", (), {})),
        (("execute", (0,), {}),),
    ]
    found = {**_twin.check_world(where, max_depth=1), "violation": ("KV-READ", "wrong", edges)}
    monkeypatch.setattr(_twin, "check_world", lambda *_, **__: {**found, "verdict": "violation"})
    report = check(where, backend="rust")
    assert report.violation is not None
    names = [step.call.name for step in report.violation.steps]
    assert names == ["add_request", "allocate_slots", "take_batch", "execute"]
    assert report.violation.steps[1].outcome.value is not None
    assert "KV-READ" in render(report.violation, where, colour=False)
    assert "allocate_slots" in pytest_text(report.violation, where)
    found["violation"] = ("KV-READ", "wrong", [edges[0][:1], edges[0][1:2]])
    report = check(PROFILES["3x2x4"].world, backend="rust")
    assert report.violation is not None
    names = [step.call.name for step in report.violation.steps]
    assert names == ["add_request", "allocate_slots", "take_batch"]


@pytest.mark.parametrize("flying", [1, 0])
def test_encoders_in_flight_are_refused(flying: int) -> None:
    groups = (Group(2), Group(2, kind="cross_attention"))
    config = Config(4, groups=groups, null_block=False, enable_caching=False, max_in_flight=flying)
    where = World(
        config=config,
        num_requests=1,
        num_tokens=2,
        num_prompt=2,
        num_encoder=2,
        num_output_placeholders=1 - flying,
    )
    with pytest.raises(ValueError, match="encoders are not explored with batches in flight"):
        check(where)


def test_a_far_tier_is_explored_by_python_alone() -> None:
    with pytest.raises(ValueError, match="client of a far tier is Python's alone"):
        check(PROFILES["far"].world, backend="rust")


@pytest.mark.parametrize("kinds", [({}, {"block_hashes": ()}), ({"block_hashes": (b"a" * 32,)},)])
def test_a_prefix_has_one_hash_in_a_world(kinds: Any) -> None:
    """Names of states do not tell an engine's hash of a prefix from that of the core."""
    with pytest.raises(ValueError, match=r"block_hashes is \(\) in each"):
        world(2, 2, 2, kinds_of_requests=kinds)


def test_two_prefixes_have_two_hashes_in_a_world() -> None:
    own: dict[str, Any] = {"block_hashes": ()}
    with pytest.raises(ValueError, match="give 126 prefixes: there are hashes for 62"):
        world(2, 2, 6, num_letters=2, kinds_of_requests=(own,))
    with pytest.raises(ValueError, match="kinds_of_requests has extra keys"):
        world(2, 2, 2, kinds_of_requests=(own, {**own, "cache_salt": "s"}))
