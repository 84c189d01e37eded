# SPDX-License-Identifier: Apache-2.0
"""Named worlds in which epochs of weights begin, at any moment between two batches, at most twice.

Blocks hold one token unless stated otherwise. The content that a request computes depends on the
epoch in which it began, so that an old block under a new key, or in the table of a new request, is
wrong content. A world whose epochs begin at 1 meets one epoch more.
"""

from __future__ import annotations

from kvcore.check.profiles.ahead import SHOWS as AHEAD_SHOWS
from kvcore.check.profiles.features import NEVER_REFUSED
from kvcore.check.profiles.profile import (
    FLYING,
    FLYING_SLOTS,
    SHARING,
    SLOT,
    STAYING,
    SWAPS,
    Profile,
    world,
)
from kvcore.types.groups import Group

ADVANCE = "advance_epoch"
SHOWS = ("call advance_epoch: done", "goal stale")

EPOCHS: dict[str, Profile] = {
    "epoch": Profile(
        "weights change twice, requests go on or are admitted anew",
        world(3, 2, 3, 2, ADVANCE, groups=(SLOT,), without=SHARING),
        1017,
        5613,
        shows=SHOWS,
    ),
    "epoch-uncached": Profile(
        "weights change, blocks without content leave first",
        world(
            *(3, 2, 2, 2, ADVANCE, "evict_blocks"),
            groups=(SLOT,),
            eviction="uncached_first",
            without=SHARING,
        ),
        5239,
        36994,
        shows=SHOWS,
    ),
    "epoch-fork": Profile(
        "weights change, requests fork, append and are cut",
        world(2, 2, 3, 2, ADVANCE, "truncate", epoch=1, num_letters=1),
        370,
        2519,
        shows=SHOWS,
    ),
    "epoch-swap": Profile(
        "weights change, requests are swapped",
        world(2, 2, 2, 2, ADVANCE, *SWAPS, groups=(SLOT,), num_host_blocks=2, without=SHARING),
        1484,
        9435,
        shows=SHOWS,
    ),
    "epoch-merge": Profile(
        "weights change, duplicates merge",
        world(
            *(3, 2, 2, 2, ADVANCE),
            groups=(SLOT,),
            duplicates="merge",
            moves_per_batch=2,
            epoch=1,
            without=SHARING,
        ),
        627,
        20729,
        shows=SHOWS,
    ),
    "epoch-window": Profile(
        "weights change, two groups of which one gives blocks back, drafts, steps of any length",
        world(
            *(5, 1, 3, 3, ADVANCE),
            groups=(SLOT, Group(1, kind="sliding_window", window=2)),
            num_drafts=1,
            moves="calls",
            epoch=1,
            without=("fork", "reset_prefix_cache"),
        ),
        1944,
        8912,
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "epoch-loads": Profile(
        "weights change, loads and stores by key, and external tokens that fail",
        world(
            *(3, 2, 2, 2, ADVANCE, "load", "store"),
            groups=(SLOT,),
            num_external=1,
            loads_fail=True,
            moves="calls",
            epoch=1,
            num_letters=1,
            without=SHARING,
        ),
        1139,
        27165,
        shows=SHOWS,
        not_shown={"call load: refused later": "a load takes a block, and one is always free"},
    ),
    "epoch-flight": Profile(
        "weights change while a batch is in flight",
        world(2, 2, 2, 2, ADVANCE, epoch=1, without=STAYING, **FLYING_SLOTS),
        6148,
        16921,
        shows=SHOWS,
    ),
    "epoch-flight-loads": Profile(
        "weights change while a batch is in flight, loads of what others compute merge",
        world(
            *(2, 2, 2, 2, ADVANCE, "load"),
            duplicates="merge",
            epoch=1,
            without=STAYING,
            **FLYING_SLOTS,
        ),
        35744,
        124326,
        backend="rust",
        shows=SHOWS,
    ),
    "epoch-ahead": Profile(
        "weights change while a batch runs ahead of its output, blocks of two tokens",
        world(
            *(2, 1, 3, 1, ADVANCE),
            num_output_placeholders=1,
            epoch=1,
            without=("fork", "remove_request", "reset_prefix_cache"),
            **FLYING,
        ),
        3522,
        10324,
        backend="rust",
        shows=(*SHOWS, *AHEAD_SHOWS),
        not_shown=NEVER_REFUSED,
    ),
    "epoch-completed": Profile(
        "weights change while a batch is in flight, whose blocks are published at its end",
        world(2, 2, 2, 2, ADVANCE, epoch=1, publish="completed", without=STAYING, **FLYING_SLOTS),
        6130,
        17034,
        shows=SHOWS,
    ),
}
