# SPDX-License-Identifier: Apache-2.0
"""What batches to come overwrite before anything reads it counts as unknown: no bug is lost by it.

A world with `forgets_overwritten` has fewer states than the same world without it, shows the same,
and finds the same seeded bugs by the same properties, after as many calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from kvcore import Config, Group
from kvcore.check.mutants import MUTANTS, Mutant
from kvcore.check.mutants.hunt import hunt
from kvcore.check.names import forgotten
from kvcore.check.names.canonical import canonical
from kvcore.check.names.forgotten import forget_overwritten, forget_texts
from kvcore.check.names.in_flight import Node, Pending, name_of
from kvcore.check.profiles.ahead import FLYING
from kvcore.check.profiles.profile import world
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search.ahead_model import AheadModel
from kvcore.check.search.report import Report
from kvcore.check.search.search import check
from kvcore.check.world.ghost import Ghost
from kvcore.check.world.world import World
from kvcore.oracle.content_oracle import FORGOTTEN, FORGOTTEN_REST, Pass
from kvcore.oracle.contents import TierBlock
from kvcore.state.state import make_state
from kvcore.types.commands import Allocate, Command, CopyOnWrite, CutTable, SetTable
from kvcore.types.errors import InvariantViolation
from tests.conftest import need_twin

CONFIG = Config(5, groups=(Group(1),), null_block=False, hash_seed=b"s", max_in_flight=2)
Edges = dict[bytes, set[tuple[str, bytes]]]
"""The edges of each node: the move, and the name of the node that it leads to."""
HELD: dict[TierBlock, tuple[Any, ...]] = {("device", block): ((7, 0),) for block in (1, 2)}


def node(*batches: Pending, table: tuple[int, ...] = (1, 2)) -> Node:
    """Return a node whose worker has this table for row 0, and contents in blocks 1 and 2."""
    state = make_state(CONFIG)
    return Node(state, pending=batches, contents=dict(HELD), tables={(0, 0): table})


def batch(*commands: Command, reads: bool = False, used: tuple[int, ...] = ()) -> Pending:
    """Return a batch that waits. reads: whether its forward pass is for row 0."""
    writes: Any = (SimpleNamespace(request_id="a"),) if reads else ()
    requests: Any = {"a": SimpleNamespace(row=0)}
    places: frozenset[TierBlock] = frozenset(("device", block) for block in used)
    return Pending(1, commands, writes, requests, used=places, before={})


def table_of(made: Node) -> tuple[int, ...]:
    """Return the worker's table for row 0."""
    return forget_overwritten(made).tables[0, 0]


def test_an_entry_that_is_set_first_is_unknown() -> None:
    assert table_of(node(batch(SetTable(0, 0, 1, 4)))) == (1, FORGOTTEN)


def test_entries_that_are_cut_first_are_unknown_and_so_is_their_number() -> None:
    cut = batch(CutTable(0, 0, 1), SetTable(0, 0, 1, 4))
    assert table_of(node(cut)) == table_of(node(cut, table=(1, 2, 3))) == (1, FORGOTTEN_REST)


def test_an_entry_that_a_pass_reads_first_stays() -> None:
    assert table_of(node(batch(reads=True), batch(CutTable(0, 0, 0)))) == (1, 2)
    assert table_of(node(batch(CutTable(0, 0, 0), reads=True))) == (FORGOTTEN_REST,)


def test_a_block_that_is_handed_out_or_copied_to_before_it_is_read_is_unknown() -> None:
    kept = forget_overwritten(node(batch(Allocate(1), CopyOnWrite(1, 2), used=(1, 2)))).contents
    assert kept == {}
    kept = forget_overwritten(node(batch(CopyOnWrite(1, 2), Allocate(1), used=(1, 2)))).contents
    assert kept == {("device", 1): ((7, 0),)}
    kept = forget_overwritten(node(batch(used=(1, 2)), batch(Allocate(1)))).contents
    assert kept == HELD


@pytest.mark.parametrize("table", [(FORGOTTEN,), (FORGOTTEN_REST,)], ids=["entry", "rest"])
def test_what_is_unknown_is_never_what_a_pass_reads(table: tuple[int, ...]) -> None:
    ghost = Ghost(CONFIG)
    ghost.tables = {(0, 0): table}
    with pytest.raises(InvariantViolation, match="KV-READ"):
        ghost.forward([Pass(request_id="a", row=0, start=0, end=1, nodes=(7,))])
    ghost.apply([SetTable(0, 0, 0, 1)])
    assert ghost.tables[0, 0] == ((1,) if table == (FORGOTTEN,) else (FORGOTTEN_REST,))


def forgetting(where: World) -> World:
    """Return the world in which nodes forget what is overwritten."""
    return attrs.evolve(where, forgets_overwritten=True)


def shown(report: Report) -> set[tuple[str, str]]:
    """Return the kinds of things that happened."""
    return {what for what, count in report.notes.items() if count}


FOLDED = {
    "ahead-leave": (399, 1_217),
    "ahead-groups": (411, 1_301),
    "ahead-drafts": (1_749, 5_346),
    "ahead-loads": (1_592, 6_077),
    "ahead-window": (4_561, 13_599),
    "flight-swap": (2_735, 9_945),
    "flight-window": (1_456, 4_114),
}
"""The states and edges of named worlds that forget."""


@pytest.mark.parametrize("name", FOLDED)
def test_a_world_that_forgets_shows_the_same_in_fewer_states(name: str) -> None:
    need_twin()
    profile = PROFILES[name]
    report = check(forgetting(profile.world), backend="rust")
    assert report.verdict == "complete"
    assert (report.num_states, report.num_edges) == FOLDED[name]
    assert report.num_states < profile.num_states
    assert shown(report) == shown(check(profile.world, backend="rust"))


@pytest.mark.parametrize("name", FOLDED)
def test_both_languages_forget_the_same(name: str) -> None:
    need_twin()
    where = forgetting(PROFILES[name].world)
    depth = None if name == "ahead-leave" else 8
    reports = [check(where, backend=backend, max_depth=depth) for backend in ("python", "rust")]
    assert reports[0].depths == reports[1].depths
    assert reports[0].num_edges == reports[1].num_edges


class Unfolded(AheadModel):
    """A world whose nodes forget, but have the names of worlds that do not."""

    def name(self, node: Any) -> bytes:
        """Return the whole name of a node."""
        return canonical(node.state, self.prefixes, self.symmetry, partial(name_of, node))

    def core_name(self, node: Any) -> bytes:
        """Return the name of a node's state alone."""
        return canonical(node.state, self.prefixes, self.symmetry)


def test_nodes_of_one_folded_name_lead_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What folds is exact: it joins no nodes that the coarsest partition parts which tells the
    core's states apart, and nodes whose edges lead to different classes.
    """
    where = forgetting(world(2, 1, 2, 1, "truncate", "cancel", **{**FLYING, "max_in_flight": 2}))
    monkeypatch.setattr(forgotten, "forget_texts", lambda node: node)
    model = Unfolded(where)
    nodes, edges = explored(model)
    monkeypatch.undo()
    folded = AheadModel(where, full_keys=True)
    folded.prefixes = model.prefixes
    kinds = {name: model.core_name(node) for name, node in nodes.items()}
    classes = coarsest(kinds, edges)
    joined: dict[bytes, set[int]] = {}
    for name, node in nodes.items():
        joined.setdefault(folded.name(forget_texts(node)), set()).add(classes[name])
    assert len(joined) < len(nodes)
    assert all(len(each) == 1 for each in joined.values())


def explored(model: AheadModel) -> tuple[dict[bytes, Any], Edges]:
    """Return all nodes of a model by their names, and where their edges lead."""
    nodes: dict[bytes, Any] = {model.name(model.start()): model.start()}
    edges: Edges = {}
    while waiting := [name for name in nodes if name not in edges]:
        for name in waiting:
            found = model.edges(nodes[name])
            reached = [(each.name, model.name(each.node), each.node) for each in found]
            edges[name] = {(move, key) for move, key, _ in reached}
            for _, key, node in reached:
                nodes.setdefault(key, node)
    return nodes, edges


def coarsest(kinds: Mapping[bytes, Any], edges: Edges) -> dict[bytes, int]:
    """Return the classes of the coarsest partition that parts kinds of nodes, and nodes with edges
    to different classes.
    """
    classes, num_classes = dict(kinds), 0
    while len(set(classes.values())) > num_classes:
        num_classes = len(set(classes.values()))
        found = {
            name: (kind, frozenset((move, classes[key]) for move, key in edges[name]))
            for name, kind in classes.items()
        }
        numbers = {each: number for number, each in enumerate(dict.fromkeys(found.values()))}
        classes = {name: numbers[each] for name, each in found.items()}
    return classes


def flies(mutant: Mutant) -> bool:
    """Return whether a seeded bug shows in a world with batches in flight."""
    where = mutant.world
    return where.far is None and where.config.max_in_flight + where.num_output_placeholders > 0


def is_ahead(mutant: Mutant) -> bool:
    """Return whether the bug is one of engines that run ahead of their tokens."""
    return mutant.world.num_output_placeholders > 0


BUGS = [
    pytest.param(each, name, marks=[] if is_ahead(each) else [pytest.mark.slow])
    for each in MUTANTS
    if flies(each)
    for name in each.broken
    if name != "REFINE"
]


@pytest.mark.parametrize(("mutant", "name"), BUGS, ids=str)
def test_a_seeded_bug_is_found_as_soon_as_without(mutant: Mutant, name: str) -> None:
    kills = [hunt(mutant, where, {name}) for where in (mutant.world, forgetting(mutant.world))]
    assert [kill.found for kill in kills] == [name, name]
    assert len(kills[0].calls) == len(kills[1].calls)
