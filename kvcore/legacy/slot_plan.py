# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an allocation of vLLM 0.8.5's V1 manager, asked before anything changes.

Rules: a request that holds nothing brings hits, each of which must still have the request's hash at
its place; null blocks stand where no query sees. Drafts are given slots and are never full. Source:
S001-71 to 75. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcore.arguments import read_count
from kvcore.groups import skipped_blocks
from kvcore.legacy.block_hashes import (
    BlockHashType,
    hash_more_tokens,
    hash_request_tokens,
    keys_of,
)
from kvcore.legacy.kv_cache_errors import (
    HitsWhileRunning,
    HitsWithoutCaching,
    StaleHit,
    TooLong,
)
from kvcore.legacy.live_blocks import KVCacheBlock

if TYPE_CHECKING:
    from kvcore.legacy.kv_cache_manager import KVCacheManager


def read_counts(num_tokens: Any, num_computed_tokens: Any, num_lookahead_tokens: Any) -> list[int]:
    """The counts of an allocation as ints, in this order. Raises InvalidCount."""
    return [
        read_count("num_tokens", num_tokens, 1),
        read_count("num_computed_tokens", num_computed_tokens),
        read_count("num_lookahead_tokens", num_lookahead_tokens),
    ]


def check_hits(manager: KVCacheManager, request: Any, hits: Sequence[KVCacheBlock]) -> list[int]:
    """The ids of hits that a request can be given as its first blocks, without the null block.

    Raises HitsWithoutCaching, ForeignBlock, HitsWhileRunning, StaleHit, TokensMissing.
    """
    pool, size, count = manager.block_pool, manager.block_size, len(hits)
    if not manager.enable_caching:
        raise HitsWithoutCaching(request=repr(request.request_id), num_blocks=count)
    places = pool.check_own(hits)
    if manager.req_to_blocks.get(request.request_id):
        raise HitsWhileRunning(request=repr(request.request_id), num_blocks=count)
    keys = manager.keys_of_request(request.request_id)
    if len(keys) < count:
        made = make_hashes(manager, request, min(count, request.num_tokens // size))
        keys = keys + keys_of(made, pool.backend)
    num_null = num_unseen = 0
    if not places[0]:
        num_null = next((at for at, place in enumerate(places) if place), count)
        num_unseen = skipped_blocks(manager.specialized_manager.group, count * size)
    seen = places[num_null:]
    stale = pool.backing.blocks.first_stale(seen, keys[num_null:count], "device")
    if num_null <= num_unseen and stale is None:
        return seen
    position = num_unseen if num_null > num_unseen else num_null + (stale or 0)
    block = hits[position].block_id
    raise StaleHit(request=repr(request.request_id), block=block, position=position)


def limit_new(
    manager: KVCacheManager, request: Any, num_new: int, touched: Sequence[int], num_hits: int
) -> int:
    """How many of so many new blocks the model's length leaves; all where they do not fit anyway.

    Raises TooLong where it leaves none.
    """
    held = len(manager.req_to_blocks[request.request_id])
    room = manager.max_num_blocks_per_req - held - num_hits
    if num_new <= room or not fits(manager, request, num_new, touched):
        return num_new
    if room <= 0:
        raise TooLong(
            request=repr(request.request_id),
            held=held,
            num_hits=num_hits,
            asked=num_new,
            max_model_len=manager.max_model_len,
            most=manager.max_num_blocks_per_req,
        )
    return room


def fits(manager: KVCacheManager, request: Any, num_new: int, touched: Sequence[int]) -> bool:
    """Whether so many can be taken once the window is trimmed and hits are touched."""
    pool, table = manager.block_pool, manager.req_to_blocks[request.request_id]
    ref_count, counted = pool.backing.ref_count, request.num_computed_tokens
    skipped = manager.specialized_manager.skipped_places(table, counted)
    coming = sum(ref_count(table[place].block_id) == 1 for place in skipped)
    going = sum(ref_count(place) == 0 for place in touched)
    return num_new + going <= pool.get_num_free_blocks() + coming


def hash_full(
    manager: KVCacheManager, request: Any, first: int, end: int, num_blocks: int
) -> tuple[list[BlockHashType], list[bytes]]:
    """The hashes that a request lacks of its full blocks, and the keys of those from a place on.

    end: its tokens with the drafts. num_blocks: of its table. Raises TokensMissing, WrongArgument.
    """
    num_drafts = len(getattr(request, "spec_token_ids", None) or ())
    num_full = min((end - num_drafts) // manager.block_size, num_blocks)
    if num_full <= first:
        return [], []
    known = manager.keys_of_request(request.request_id)
    if num_full <= len(known):
        return [], known[first:num_full]
    made = make_hashes(manager, request, num_full)
    keys = keys_of(made, manager.block_pool.backend)
    if len(known) + len(keys) > num_full or first != len(known):
        keys = (known + keys)[first:num_full]
    return made, keys


def make_hashes(manager: KVCacheManager, request: Any, num_full: int) -> list[BlockHashType]:
    """The hashes of a request's first blocks behind those that it has. Raises TokensMissing.

    One that has media and no hashes is hashed as a look-up hashes it: all of its full blocks.
    """
    known = manager.req_to_block_hashes[request.request_id]
    function, size = manager.caching_hash_fn, manager.block_size
    if not known and request.mm_positions:
        made = hash_request_tokens(function, size, request)
        if len(made) >= num_full:
            return made
    return hash_more_tokens(function, size, request, known, num_full)
