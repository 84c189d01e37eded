# SPDX-License-Identifier: Apache-2.0
"""Counts and block ids of other types than int: what converts to an int is accepted as one.

This holds in both languages. Engines hand in items of their arrays, none of which may get into the
state unconverted.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvcore import Config, Hit, KVCacheBlocks, KVCacheManager
from kvcore.errors import InvalidCount
from tests.conftest import Backend
from tests.helpers.stories import add, make, serve, step


@attrs.frozen
class Number:
    """Not an int, but converts to one."""

    value: int

    def __index__(self) -> int:
        return self.value


def play(manager: KVCacheManager, number: Any) -> bytes:
    """Play a story whose counts and block ids are made by `number`; return its last state."""
    serve(manager, "a", [0, 1, 2, 3, 4])
    add(manager, "b", [0, 1, 2, 3, 5, 6])
    step(manager)
    hit = Hit(KVCacheBlocks(((number(1), number(2)),)), number(4))
    options = {
        "num_external_computed_tokens": number(1),
        "num_lookahead_tokens": number(2),
        "delay_cache_blocks": True,
    }
    assert manager.can_allocate("b", number(1), hit, **options).value == "ok"
    manager.allocate_slots("b", number(1), hit, **options)
    manager.cache_blocks("b", number(6))
    step(manager)
    manager.pin([number(1), number(2)])
    manager.unpin([number(2)])
    manager.evict_blocks([number(3), number(2)])
    manager.truncate("a", number(3))
    manager.check()
    return manager.encode()


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "int64", "uint64"])
def test_numbers_of_numpy_are_numbers(kind: str, backend: Backend) -> None:
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    assert play(make(backend), getattr(np, kind)) == play(make("python"), int)


def test_what_stands_for_an_int_is_one(backend: Backend) -> None:
    assert play(make(backend), Number) == play(make("python"), int)


def test_a_bool_counts_as_the_int_that_it_is(backend: Backend) -> None:
    managers = [make(backend), make(backend)]
    for manager, one in zip(managers, (True, 1), strict=True):
        serve(manager, "a", [0, 1])
        manager.pin([one])
        manager.truncate("a", one)
    assert managers[0].encode() == managers[1].encode()


def test_a_config_reads_counts_as_a_manager_does() -> None:
    config: Any = Config(9, 4, max_in_flight=1)
    assert (config.max_rows(Number(2)), config.blocks_for(Number(9))) == (6, 3)
    for call, name in ((config.max_rows, "num_requests"), (config.blocks_for, "num_tokens")):
        for wrong in (-1, "9", 9.0):
            with pytest.raises(InvalidCount, match=f"{name} is {wrong!r}, must be an integer"):
                call(wrong)
