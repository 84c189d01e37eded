# SPDX-License-Identifier: Apache-2.0
"""Tail keys that move or go, and what giving them costs: blocks with keys at each multiple of two.

The expected values follow from docs/engines.md, "Hits inside blocks". Tokens are numbers from 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import Group
from kvcore.state.state import RequestState
from kvcore.types.errors import NothingToPin
from tests.conftest import Backend
from tests.core.transitions.test_tails import PROMPT, hit, tailed, tails
from tests.helpers.stories import add, blocks, keyed, owners, serve, step


def test_the_tail_keys_of_a_merged_block_move_to_the_older_one(backend: Backend) -> None:
    manager = tailed(backend, duplicates="merge")
    add(manager, "a", range(4))
    manager.allocate_slots("a", 2)
    step(manager)
    assert tails(manager, 1) == 1
    add(manager, "b", range(4))
    manager.allocate_slots("b", 4)  # without its hit
    step(manager)
    assert (keyed(manager), tails(manager, 2)) == ([2], 0)
    manager.allocate_slots("a", 2)
    step(manager)
    assert (blocks(manager, "a"), owners(manager, 1)) == ([2], 0)
    assert (tails(manager, 1), tails(manager, 2)) == (0, 1)
    assert hit(manager, [0, 1, 90]) == 2


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_failed_load_leaves_the_parts_before_its_first_lost_token(
    backend: Backend, in_flight: int
) -> None:
    manager = tailed(backend, groups=(Group(8),), max_in_flight=in_flight)
    add(manager, "a", range(9))
    manager.allocate_slots("a", 3)
    step(manager)
    if in_flight:
        manager.complete(0)
    manager.allocate_slots("a", 1, num_external_computed_tokens=5)  # the tokens 3 to 7
    step(manager)
    assert (keyed(manager), tails(manager, 1)) == ([1], 3)
    manager.rewind(["a"], 6)
    assert (keyed(manager), tails(manager, 1), hit(manager, list(range(8)))) == ([], 3, 6)
    manager.rewind(["a"], 5)
    assert (tails(manager, 1), hit(manager, list(range(8)))) == (2, 4)
    manager.rewind(["a"], 3)
    assert (tails(manager, 1), hit(manager, list(range(8)))) == (1, 2)


def test_nothing_to_pin_names_parts_of_blocks(backend: Backend) -> None:
    manager = tailed(backend)
    serve(manager, "a", PROMPT)
    with pytest.raises(NothingToPin, match="no part of a block of them is found"):
        manager.pin_prefix("system", "a", 6)


def test_keys_of_parts_are_made_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, int] = {}
    key_at = RequestState.key_at

    def counted(*args: Any) -> bytes:
        made[size] += 1
        return key_at(*args)

    monkeypatch.setattr(RequestState, "key_at", counted)
    for size in (16, 64, 256):
        manager = tailed("python", groups=(Group(size),), num_blocks=66)
        add(manager, "a", range(1024))
        made[size] = 0
        manager.allocate_slots("a", 900)
        manager.take_batch()
        for _ in range(50):
            manager.allocate_slots("a", 2)
            manager.take_batch()
        # 1,000 tokens have 500 ends; each small call asks for one key before its own.
        assert made[size] <= 700


def test_a_block_with_parts_alone_is_asked_for_by_its_longest_one(backend: Backend) -> None:
    manager = tailed(backend, groups=(Group(8),))
    serve(manager, "a", PROMPT)
    assert manager.get_block_key(1) is None
    step(manager)
    key, tails = manager.get_block_key(1), manager.state().device.tails
    assert key is not None
    assert tails is not None
    assert key == tails.keys(1)[-1]
    assert manager.get_cached_block(key) == 1
    assert (hit(manager, PROMPT), manager.has_key(1)) == (6, True)
