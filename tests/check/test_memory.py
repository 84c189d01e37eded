# SPDX-License-Identifier: Apache-2.0
"""The memory of a search for each state: names in rows of bytes, links, compressed waiting
states.

Bytes are those that objects say of themselves, so they are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import attrs
import pytest

from kvcore import State
from kvcore.check import Property, check
from kvcore.check.names.fingerprints import FEW_ROWS, LONG_ROW, SIZE, Fingerprints
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.search import search
from kvcore.check.search.core_model import CoreModel
from kvcore.check.search.frontier import Squeezer

ONE_MOVE = {
    name: attrs.evolve(PROFILES[name].world, moves_per_batch=1) for name in ("3x2x4", "4x2x4")
}
"""Worlds that Python explores in seconds."""
AIM = 300
"""Bytes a state; an object of 16 bytes in a set would take a third of them."""


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_search_keeps_few_bytes_of_each_state(workers: int) -> None:
    report = check(PROFILES["uncached"].world, workers=workers)
    assert report.verdict == "complete"
    least = report.num_states * (SIZE + 2 * 4)
    assert least < report.memory_bytes < report.num_states * AIM


@pytest.mark.parametrize(("name", "most"), [("4x3x4", 400), ("flight-fork", 1000)])
def test_a_search_that_is_cut_off_counts_the_states_that_wait(name: str, most: int) -> None:
    report = check(PROFILES[name].world, max_states=most)
    assert report.verdict == "bounded by states"
    assert report.memory_bytes / report.num_states < AIM


def nobody_fills_the_cache(state: State) -> Iterator[str]:
    """Report a violation once two requests of four tokens have come and gone."""
    keys = {key for key in state.device.keys if key is not None}
    if not state.requests and len(keys) == 4:
        yield "four keys are left"


ROOM = Property(
    name="ROOM",
    sentence="who leaves has filled no cache",
    scope="state",
    severity="quality",
    holds=nobody_fills_the_cache,
)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_violation_among_squeezed_states_is_told_from_the_start(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "FEW", search.ALIKE)
    report = check(ONE_MOVE["4x2x4"], properties=[ROOM], workers=workers)
    assert max(report.depths[:-1]) >= search.FEW
    assert report.violation is not None
    names = [call.name for call in report.violation.calls]
    assert sorted(names) == sorted(2 * ["add_request", "allocate_slots", "free", "remove_request"])


def test_names_are_found_as_in_a_set_however_many_there_are() -> None:
    random, plain, names = Random(1), set[bytes](), Fingerprints()
    for _ in range(3 * FEW_ROWS * LONG_ROW):
        name = random.randbytes(SIZE)
        assert name not in names
        assert names.add(name)
        plain.add(name)
        again = random.choice([name, random.randbytes(SIZE)])
        assert (again in names) == (again in plain)
    assert not any(names.add(name) for name in plain)
    assert len(names) == len(plain)
    assert names.num_bytes / len(names) < 1.5 * SIZE


def test_a_name_is_not_found_across_two_others() -> None:
    first, second = bytes(range(SIZE)), bytes(range(100, 100 + SIZE))
    names = Fingerprints()
    for name in (first, second):
        for row in range(100_000):  # all of them in one row, whatever its number
            if names.add(name[:-3] + row.to_bytes(3, "big")) and len(names) >= 2 * LONG_ROW:
                break
    known = [bytes(row[at : at + SIZE]) for row in names._rows for at in range(0, len(row), SIZE)]
    across = [one[3:] + other[:3] for one, other in pairwise(known)]
    assert [name for name in across if name in names] == []


def test_names_of_other_lengths_are_kept_apart() -> None:
    names = Fingerprints()
    assert names.add(b"short")
    assert names.add(bytes(40))
    assert not names.add(b"short")
    assert (len(names), bytes(40) in names, bytes(16) in names) == (2, True, False)
    assert names.num_bytes > 45


def test_squeezed_states_are_small_and_come_back() -> None:
    model = CoreModel(ONE_MOVE["3x2x4"])
    start = model.start()
    nodes = [model.pack(edge.node) for edge in model.edges(start)]
    nodes += [model.pack(edge.node) for node in nodes for edge in model.edges(model.unpack(node))]
    squeezer = Squeezer()
    assert [squeezer.squeeze(each) for each in nodes] == nodes
    squeezed = squeezer.learn(nodes)
    assert [squeezer.open(each) for each in squeezed] == nodes
    assert sum(map(len, squeezed)) * 3 < sum(map(len, nodes))


def test_nodes_that_are_no_bytes_stay_as_they_are() -> None:
    squeezer, nodes = Squeezer(), [object(), object()]
    assert squeezer.learn(nodes) == nodes
    assert squeezer.open(squeezer.squeeze(nodes[0])) is nodes[0]
