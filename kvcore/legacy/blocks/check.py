# SPDX-License-Identifier: Apache-2.0
"""Named properties of a facade's blocks: the properties of pools in `kvcore.invariants`.

PRIORITY-ORDER is defined here. Owners are compared with the blocks that the facade reports as
held; if it reports none, REF is called LEAK.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from kvcore.invariants import pool_and_state
from kvcore.legacy.blocks.tiers import Tiers
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.priority_eviction import NO_PRIORITY
from kvcore.types.errors import InvariantViolation


def check_tiers(
    tiers: Tiers,
    held: Iterable[int] | None = None,
    held_on_host: Iterable[int] | None = None,
) -> None:
    """Raise InvariantViolation for the first property that does not hold.

    held, held_on_host: each block once per holder; None: not compared.
    """
    for name, holds in PROPERTIES.items():
        for detail in holds(tiers):
            raise InvariantViolation(name, detail)
    for tier, blocks in (("device", held), ("host", held_on_host)):
        pool = tiers.device if tier == "device" else tiers.host
        if blocks is not None and pool is not None:
            for name, detail in unowned(tier, pool, Counter(blocks)):
                raise InvariantViolation(name, detail)


def unowned(tier: str, pool: BlockPool, held: Counter[int]) -> Iterator[tuple[str, str]]:
    """Yield violations of REF (owners equal holders) or LEAK (without holders, all is free)."""
    for block, count in enumerate(pool.ref_counts):
        if count != held[block]:
            name = "REF" if held else "LEAK"
            yield name, f"{tier} block {block} counts {count} owners, {held[block]} hold it"


def priority_order(tiers: Tiers) -> Iterator[str]:
    """Yield violations of PRIORITY-ORDER: keyless blocks leave first, then the rest by priority."""
    for tier, pool in pool_and_state.pools(tiers):
        if pool.eviction != "priority":
            continue
        places = [_place(pool, block) for block in pool.queue]
        for before, after in pairwise(places):
            if before > after and after[0]:
                yield f"{tier} block {before[-1]} is free before block {after[-1]}"
            elif before[0] and not after[0]:
                yield f"{tier} block {after[-1]} has no key and is free behind {before[-1]}"


def _place(pool: BlockPool, block: int) -> tuple[bool, float, int, int]:
    time, length = pool.priorities.get(block, NO_PRIORITY)
    return (pool.keys[block] is not None, time, -length, block)


PROPERTIES: dict[str, Callable[[Tiers], Iterator[str]]] = {
    "PARTITION": pool_and_state.partition,
    "FQ-UNIQ": pool_and_state.queue_unique,
    "NULL": pool_and_state.null_block,
    "IDX-SOUND": pool_and_state.index_sound,
    "IDX-COMPLETE": pool_and_state.index_complete,
    "PRIORITY-ORDER": priority_order,
}
