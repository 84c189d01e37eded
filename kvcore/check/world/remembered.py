# SPDX-License-Identifier: Apache-2.0
"""An eviction policy's memory, in the smallest numbers that the policy distinguishes.

Times only rise, so without this no state would be met twice. `LRU2` and `S3FIFO` compare times, and
count uses up to a limit: replacing times by ranks changes no answer, nor does leaving out what they
do not read. `Learned` keeps counting, so its worlds are explored up to a depth. Twin:
rust/src/check/world/remembered.rs.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from immutables import Map
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.pool.block_pool import BlockPool
from kvcore.types.policy import Place, Uses

USES_KEPT = {"lru2": 1, "s3fifo": 3}
"""The uses that a policy tells apart: it treats all larger numbers alike."""


def forget_times(pool: BlockPool, number: int) -> tuple[BlockPool, int]:
    """Return the pool with ranks in the place of times, up to this number of the open batch, and
    the least number that the batch can have then: at least 1, since requests of later batches name
    batch 0 where they await none, and a state that is restored must be one that calls reach.
    """
    policy = pool.policy
    if policy is None or pool.eviction not in USES_KEPT:
        return pool, number if policy is not None and policy.is_remembered else 1
    free, read = set(pool.queue), _reader(str(pool.eviction))
    uses = {block: read(each, block in free) for block, each in policy.uses.items()}
    ghosts = [
        (key, replace(read(policy.ghosts[key], False), before=0))
        for _, key in sorted(policy.left.items())
    ]
    times = {0, *(order for _, order in policy.places)}
    for each in (*uses.values(), *(known for _, known in ghosts)):
        times |= {each.last, each.before, (each.place or (0, 0))[1]}
    ranks = {time: rank for rank, time in enumerate(sorted(times))}

    def at(place: Place) -> Place:
        return place[0], ranks[place[1]]

    def ranked(each: Uses, number: int = 0) -> Uses:
        last, before = ranks[each.last], ranks[each.before]
        place = None if each.place is None else at(each.place)
        return replace(each, last=last, before=before, place=place, number=number)

    small = attrs.evolve(
        policy,
        places=pvector([at(place) for place in policy.places]),
        tails=tuple((at(place), block) for place, block in policy.tails),
        uses=Map({block: ranked(each) for block, each in uses.items()}),
        ghosts=Map({key: ranked(each, number) for number, (key, each) in enumerate(ghosts)}),
        left=Map({number: key for number, (key, _) in enumerate(ghosts)}),
        next_number=len(ghosts),
    )
    return attrs.evolve(pool, policy=small), max(len(ranks) - 1, 1)


def _reader(name: str) -> Callable[[Uses, bool], Uses]:
    """Return a function that extracts the part of uses that a policy reads, given whether the block
    is free: `LRU2` orders by times alone, `S3FIFO` never looks at the use before the last.
    """
    most = USES_KEPT[name]

    def of_lru2(each: Uses, is_free: bool) -> Uses:
        return replace(each, uses=most, depth=0, place=each.place if is_free else None)

    def of_s3fifo(each: Uses, is_free: bool) -> Uses:
        del is_free
        return replace(each, uses=min(each.uses, most), depth=0, before=0)

    return of_lru2 if name == "lru2" else of_s3fifo
