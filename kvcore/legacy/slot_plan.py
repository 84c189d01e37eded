# SPDX-License-Identifier: Apache-2.0
"""What an allocation of vLLM 0.8.5's V1 manager will do, before anything changes.

Rules: all that can raise is here. A request that holds nothing brings hits, each of which must
still have the request's hash at its place; null blocks stand where no query sees. Free are the
blocks of the queue, and those that the window's trim brings back, less the hits that are in the
queue. Drafts are given slots and are never full. Source: S001-71 to 75. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvcore.arguments import read_count
from kvcore.groups import skipped_blocks
from kvcore.legacy.block_hashes import BlockHashType, hash_more_tokens, with_keys
from kvcore.legacy.kv_cache_errors import (
    HitsWhileRunning,
    HitsWithoutCaching,
    StaleHit,
    TooLong,
)
from kvcore.legacy.live_blocks import KVCacheBlock

if TYPE_CHECKING:
    from kvcore.legacy.kv_cache_manager import KVCacheManager


@attrs.frozen
class SlotPlan:
    """What an allocation does.

    num_new: blocks to take. full: records of the places to publish, from first_uncached on.
    new_hashes: those of them, and before them, that the request has not yet.
    """

    fits: bool
    hits: tuple[KVCacheBlock, ...] = ()
    num_new: int = 0
    first_uncached: int = 0
    full: Sequence[BlockHashType] = ()
    new_hashes: Sequence[BlockHashType] = ()


def plan_slots(
    manager: KVCacheManager,
    request: Any,
    num_tokens: int,
    new_computed_blocks: Sequence[KVCacheBlock] | None,
    num_lookahead_tokens: int,
) -> SlotPlan:
    """Plan an allocation; the arguments are those of `allocate_slots`. Changes nothing."""
    asked = read_count("num_tokens", num_tokens, 1)
    lookahead = read_count("num_lookahead_tokens", num_lookahead_tokens)
    counted = read_count("num_computed_tokens", request.num_computed_tokens)
    hits = tuple(new_computed_blocks or ())
    if hits:
        check_hits(manager, request, hits)
    size, table = manager.block_size, manager.req_to_blocks[request.request_id]
    held = len(table) + len(hits)
    end = counted + len(hits) * size + asked
    needed = max(0, -(-(end + lookahead) // size) - held)
    if needed and needed > num_available(manager, table, counted, hits):
        return SlotPlan(fits=False)
    room = manager.max_num_blocks_per_req - held
    if needed and room <= 0:
        raise TooLong(
            request=repr(request.request_id),
            held=len(table),
            num_hits=len(hits),
            asked=needed,
            max_model_len=manager.max_model_len,
            most=manager.max_num_blocks_per_req,
        )
    num_new = min(needed, room)
    if not manager.enable_caching:
        return SlotPlan(True, hits, num_new)
    first = manager.num_cached_block.get(request.request_id, len(hits))
    num_drafts = len(getattr(request, "spec_token_ids", None) or ())
    num_full = min((end - num_drafts) // size, held + num_new)
    if num_full <= first:
        return SlotPlan(True, hits, num_new, first)
    made = make_hashes(manager, request, num_full)
    known = manager.req_to_block_hashes[request.request_id]
    full = [*known[first:num_full], *made[max(0, first - len(known)) :]]
    return SlotPlan(True, hits, num_new, first, with_keys(full), made)


def check_hits(manager: KVCacheManager, request: Any, hits: Sequence[KVCacheBlock]) -> None:
    """Raise unless a request can be given these blocks as its first."""
    name = repr(request.request_id)
    if not manager.enable_caching:
        raise HitsWithoutCaching(request=name, num_blocks=len(hits))
    manager.block_pool.check_own(hits)
    if manager.req_to_blocks[request.request_id]:
        raise HitsWhileRunning(request=name, num_blocks=len(hits))
    hashes = [
        *manager.req_to_block_hashes[request.request_id],
        *make_hashes(manager, request, min(len(hits), request.num_tokens // manager.block_size)),
    ]
    group, pool = manager.specialized_manager.group, manager.block_pool
    num_unseen = skipped_blocks(group, len(hits) * manager.block_size)
    null, key_of = pool.null_block, pool.backing.key_of
    for place, block in enumerate(hits):
        if block is null:
            is_good = place < num_unseen
        else:
            key = key_of(block.block_id)
            is_good = place < len(hashes) and key == hashes[place].core_key
        if not is_good:
            raise StaleHit(request=name, block=block.block_id, position=place)


def num_available(
    manager: KVCacheManager,
    table: Sequence[KVCacheBlock],
    counted: int,
    hits: Sequence[KVCacheBlock],
) -> int:
    """Blocks that can be taken once the window is trimmed and the hits are touched."""
    pool = manager.block_pool
    null, ref_count = pool.null_block, pool.backing.ref_count
    coming = going = 0
    for place in manager.specialized_manager.skipped_places(table, counted):
        coming += ref_count(table[place].block_id) == 1
    for block in hits:
        going += block is not null and ref_count(block.block_id) == 0
    return pool.get_num_free_blocks() + coming - going


def make_hashes(manager: KVCacheManager, request: Any, num_full: int) -> list[BlockHashType]:
    """The hashes of a request's first blocks behind those that it has. Raises TokensMissing."""
    known = manager.req_to_block_hashes[request.request_id]
    return hash_more_tokens(manager.caching_hash_fn, manager.block_size, request, known, num_full)
