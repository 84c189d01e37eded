# SPDX-License-Identifier: Apache-2.0
"""`Appended.grown`: the places of tables that an `append` sets, without the batch's commands."""

from __future__ import annotations

from array import array

from kvcore import Config, Group, KVCacheManager
from kvcore.types.values import Appended
from tests.conftest import Backend
from tests.helpers.stories import make, serve, step


def rows(appended: Appended) -> list[tuple[int, ...]]:
    """Return the rows of the columns, which are int32."""
    assert {each.format for each in appended.grown} == {"i"}
    return list(zip(*(each.tolist() for each in appended.grown), strict=True))


def test_new_blocks_and_copies_are_told_by_the_place_in_the_list(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1, 2, 3])
    serve(manager, "b", [5])
    step(manager)
    manager.fork("b", "c")
    step(manager)
    appended = manager.append(["c", "a", "b"], [8, 9, 7])
    assert rows(appended) == [(0, 0, 0, 4), (1, 0, 2, 5)]
    assert appended == Appended(3)
    assert hash(appended) == hash(Appended(3))
    assert (appended != Appended(3), appended != Appended(2)) == (False, True)
    step(manager)
    assert rows(manager.append(array("i", [1]), [6])) == [(0, 0, 1, 6)]  # row 1 is that of b


def test_a_trim_is_block_0_and_a_refused_request_tells_its_own(backend: Backend) -> None:
    groups = (Group(1), Group(1, kind="sliding_window", window=2))
    manager = KVCacheManager(Config(8, groups=groups, hash_seed=b""), backend)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    trims = [(0, 1, 0, 0), (0, 1, 1, 0)]
    assert rows(manager.append(["a"], [3])) == [*trims, (0, 0, 3, 7), (0, 1, 3, 5)]
    step(manager)
    assert rows(manager.append(["a"], [4])) == [(0, 1, 2, 0), (0, 0, 4, 4), (0, 1, 4, 6)]
    step(manager)
    appended = manager.append(["a"], [5])
    assert appended.refused is not None
    assert rows(appended) == [(0, 1, 3, 0)]


def test_what_was_told_stays_when_the_batch_is_taken(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0, 1])
    step(manager)
    first = manager.append(["a"])
    assert rows(first) == rows(first) == [(0, 0, 1, 2)]
    step(manager)
    assert rows(manager.append(["a"])) == []
    assert rows(first) == [(0, 0, 1, 2)]
