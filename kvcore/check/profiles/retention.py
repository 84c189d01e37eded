# SPDX-License-Identifier: Apache-2.0
"""Named worlds in which requests wish for retention levels, and time passes: at most two ms.

Blocks hold one token. A level that ends while blocks are free moves them, so the chains of two
requests with different wishes are where the order can go wrong.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.features import NEVER_REFUSED, ROOMY
from kvcore.check.profiles.profile import (
    FLYING_SLOTS,
    FULL,
    SHARING,
    SLOT,
    STAYING,
    SWAPS,
    Profile,
    world,
)
from kvcore.types.groups import Group
from kvcore.types.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig

TICK = "tick"


def wish(first: int, priority: int, duration_ms: int | None) -> dict[str, Any]:
    """Make a kind of request that wishes for its tokens from one on, and decodes at level 0."""
    ranges = [TokenRangeRetentionConfig(first, None, priority, duration_ms)]
    return {"retention": KvCacheRetentionConfig(ranges, 0)}


LONG = wish(1, 80, 2)
SHORT = wish(0, 60, 1)
WISHES: dict[str, Any] = {"eviction": "retention", "kinds_of_requests": (LONG, SHORT)}

RETENTION: dict[str, Profile] = {
    "retention": Profile(
        "requests wish for levels, two of which end",
        world(3, 2, 2, 2, TICK, groups=(SLOT,), without=SHARING, **WISHES),
        31403,
        222322,
        backend="rust",
    ),
    "retention-merge": Profile(
        "levels of blocks that are cached late and merge, two calls in a batch",
        world(
            *(3, 2, 2, 1),
            groups=(SLOT,),
            num_letters=1,
            duplicates="merge",
            delays=(False, True),
            moves="calls",
            moves_per_batch=2,
            without=("fork", "remove_request", "reset_prefix_cache"),
            **WISHES,
        ),
        507,
        18649,
        backend="rust",
    ),
    "retention-equal": Profile(
        "levels that end and are no higher than what holds forever",
        world(
            *(2, 2, 2, 2, TICK),
            groups=(SLOT,),
            num_letters=1,
            without=SHARING,
            eviction="retention",
            kinds_of_requests=(wish(0, 60, None), wish(0, 20, 1)),
        ),
        1364,
        7126,
        backend="rust",
    ),
    "retention-evict": Profile(
        "levels of free blocks whose keys are withdrawn",
        world(2, 2, 2, 2, "evict_blocks", groups=(SLOT,), without=SHARING, **WISHES),
        1664,
        11653,
        backend="rust",
    ),
    "retention-epoch": Profile(
        "levels, and weights that change",
        world(
            *(2, 2, 2, 2, TICK, "advance_epoch"),
            groups=(SLOT,),
            num_letters=1,
            without=SHARING,
            **WISHES,
        ),
        6325,
        35891,
        backend="rust",
    ),
    "retention-window": Profile(
        "levels in two groups, of which one gives blocks back",
        world(
            *(4, 1, 3, 3, TICK),
            groups=(SLOT, Group(1, kind="sliding_window", window=2)),
            without=("fork", "reset_prefix_cache"),
            **WISHES,
        ),
        2662,
        17912,
        backend="rust",
        not_shown=NEVER_REFUSED,
    ),
    "retention-host": Profile(
        "levels of requests that are swapped",
        world(
            *(2, 2, 2, 2, TICK, *SWAPS),
            groups=(SLOT,),
            num_host_blocks=2,
            num_letters=1,
            without=SHARING,
            **WISHES,
        ),
        3632,
        22696,
        backend="rust",
    ),
    "retention-fork": Profile(
        "levels of requests that fork, append and are cut",
        world(
            *(2, 2, 3, 2, TICK, "truncate"),
            groups=(SLOT,),
            num_letters=1,
            without=("reset_prefix_cache",),
            **WISHES,
        ),
        8347,
        50238,
        backend="rust",
        shows=("call fork: done",),
    ),
    "retention-states": Profile(
        "levels of recurrent states that calls keep inside a block",
        world(
            *(4, 1, 4, 4, TICK),
            groups=(FULL, Group(4, kind="state")),
            num_letters=1,
            marks=True,
            moves="calls",
            eviction="retention",
            kinds_of_requests=(SHORT,),
            without=STAYING,
        ),
        1103,
        6038,
        backend="rust",
        not_shown={
            "call allocate_slots: refused later": ROOMY,
            "goal trim": "a request holds one state",
        },
    ),
    "retention-ahead": Profile(
        "levels while a batch runs ahead of its output",
        world(
            2,
            1,
            2,
            1,
            TICK,
            without=STAYING,
            num_output_placeholders=1,
            **{**FLYING_SLOTS, **WISHES},
        ),
        3614,
        11089,
        backend="rust",
        not_shown={"call allocate_slots: refused later": "one request never lacks a block"},
    ),
}
