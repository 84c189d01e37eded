# SPDX-License-Identifier: Apache-2.0
"""Named worlds whose hits end inside blocks, at each token or at every second one.

Blocks hold two tokens and hashes one unless stated otherwise. They follow registry.py.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.features import NEVER_REFUSED
from kvcore.check.profiles.loads import SHOWS as FAILED
from kvcore.check.profiles.profile import FULL, SHARING, STATE, STAYING, SWAPS, Profile, world
from kvcore.types.groups import Group

INSIDE: dict[str, Any] = {"hash_block_size": 1}
ALONE: dict[str, Any] = {**INSIDE, "num_letters": 1}
LEFT = ("remove_request", "reset_prefix_cache")
FLYING: dict[str, Any] = {**ALONE, "max_in_flight": 1}
MARKED: dict[str, Any] = {**ALONE, "marks": True, "moves": "calls"}
WINDOW = Group(2, kind="sliding_window", window=2)
SHOWS = ("command CopyOnWrite",)

TAILS: dict[str, Profile] = {
    "tails": Profile(
        "hits inside blocks of two tokens",
        world(3, 2, 4, 4, without=("fork", "append"), **INSIDE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-append": Profile(
        "hits inside blocks of two tokens, in a pool without a spare block",
        world(2, 2, 3, 3, enable_events=True, without=("fork",), **INSIDE),
        *(0, 0),
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
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-groups": Profile(
        "hits inside the blocks of two groups, of two sizes",
        world(3, 2, 3, 3, groups=(FULL, Group(4)), without=("fork",), **INSIDE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-cut": Profile(
        "hits inside blocks, requests cut and rewound",
        world(2, 2, 3, 3, "truncate", "rewind", without=("fork",), **ALONE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-fork": Profile(
        "hits inside blocks, forks, two moves in a batch",
        world(3, 2, 3, 3, moves_per_batch=2, without=LEFT, **ALONE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-swap": Profile(
        "hits inside blocks, swaps",
        world(3, 2, 3, 3, *SWAPS, num_host_blocks=2, without=("fork", *LEFT), **ALONE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-unschedule": Profile(
        "hits inside blocks, less of the open batch than was planned, two moves in a batch",
        world(2, 2, 3, 3, "unschedule", moves_per_batch=2, without=("fork", *LEFT), **ALONE),
        *(0, 0),
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
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-eagle": Profile(
        "hits inside blocks that leave their last token to be computed",
        world(3, 2, 4, 4, use_eagle=True, without=("fork", *LEFT), **ALONE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-drafts": Profile(
        "hits inside blocks, drafts",
        world(2, 2, 3, 3, num_drafts=1, without=("fork", *LEFT), **ALONE),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-ahead": Profile(
        "hits inside blocks of tokens to come",
        world(3, 1, 4, 2, "truncate", num_output_placeholders=1, without=("fork", *LEFT), **ALONE),
        *(0, 0),
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
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
        *(0, 0),
        shows=(*SHOWS, *FAILED),
    ),
    "tails-epochs": Profile(
        "hits inside blocks, weights change",
        world(2, 2, 3, 3, "advance_epoch", without=("fork", *LEFT), **ALONE),
        *(0, 0),
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
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-states": Profile(
        "recurrent states and tails, kept at any token",
        world(4, 2, 4, 4, groups=(FULL, STATE), without=("fork", *LEFT), **MARKED),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-states-fork": Profile(
        "recurrent states of four tokens and tails, forks",
        world(
            *(5, 2, 3, 3),
            groups=(FULL, Group(4, kind="state")),
            without=LEFT,
            **MARKED,
        ),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-flight": Profile(
        "hits inside blocks, a batch in flight",
        world(2, 2, 2, 2, "cancel", without=SHARING, **FLYING),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-completed": Profile(
        "hits inside blocks that are findable when their batch is completed",
        world(2, 2, 2, 2, "cancel", publish="completed", without=SHARING, **FLYING),
        *(0, 0),
        shows=SHOWS,
    ),
    "tails-two": Profile(
        "hits inside blocks, two batches in flight",
        world(2, 2, 2, 2, "cancel", without=STAYING, **{**FLYING, "max_in_flight": 2}),
        *(0, 0),
        shows=SHOWS,
    ),
}
