# SPDX-License-Identifier: Apache-2.0
"""Bad input where hits may end inside blocks."""

from __future__ import annotations

from kvcore import Group, Hit, KVCacheBlocks, KVCacheManager
from kvcore.types.errors import NotPublished, StaleHits, UnalignedCheckpoint, WrongHit, WrongLoad
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, drop, make, serve, step

HIT = KVCacheBlocks(((1, 2),))


def cached(backend: Backend, num_blocks: int = 9) -> KVCacheManager:
    """Cache the first six tokens of "again" and "long" in blocks 1 and 2, of four tokens."""
    manager = make(backend, num_blocks, 4, hash_block_size=2)
    serve(manager, "first", range(7))
    step(manager)
    drop(manager, "first")
    add(manager, "again", [*range(6), 90])
    add(manager, "long", [*range(6), *range(90, 100)])
    return manager


def evicted(backend: Backend) -> KVCacheManager:
    """Withdraw the keys of block 2."""
    manager = cached(backend)
    manager.evict_blocks([2])
    return manager


def reused(backend: Backend) -> KVCacheManager:
    """Take block 2, of three, for other tokens, whose keys it has now."""
    manager = cached(backend, 4)
    serve(manager, "other", range(50, 58))
    step(manager)
    return manager


def hybrid(backend: Backend) -> KVCacheManager:
    """Cache six tokens of "again" and the state after them in block 3, whose key is withdrawn."""
    manager = make(backend, 12, groups=(Group(4), Group(4, kind="state")), hash_block_size=2)
    add(manager, "first", range(7))
    manager.allocate_slots("first", 6, checkpoint=True)
    step(manager)
    add(manager, "again", [*range(6), 90])
    manager.evict_blocks([3])
    return manager


BEGINS = "both must be multiples of 4"
ROWS: list[Row] = [
    *(
        bad(
            world,
            StaleHits(request="again", block=2, position=1),
            *("allocate_slots", "again", 1, Hit(HIT, 6)),
        )
        for world in (evicted, reused)
    ),
    bad(
        cached,
        StaleHits(request="again", block=1, position=1),
        *("allocate_slots", "again", 1, Hit(KVCacheBlocks(((1, 1),)), 6)),
    ),
    bad(
        hybrid,
        StaleHits(request="again", block=3, position=1),
        *("allocate_slots", "again", 1, Hit(KVCacheBlocks(((1, 2), (0, 3))), 6)),
    ),
    *(
        bad(
            cached,
            WrongHit(request="long", num_blocks=2, num_tokens=num_tokens),
            *("allocate_slots", "long", 1, Hit(HIT, num_tokens)),
        )
        for num_tokens in (4, 5, 7, 10)
    ),
    bad(
        cached,
        WrongLoad(request="long", num_tokens=4, reason=f"it begins at token 6, and {BEGINS}"),
        *("load", "long", 4, Hit(HIT, 6)),
    ),
    bad(
        cached,
        WrongLoad(request="long", num_tokens=6, reason=f"it begins at token 0, and {BEGINS}"),
        *("load", "long", 6),
    ),
    bad(cached, NotPublished(block=2), "store", [2]),
    bad(
        hybrid,
        UnalignedCheckpoint(request="again", num_tokens=7, requested=3, multiple=2),
        *("allocate_slots", "again", 3),
        checkpoint=True,
    ),
]
