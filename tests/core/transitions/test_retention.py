# SPDX-License-Identifier: Apache-2.0
"""Levels: what leaves first, when levels end, and what is refused where a wish is made."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore import (
    KVCacheManager,
    KvCacheRetentionConfig,
    Request,
    TokenRangeRetentionConfig,
)
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.types.errors import InvalidRetention, WrongArgument
from kvcore.types.values import Refused
from tests.conftest import Backend
from tests.helpers.stories import admit, drop, make


def keep(*ranges: tuple[Any, ...], **options: Any) -> KvCacheRetentionConfig:
    return KvCacheRetentionConfig([TokenRangeRetentionConfig(*each) for each in ranges], **options)


def serve(manager: KVCacheManager, name: str, tokens: list[int], wish: Any = None) -> None:
    """Compute a request and let it go."""
    manager.add_request(Request(name, tokens, retention=wish))
    admit(manager, name)
    manager.take_batch()
    drop(manager, name)
    manager.take_batch()


def queue(manager: KVCacheManager) -> list[int]:
    return list(manager.state().device.queue)


def test_a_level_holds_for_its_time_and_no_longer(backend: Backend) -> None:
    manager = make(backend, num_blocks=4, block_size=1, eviction="retention")
    serve(manager, "a", [7, 8], keep((1, 2, 80, 10_000)))
    serve(manager, "b", [9])
    assert queue(manager) == [3, 2, 1]
    manager.tick(9_999)
    serve(manager, "c", [9])
    assert queue(manager) == [3, 2, 1]
    manager.tick(10_000)
    serve(manager, "d", [9])
    assert queue(manager) == [2, 1, 3]


def test_an_extended_request_stays_longer_than_others(backend: Backend) -> None:
    manager = make(backend, num_blocks=4, block_size=1, eviction="retention")
    manager.add_request(Request("a", [7]))
    admit(manager, "a")
    manager.take_batch()
    more = keep((0, None, 90, 60_000), decode_retention_priority=0)
    manager.extend_retention("a", more)
    manager.free("a")
    manager.take_batch()
    serve(manager, "b", [8])
    serve(manager, "c", [9, 10])
    hits = [manager.add_request(Request(name, [token, 0])) for name, token in (("d", 7), ("e", 8))]
    assert len(hits) == 2
    found = [manager.get_computed_blocks(name).num_tokens for name in ("d", "e")]
    assert found == [1, 0]


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 4, 101)],
        [(0, 4, -1)],
        [(2, 2, 50)],
        [(3, 2, 50)],
        [(0, 4, 50, 0)],
        [(0, 4, 50, 2**40 + 1)],
        [(0, 4, 50), (3, 6, 50)],
        [(4, None, 50), (6, 8, 50)],
        [(0, 4, "high")],
    ],
)
def test_a_wish_that_cannot_be_is_refused(ranges: list[tuple[Any, ...]]) -> None:
    with pytest.raises(InvalidRetention):
        keep(*ranges)


def test_another_kind_of_wish_is_refused_before_anything_changes(backend: Backend) -> None:
    manager = make(backend, eviction="retention")
    before = manager.encode()
    wrong: Any = 80
    with pytest.raises(WrongArgument):
        manager.add_request(Request("a", [7], retention=wrong))
    with pytest.raises(WrongArgument):
        manager.extend_retention("a", wrong)
    assert manager.encode() == before


def steps(seed: int, managers: list[KVCacheManager]) -> None:
    """Make the same random calls on each; each must give the same, and the same bytes."""
    chance, now = random.Random(seed), 0
    for number in range(60):
        name, tokens = f"r{number}", [chance.randrange(2) for _ in range(chance.randint(1, 6))]
        wish = keep(
            (chance.randrange(2), None, chance.choice([10, 50, 90]), chance.choice([None, 5, 20])),
            decode_retention_priority=chance.choice([0, 35]),
        )
        now += chance.choice([0, 0, 4])
        given = []
        for manager in managers:
            manager.tick(now)
            manager.add_request(Request(name, tokens, retention=wish))
            hit = manager.get_computed_blocks(name)
            got = manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
            manager.take_batch()
            if number % 3 or isinstance(got, Refused):
                drop(manager, name)
            elif number > 5 and f"r{number - 6}" in manager.state().requests:
                drop(manager, f"r{number - 6}")
            manager.take_batch()
            manager.check()
            data = manager.encode()
            assert encode(decode(data)) == data
            given.append((got, data))
        assert all(each == given[0] for each in given)


@pytest.mark.parametrize("seed", range(5))
def test_both_languages_keep_the_same(seed: int) -> None:
    both: list[Backend] = ["python", "rust"]
    steps(seed, [make(each, 12, 1, eviction="retention") for each in both])


@pytest.mark.parametrize("seed", range(5))
def test_levels_admit_what_lru_admits(backend: Backend, seed: int) -> None:
    chance = random.Random(seed)
    levels = make(backend, 9, 1, eviction="retention")
    lru = make(backend, 9, 1)
    for number in range(40):
        tokens = [number * 10 + place for place in range(chance.randint(1, 5))]
        wish = keep((0, None, chance.choice([0, 99])))
        verdicts = []
        for manager in (levels, lru):
            manager.add_request(Request(f"r{number}", tokens, retention=wish))
            verdicts.append(manager.allocate_slots(f"r{number}", len(tokens)))
            manager.take_batch()
        assert isinstance(verdicts[0], Refused) == isinstance(verdicts[1], Refused)
        if number % 2:
            for manager in (levels, lru):
                drop(manager, f"r{number}")
