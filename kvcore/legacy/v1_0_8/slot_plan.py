# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with an allocation of vLLM 0.8.5's V1 manager, asked before anything changes.

Rules: a request that holds nothing brings hits, each of which must still have the request's hash at
its place; null blocks stand where no query sees. Drafts are given slots and are never full. Source:
S001-71 to 75. Twin: none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kvcore.legacy.v1_0_8.block_hashes import (
    BlockHashType,
    HashFunction,
    hash_more_tokens,
    hash_request_tokens,
    keys_of,
)
from kvcore.legacy.v1_0_8.block_pool import BlockPool
from kvcore.legacy.v1_0_8.errors import HitsWhileRunning, HitsWithoutCaching, StaleHit, TooLong
from kvcore.legacy.v1_0_8.live_blocks import KVCacheBlock
from kvcore.legacy.v1_0_8.specialized_manager import SpecializedManager
from kvcore.types.arguments import read_count
from kvcore.types.groups import skipped_blocks


class Manager(Protocol):
    """What is asked here of the `KVCacheManager` that allocates."""

    block_pool: BlockPool
    block_size: int
    caching_hash_fn: HashFunction
    enable_caching: bool
    max_model_len: int
    max_num_blocks_per_req: int
    specialized_manager: SpecializedManager

    @property
    def req_to_blocks(self) -> Mapping[str, list[KVCacheBlock]]:
        """The table of each request."""

    @property
    def req_to_block_hashes(self) -> Mapping[str, list[BlockHashType]]:
        """The hashes that each request has."""


def read_counts(num_tokens: Any, num_computed_tokens: Any, num_lookahead_tokens: Any) -> list[int]:
    """The counts of an allocation as ints, in this order. Raises InvalidCount."""
    return [
        read_count("num_tokens", num_tokens, 1),
        read_count("num_computed_tokens", num_computed_tokens),
        read_count("num_lookahead_tokens", num_lookahead_tokens),
    ]


class Hits(NamedTuple):
    """What a request brings. places, keys: of the blocks, without the null blocks in front."""

    blocks: Sequence[KVCacheBlock]
    places: Sequence[int]
    keys: Sequence[bytes]

    def stale(self, request: Any, block: int) -> StaleHit:
        """The error of a hit that is not, or no longer, what the request has at its place."""
        position = len(self.blocks) - len(self.places) + self.places.index(block)
        return StaleHit(request=repr(request.request_id), block=block, position=position)


NO_HITS = Hits((), (), ())


def check_hits(manager: Manager, request: Any, blocks: Sequence[KVCacheBlock]) -> Hits:
    """Blocks that a request can be given as its first, if they have the request's keys.

    Raises HitsWithoutCaching, ForeignBlock, HitsWhileRunning, StaleHit, TokensMissing.
    """
    pool, size, count = manager.block_pool, manager.block_size, len(blocks)
    if not manager.enable_caching:
        raise HitsWithoutCaching(request=repr(request.request_id), num_blocks=count)
    places = pool.check_own(blocks)
    if manager.req_to_blocks.get(request.request_id):
        raise HitsWhileRunning(request=repr(request.request_id), num_blocks=count)
    hashes = manager.req_to_block_hashes[request.request_id][:count]
    if len(hashes) < count:
        made = make_hashes(manager, request, min(count, request.num_tokens // size))
        hashes += made[: count - len(hashes)]
    num_null = num_unseen = 0
    if not places[0]:
        num_null = next((at for at, place in enumerate(places) if place), count)
        num_unseen = skipped_blocks(manager.specialized_manager.group, count * size)
    if num_null > num_unseen or len(hashes) < count:
        position = num_unseen if num_null > num_unseen else len(hashes)
        block = places[position]
        raise StaleHit(request=repr(request.request_id), block=block, position=position)
    return Hits(blocks, places[num_null:], keys_of(hashes[num_null:], pool.backend))


def limit_new(manager: Manager, request: Any, num_new: int, hits: Hits) -> int:
    """How many of so many new blocks the model's length leaves; all where they do not fit anyway.

    Raises TooLong where it leaves none, StaleHit.
    """
    held, num_hits = len(manager.req_to_blocks[request.request_id]), len(hits.blocks)
    room = manager.max_num_blocks_per_req - held - num_hits
    if num_new <= room or not fits(manager, request, num_new, hits):
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


def fits(manager: Manager, request: Any, num_new: int, hits: Hits) -> bool:
    """Whether so many can be taken once the window is trimmed and hits are touched.

    Raises StaleHit.
    """
    pool, table = manager.block_pool, manager.req_to_blocks[request.request_id]
    ref_count, key_of = pool.backing.ref_count, pool.backing.key_of
    for place, key in zip(hits.places, hits.keys, strict=True):
        if not place or key_of(place) != key:
            raise hits.stale(request, place)
    skipped = manager.specialized_manager.skipped_places(table, request.num_computed_tokens)
    coming = sum(ref_count(table[place].block_id) == 1 for place in skipped)
    going = sum(ref_count(place) == 0 for place in hits.places)
    return num_new + going <= pool.get_num_free_blocks() + coming


def hash_full(
    manager: Manager, request: Any, first: int, end: int, num_blocks: int
) -> tuple[list[BlockHashType], list[bytes]]:
    """The hashes that a request lacks of its full blocks, and the keys of those from a place on.

    end: its tokens with the drafts. num_blocks: of its table. Raises TokensMissing, WrongArgument.
    """
    num_drafts = len(getattr(request, "spec_token_ids", None) or ())
    num_full = min((end - num_drafts) // manager.block_size, num_blocks)
    if num_full <= first:
        return [], []
    known = manager.req_to_block_hashes[request.request_id]
    made = make_hashes(manager, request, num_full) if num_full > len(known) else []
    keys = keys_of([*known[first:num_full], *made], manager.block_pool.backend)
    unknown = max(0, first - len(known))
    return made, keys[unknown : unknown + num_full - first]


def make_hashes(manager: Manager, request: Any, num_full: int) -> list[BlockHashType]:
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
