# SPDX-License-Identifier: Apache-2.0
"""Bad input to `allocate_slots`: counts, lengths, hits that are not the request's or are stale."""

from __future__ import annotations

from typing import Any

from kvcore import Hit, KVCacheBlocks, KVCacheManager
from kvcore.types.errors import (
    BeyondModelLength,
    CachingDisabled,
    HitsOnRunningRequest,
    InvalidCount,
    KvcoreError,
    StaleHits,
    TooManyTokens,
    UnknownBlock,
    WrongHit,
)
from tests.conftest import Backend
from tests.core.misuse.bad_requests import crowd
from tests.helpers.misuse import Row, World, bad
from tests.helpers.stories import add, drop, make, serve, step


def long_prompts(backend: Backend) -> KVCacheManager:
    """Set the limit to 8 tokens. "long" has 10 tokens, 8 of them computed; "waits" has 10."""
    manager = make(backend, max_model_len=8)
    add(manager, "long", range(10))
    manager.allocate_slots("long", 8)
    add(manager, "waits", range(50, 60))
    step(manager)
    return manager


def two_prefixes(backend: Backend) -> KVCacheManager:
    """Cache tokens 0 to 3 in blocks 1 and 2, and tokens 5 and 6 in block 4.

    "waits" has the tokens 0 to 4, "even" 0 to 3. Block 3 is used and has no key; blocks 5 to 9 are
    unused.
    """
    manager = make(backend)
    serve(manager, "first", [0, 1, 2, 3, 4])
    serve(manager, "second", [5, 6])
    add(manager, "waits", [0, 1, 2, 3, 4])
    add(manager, "even", [0, 1, 2, 3])
    step(manager)
    return manager


def evicted(backend: Backend) -> KVCacheManager:
    """Make the story of `two_prefixes`, in which block 2 has lost its key."""
    manager = two_prefixes(backend)
    manager.evict_blocks([2])
    return manager


def taken_again(backend: Backend) -> KVCacheManager:
    """Make the story of `two_prefixes`, in which block 2 now holds tokens of "third".

    Freeing "first" puts 3, 2, 1 behind 5 to 9; "third" takes five blocks and then those two.
    """
    manager = two_prefixes(backend)
    drop(manager, "first")
    serve(manager, "third", range(30, 44))
    return manager


def uncached(backend: Backend) -> KVCacheManager:
    """Make a manager without prefix caching; block 1 is in use."""
    manager = make(backend, enable_caching=False)
    serve(manager, "first", [0, 1])
    add(manager, "waits", [0, 1, 2, 3, 4])
    return manager


def hit(*block_ids: Any, num_tokens: Any = None) -> Hit:
    """Return a hit of these blocks in the one group, by default with the tokens that they hold."""
    held = 2 * len(block_ids)
    return Hit(KVCacheBlocks((block_ids,)), held if num_tokens is None else num_tokens)


def wrong_hit(num_blocks: int, num_tokens: int | str, given: Hit) -> Row:
    """Return a hit for "waits" whose numbers of blocks and tokens do not fit."""
    error = WrongHit(request="waits", num_blocks=num_blocks, num_tokens=num_tokens)
    return bad(two_prefixes, error, "allocate_slots", "waits", 1, given)


def stale(world: World, block: int, position: int, given: Hit) -> Row:
    """Return a hit for "waits" of which this block has another key, or none."""
    error = StaleHits(request="waits", block=block, position=position)
    return bad(world, error, "allocate_slots", "waits", 1, given)


def count(error: KvcoreError, num_new_tokens: Any, **options: Any) -> Row:
    """List wrong counts for "waits" of `crowd`, which has 5 tokens; the model takes 8."""
    return bad(crowd, error, "allocate_slots", "waits", num_new_tokens, **options)


def below_zero(name: str, value: object) -> KvcoreError:
    """Return the error for a count that is negative, or not a number."""
    return InvalidCount(name=name, value=value, least=0)


COUNTS = [
    count(InvalidCount(name="num_new_tokens", value=0, least=1), 0),
    count(InvalidCount(name="num_new_tokens", value=0, least=1), 0, num_lookahead_tokens=3),
    count(below_zero("num_new_tokens", -1), -1),
    count(below_zero("num_new_tokens", -1), -1, num_external_computed_tokens=3),
    count(below_zero("num_new_tokens", -(10**30)), -(10**30)),
    count(below_zero("num_lookahead_tokens", -2), 1, num_lookahead_tokens=-2),
    count(below_zero("num_external_computed_tokens", -3), 1, num_external_computed_tokens=-3),
    *(
        row
        for value in ("x", None, 1.5)
        for row in (
            count(below_zero("num_new_tokens", value), value),
            count(below_zero("num_lookahead_tokens", value), 1, num_lookahead_tokens=value),
            count(
                below_zero("num_external_computed_tokens", value),
                1,
                num_external_computed_tokens=value,
            ),
        )
    ),
]


def _too_many(requested: int) -> KvcoreError:
    return TooManyTokens(request="waits", num_tokens=5, requested=requested)


def _too_long(requested: int) -> KvcoreError:
    return BeyondModelLength(request="waits", requested=requested, max_model_len=8)


LENGTHS = [
    count(_too_many(6), 6),
    count(_too_many(6), 6, num_lookahead_tokens=1, delay_cache_blocks=True),
    count(_too_many(6), 1, num_external_computed_tokens=5),
    count(_too_many(6), 0, num_external_computed_tokens=6),
    count(_too_long(9), 9),
    count(_too_long(9), 1, num_external_computed_tokens=100),
    count(_too_long(10**30), 10**30),
    bad(
        crowd,
        TooManyTokens(request="runs", num_tokens=5, requested=6),
        "allocate_slots",
        "runs",
        1,
    ),
    bad(
        long_prompts,
        BeyondModelLength(request="long", requested=9, max_model_len=8),
        "allocate_slots",
        "long",
        1,
    ),
    bad(long_prompts, _too_long(9), "allocate_slots", "waits", 9),
    bad(long_prompts, _too_long(9), "allocate_slots", "waits", 9, full_sequence_must_fit=True),
]

HITS = [
    bad(
        two_prefixes,
        HitsOnRunningRequest(request="first", num_blocks=1),
        "allocate_slots",
        "first",
        1,
        hit(1),
    ),
    bad(
        uncached,
        CachingDisabled(request="waits", num_blocks=1),
        "allocate_slots",
        "waits",
        1,
        hit(1),
    ),
    wrong_hit(1, 4, hit(1, num_tokens=4)),
    wrong_hit(1, 1, hit(1, num_tokens=1)),
    wrong_hit(2, 0, hit(1, 2, num_tokens=0)),
    wrong_hit(1, -2, hit(1, num_tokens=-2)),
    wrong_hit(0, 2, hit(num_tokens=2)),
    wrong_hit(1, "x", hit(1, num_tokens="x")),
    wrong_hit(1, 2, Hit(KVCacheBlocks(((1,), (1,))), 2)),
    wrong_hit(0, 2, Hit(KVCacheBlocks(()), 2)),
    # Three blocks are six tokens, the request has five; a hit must leave one to compute.
    wrong_hit(3, 6, hit(1, 2, 3)),
    # Nor may it be the whole request.
    bad(
        two_prefixes,
        WrongHit(request="even", num_blocks=2, num_tokens=4),
        "allocate_slots",
        "even",
        1,
        hit(1, 2),
    ),
    stale(two_prefixes, 4, 0, hit(4)),
    stale(two_prefixes, 2, 0, hit(2)),
    stale(two_prefixes, 2, 0, hit(2, 1)),
    stale(two_prefixes, 1, 1, hit(1, 1)),
    stale(two_prefixes, 3, 1, hit(1, 3)),
    stale(two_prefixes, 9, 1, hit(1, 9)),
    stale(evicted, 2, 1, hit(1, 2)),
    stale(taken_again, 2, 1, hit(1, 2)),
]

FOREIGN = [
    bad(
        two_prefixes,
        UnknownBlock(block=block, first=1, last=9),
        "allocate_slots",
        "waits",
        1,
        hit(1, block),
    )
    for block in (0, -1, 10, 2**31, 2**64, "2", None)
]

ROWS = [*COUNTS, *LENGTHS, *HITS, *FOREIGN]
