# SPDX-License-Identifier: Apache-2.0
"""Named worlds whose hits end inside blocks, at each token or at every second one.

Blocks hold two tokens and hashes one unless stated otherwise. They follow registry.py.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.features import NEVER_REFUSED, ROOMY
from kvcore.check.profiles.loads import SHOWS as FAILED
from kvcore.check.profiles.profile import FULL, STATE, STAYING, SWAPS, Profile, world
from kvcore.types.groups import Group

INSIDE: dict[str, Any] = {"hash_block_size": 1}
ALONE: dict[str, Any] = {**INSIDE, "num_letters": 1}
LEFT = ("remove_request", "reset_prefix_cache")
FLYING: dict[str, Any] = {**ALONE, "max_in_flight": 1}
MARKED: dict[str, Any] = {**ALONE, "marks": True, "moves": "calls"}
WINDOW = Group(2, kind="sliding_window", window=2)
STATES_FLYING: dict[str, Any] = {**MARKED, "groups": (FULL, STATE), "max_in_flight": 1}
SHOWS = ("command CopyOnWrite",)
OF_FREED = ("command Touch", "command Evict", "goal quarantine", "goal abort in flight")
ALONE_THERE = "a request that hits inside a block replaces it, and the pool has no room for more"

TAILS: dict[str, Profile] = {
    "tails": Profile(
        "hits inside blocks of two tokens",
        world(3, 2, 4, 4, without=("fork", "append"), **INSIDE),
        *(5683, 51017),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-append": Profile(
        "hits inside blocks of two tokens, in a pool without a spare block",
        world(2, 2, 3, 3, enable_events=True, without=("fork",), **INSIDE),
        *(471, 3648),
        shows=SHOWS,
    ),
    "tails-fours": Profile(
        "hits at every second token of blocks of four, two moves in a batch",
        world(
            *(2, 2, 6, 5),
            groups=(Group(4),),
            hash_block_size=2,
            num_letters=1,
            moves_per_batch=2,
            without=LEFT,
        ),
        *(428, 4616),
        shows=SHOWS,
    ),
    "tails-threes": Profile(
        "hits inside blocks of three tokens",
        world(2, 2, 4, 4, groups=(Group(3),), without=("fork", "append", *LEFT), **INSIDE),
        *(179, 458),
        shows=SHOWS,
    ),
    "tails-lookahead": Profile(
        "recurrent states and tails, hits that are taken alone with a lookahead slot behind",
        world(
            *(4, 2, 3, 3),
            groups=(FULL, STATE),
            num_lookahead=1,
            moves="calls",
            without=("fork", "append", *LEFT),
            **ALONE,
        ),
        *(392, 3340),
        shows=SHOWS,
    ),
    "tails-groups": Profile(
        "hits inside the blocks of two groups, of two sizes",
        world(3, 2, 3, 3, groups=(FULL, Group(4)), without=("fork",), **INSIDE),
        *(656, 5235),
        shows=SHOWS,
        not_shown={
            "call append: refused later": ALONE_THERE,
            "goal sharing": ALONE_THERE,
            "goal duplicates": ALONE_THERE,
        },
    ),
    "tails-cut": Profile(
        "hits inside blocks of three tokens, requests cut and rewound",
        world(
            *(2, 2, 3, 3, "truncate", "rewind"),
            groups=(Group(3),),
            without=("fork", "remove_request"),
            **INSIDE,
        ),
        *(8233, 53351),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED
        | {"goal sharing": "each request is one block, and replaces its hit"},
    ),
    "tails-fork": Profile(
        "hits inside blocks, forks, two moves in a batch",
        world(3, 2, 3, 3, moves_per_batch=2, without=LEFT, **ALONE),
        *(832, 7446),
        shows=SHOWS,
    ),
    "tails-swap": Profile(
        "hits inside blocks, swaps",
        world(3, 2, 3, 3, *SWAPS, num_host_blocks=2, without=("fork", *LEFT), **ALONE),
        *(2408, 9432),
        shows=SHOWS,
    ),
    "tails-unschedule": Profile(
        "hits inside blocks, less of the open batch than was planned, two moves in a batch",
        world(2, 2, 3, 3, "unschedule", moves_per_batch=2, without=("fork", *LEFT), **ALONE),
        *(171, 2181),
        shows=SHOWS,
    ),
    "tails-merge": Profile(
        "hits inside blocks, duplicates that merge, two moves in a batch",
        world(
            *(3, 2, 3, 3),
            duplicates="merge",
            moves_per_batch=2,
            without=("fork", *LEFT),
            **ALONE,
        ),
        *(195, 1745),
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "tails-eagle": Profile(
        "hits inside blocks that leave their last token to be computed",
        world(3, 2, 4, 4, use_eagle=True, without=("fork", *LEFT), **ALONE),
        *(397, 1141),
        shows=SHOWS,
    ),
    "tails-drafts": Profile(
        "hits inside blocks, drafts",
        world(2, 2, 3, 3, num_drafts=1, without=("fork", *LEFT), **ALONE),
        *(209, 909),
        shows=SHOWS,
    ),
    "tails-ahead": Profile(
        "hits inside blocks of tokens to come",
        world(2, 2, 3, 1, num_output_placeholders=1, without=("fork", *LEFT), **ALONE),
        *(4234, 10154),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-delays": Profile(
        "hits inside blocks that are cached late",
        world(
            *(3, 2, 3, 3, "cache_blocks"),
            delays=(False, True),
            moves="calls",
            without=("fork", *LEFT),
            **ALONE,
        ),
        *(6989, 66220),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-uncached": Profile(
        "hits inside blocks, those without content leave first",
        world(2, 2, 3, 3, eviction="uncached_first", **ALONE),
        *(223, 1300),
        shows=SHOWS,
    ),
    "tails-pins": Profile(
        "hits inside blocks that are pinned, or lose their keys",
        world(3, 2, 3, 3, "pin", "unpin", "evict_blocks", without=("fork", *LEFT), **ALONE),
        *(5689, 38995),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-loads": Profile(
        "hits inside blocks with external tokens behind, that fail",
        world(
            *(2, 2, 3, 3),
            num_external=1,
            loads_fail=True,
            moves="calls",
            without=("fork", "append", *LEFT),
            **ALONE,
        ),
        *(478, 16212),
        backend="rust",
        shows=(*SHOWS, *FAILED),
    ),
    "tails-epochs": Profile(
        "hits inside blocks, weights change",
        world(2, 2, 3, 3, "advance_epoch", without=("fork", *LEFT), **ALONE),
        *(392, 1388),
        shows=(*SHOWS, "call advance_epoch: done", "goal stale"),
    ),
    "tails-window": Profile(
        "hits inside the blocks of a full, a windowed and a state group",
        world(
            *(6, 2, 3, 3),
            groups=(FULL, WINDOW, STATE),
            without=("fork", "append", *LEFT),
            **MARKED,
        ),
        *(3401, 37112),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-states": Profile(
        "recurrent states and tails, kept at any token",
        world(4, 2, 4, 4, groups=(FULL, STATE), without=("fork", *LEFT), **MARKED),
        *(3667, 49199),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-states-cut": Profile(
        "recurrent states and tails, kept at any token, cut, two calls in a batch",
        world(
            *(5, 1, 4, 4, "truncate"),
            groups=(FULL, STATE),
            moves_per_batch=2,
            without=("fork",),
            **MARKED,
        ),
        *(5914, 349348),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "tails-states-fork": Profile(
        "recurrent states of four tokens and tails, forks",
        world(
            *(5, 2, 3, 3),
            groups=(FULL, Group(4, kind="state")),
            without=LEFT,
            **MARKED,
        ),
        *(10694, 117580),
        backend="rust",
        shows=SHOWS,
        not_shown={"goal trim": "a request holds one state"},
    ),
    "tails-states-flight": Profile(
        "recurrent states and tails, a batch in flight",
        world(4, 1, 3, 3, without=("fork", "append", *LEFT), **STATES_FLYING),
        *(25492, 78252),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-states-completed": Profile(
        "recurrent states and tails that are findable when their batch is completed",
        world(
            *(4, 1, 3, 3),
            publish="completed",
            without=("fork", "append", *LEFT),
            **STATES_FLYING,
        ),
        *(45600, 139529),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-flight": Profile(
        "hits inside blocks, a batch in flight",
        world(2, 2, 3, 3, without=("fork", "append", *LEFT), **FLYING),
        *(5365, 14155),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-completed": Profile(
        "hits inside blocks that are findable when their batch is completed",
        world(
            *(2, 2, 3, 3),
            publish="completed",
            without=("fork", "append", *LEFT),
            **FLYING,
        ),
        *(5792, 15317),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-completed-fork": Profile(
        "hits inside blocks, forks that copy before the batch they copy from is completed",
        world(
            *(2, 2, 2, 1),
            publish="completed",
            moves_per_batch=2,
            without=("free", *LEFT),
            **FLYING,
        ),
        *(2084, 5690),
        backend="rust",
        shows=SHOWS,
        not_shown={
            **dict.fromkeys(NEVER_REFUSED, "each of two requests holds one of two blocks"),
            **dict.fromkeys(OF_FREED, "no request is freed"),
        },
    ),
    "tails-flight-fork": Profile(
        "hits inside blocks, forks, a batch in flight",
        world(2, 2, 3, 2, without=("append", *LEFT), **FLYING),
        *(4303, 11094),
        backend="rust",
        shows=SHOWS,
        not_shown={"call allocate_slots: refused later": ROOMY},
    ),
    "tails-flight-swap": Profile(
        "hits inside blocks, swaps, a batch in flight",
        world(
            *(2, 2, 2, 2, *SWAPS),
            num_host_blocks=2,
            without=("fork", "append", *LEFT),
            **FLYING,
        ),
        *(12259, 33972),
        backend="rust",
        shows=SHOWS,
    ),
    "tails-flight-loads": Profile(
        "hits inside blocks with external tokens behind that fail, a batch in flight",
        world(
            *(2, 2, 2, 2),
            num_external=1,
            loads_fail=True,
            moves="calls",
            without=("fork", "append", *LEFT),
            **FLYING,
        ),
        *(84615, 292758),
        backend="rust",
        shows=(*SHOWS, "call rewind: done"),
    ),
    "tails-two": Profile(
        "hits inside blocks, two batches in flight",
        world(
            *(2, 2, 2, 2),
            without=("fork", "append", *STAYING),
            **{**FLYING, "max_in_flight": 2},
        ),
        *(87855, 335297),
        backend="rust",
        shows=SHOWS,
        not_shown={"goal sharing": ALONE_THERE},
    ),
}
