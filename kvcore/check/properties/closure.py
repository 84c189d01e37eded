# SPDX-License-Identifier: Apache-2.0
"""Properties of the cache after evictions: a block that can be hit has its parents.

No transition calls anything here. A hit is a run of blocks from the first token on, so a cached
block whose parent is gone costs memory and is never found. The properties hold after each call, for
groups with full attention, on runs without `BREAKS_CLOSURE`: calls that evict, pin, or write in
place over keyed blocks. Forks beside hashes of the engine's own are such calls, too: a child has
none at first. A parent whose key waits for the open batch, since another block still had it when
the parent was filled, counts as cached: the batch gives it the key, or moves the table to the other
block.

Source: rows 52, 53 of kvcore/check/mutants/catalogue.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvcore.oracle.contents import group_of
from kvcore.oracle.prefixes import Letter, Prefixes
from kvcore.pool.retention_state import NOTHING
from kvcore.state.state import State

ClosureCheck = Callable[[State, Prefixes], Iterator[str]]
Chain = tuple[Letter, ...]
Found = dict[Chain, list[int]]

BREAKS_CLOSURE = frozenset({"evict_blocks", "pin", "truncate", "rewind", "load", "store"})
"""Calls behind which a child may be cached without its parent."""


def holds_after(calls: frozenset[str]) -> bool:
    """Return whether the properties hold on runs of these calls."""
    return not calls & BREAKS_CLOSURE and not calls >= {"fork", "add_block_hashes"}


def prefix_closed(state: State, prefixes: Prefixes) -> Iterator[str]:
    """PREFIX-CLOSED: a cached block's parent is cached, too."""
    for size, found, waiting in _full_groups(state, prefixes):
        for letters, blocks in found.items():
            if len(letters) > size and letters[:-size] not in found.keys() | waiting:
                yield f"block {blocks[0]} is cached, but its parent is not"


def evict_order(state: State, prefixes: Prefixes) -> Iterator[str]:
    """EVICT-ORDER: a free cached block is evicted before at least one copy of its parent."""
    places = {block: place for place, block in enumerate(state.device.queue)}
    for size, found, waiting in _full_groups(state, prefixes):
        for letters, blocks in found.items():
            if len(letters) <= size or letters[:-size] in waiting:
                continue
            parents = found.get(letters[:-size], ())
            last = max((places.get(each, len(places)) for each in parents), default=-1)
            for block in blocks:
                if places.get(block, -1) > last:
                    yield f"block {block} stays longer than every copy of its parent"


def level_chain(state: State, prefixes: Prefixes) -> Iterator[str]:
    """LEVEL-CHAIN: at least one copy of a free cached block's parent has an owner, or retention
    wishes at least as high.
    """
    pool = state.device
    if pool.retention is None:
        return
    kept, free = pool.retention.kept, set(pool.queue)
    for size, found, waiting in _full_groups(state, prefixes):
        for letters, blocks in found.items():
            if len(letters) <= size or letters[:-size] in waiting:
                continue
            parents = found.get(letters[:-size], ())
            if not parents or not free.issuperset(parents):
                continue
            for block in free.intersection(blocks):
                mine = kept.get(block, NOTHING)
                theirs = [kept.get(each, NOTHING) for each in parents]
                if not any(all(map(int.__ge__, each, mine)) for each in theirs):
                    yield f"block {block} has {mine}, but the copies of its parent have {theirs}"


def _full_groups(state: State, prefixes: Prefixes) -> Iterator[tuple[int, Found, set[Chain]]]:
    """Yield of each full group its block size, its cached prefixes with their blocks, and the
    prefixes whose blocks have an owner and wait for their key.
    """
    groups: dict[int, Found] = {}
    for key, blocks in state.device.index.items():
        group_id = group_of(key)
        if not state.config.groups[group_id].is_windowed:
            groups.setdefault(group_id, {})[prefixes.chain(key)] = list(blocks)
    for group_id, found in groups.items():
        waiting = {
            prefixes.chain(each.key)
            for each in state.batch.merges
            if each.group_id == group_id and state.device.ref_counts[each.block]
        }
        yield state.config.groups[group_id].block_size, found, waiting


CLOSURE_CHECKS: dict[str, ClosureCheck] = {
    "PREFIX-CLOSED": prefix_closed,
    "EVICT-ORDER": evict_order,
    "LEVEL-CHAIN": level_chain,
}
