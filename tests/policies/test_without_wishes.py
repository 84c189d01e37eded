# SPDX-License-Identifier: Apache-2.0
"""Without wishes, `retention` is `uncached_first` call by call, in its block ids and commands too.

The calls take no key of a free block otherwise than by taking the block: that is where the two
differ.
"""

from __future__ import annotations

import random

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.types.config import Eviction
from tests.conftest import Backend


def answers(backend: Backend, eviction: Eviction, seed: int) -> list[object]:
    """Return the answers that a random engine gets: hits, blocks, and the bytes of each batch."""
    dice = random.Random(seed)
    config = Config(
        dice.choice([9, 14]),
        2,
        eviction=eviction,
        max_in_flight=dice.choice([0, 2]),
        hash_seed=b"seed",
    )
    manager = KVCacheManager(config, backend=backend)
    received: list[object] = []
    running: list[str] = []
    for number in range(120):
        name = f"r{number}"
        manager.add_request(Request(name, [dice.randrange(2) for _ in range(dice.randrange(1, 9))]))
        hit = manager.get_computed_blocks(name)
        done = manager.allocate_slots(name, manager.num_tokens(name) - hit.num_tokens, hit)
        received += [hit.num_tokens, bool(done)]
        if done:
            running.append(name)
            received.append(manager.get_block_ids(name))
        batch = manager.take_batch()
        received += [bytes(batch.buffer), batch.keys]
        if config.max_in_flight:
            manager.complete(batch.number)
        for each in [each for each in running if dice.random() < 0.5]:
            received.append(manager.append([each], [dice.randrange(2)]).done)
        batch = manager.take_batch()
        received += [bytes(batch.buffer), batch.keys]
        if config.max_in_flight:
            manager.complete(batch.number)
        for each in [each for each in running if dice.random() < 0.4]:
            manager.free(each)
            running.remove(each)
    return received


@pytest.mark.parametrize("seed", range(8))
def test_levels_without_wishes_order_blocks_as_uncached_first(backend: Backend, seed: int) -> None:
    with_levels = answers(backend, "retention", seed)
    assert with_levels == answers(backend, "uncached_first", seed)
    assert with_levels != answers(backend, "lru", seed)
