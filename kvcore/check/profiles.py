# SPDX-License-Identifier: Apache-2.0
"""Named worlds: small ones, each for one part of the core, that are explored to their end.

Rules: the numbers of states and edges are pinned: another number means that the core can reach
other states, or that another world is explored. Twin: none.
"""

from __future__ import annotations

from kvcore.check.named_world import FULL, SLOT, SWAPS, WINDOW, Profile, world

__all__ = ["PROFILES", "Profile"]

PROFILES: dict[str, Profile] = {
    "3x2x4": Profile("3 blocks, 2 requests, 4 tokens", world(3, 2, 4, 4), 1917, 17751),
    "4x2x4": Profile("4 blocks, 2 requests, 4 tokens", world(4, 2, 4, 4), 13413, 129040, slow=True),
    "4x2x6": Profile("prompts of 5, 6 tokens", world(4, 2, 6, 5), 22972, 261907, slow=True),
    "4x3x4": Profile("3 requests, prompts of 3", world(4, 3, 4, 3), 133103, 1377807, slow=True),
    "groups": Profile(
        "a full and a windowed group",
        world(4, 2, 3, 3, groups=(SLOT, WINDOW), enable_events=True),
        183,
        1413,
    ),
    "sizes": Profile(
        "groups of two block sizes", world(4, 2, 3, 3, groups=(FULL, WINDOW)), 495, 3924
    ),
    "host": Profile(
        "a host tier, swapped to and fro", world(2, 2, 3, 3, *SWAPS, num_host_blocks=2), 625, 5030
    ),
    "drafts": Profile("drafts, accepted in any number", world(2, 2, 3, 3, num_drafts=2), 834, 8856),
    "truncate": Profile(
        "requests cut and rewound", world(2, 2, 3, 3, "truncate", "rewind"), 476, 4399
    ),
    "pins": Profile("blocks pinned", world(2, 2, 3, 3, "pin", "unpin", num_pins=2), 1075, 9692),
    "evict": Profile(
        "keys withdrawn by evict_blocks", world(2, 2, 3, 3, "evict_blocks"), 280, 2315
    ),
    "loads": Profile(
        "stores and loads that fail",
        world(2, 2, 3, 3, "load", "store", groups=(SLOT,), loads_fail=True, without=("fork",)),
        187,
        1808,
    ),
    "merge": Profile(
        "duplicates that merge, two moves in a batch",
        world(2, 2, 3, 3, duplicates="merge", calls_per_batch=2),
        262,
        17471,
    ),
    "completed": Profile(
        "blocks published when a batch is completed",
        world(2, 2, 3, 3, publish="completed", calls_per_batch=2),
        289,
        19417,
    ),
    "uncached": Profile(
        "blocks without content leave first",
        world(2, 2, 3, 3, eviction="uncached_first"),
        192,
        1402,
    ),
    "flight": Profile(
        "a batch in flight",
        world(2, 2, 2, 2, max_in_flight=1, num_letters=1, without=("fork", "reset_prefix_cache")),
        5966,
        18844,
    ),
    "flight-hits": Profile(
        "a batch in flight, blocks of one token that are hit",
        world(
            *(2, 2, 2, 2),
            groups=(SLOT,),
            max_in_flight=1,
            num_letters=1,
            without=("fork", "append", "reset_prefix_cache"),
        ),
        7532,
        24434,
    ),
    "flight-fork": Profile(
        "a batch in flight, forks",
        world(2, 2, 2, 1, max_in_flight=1, num_letters=1, without=("reset_prefix_cache",)),
        13519,
        41176,
    ),
    "flight-two": Profile(
        "two batches in flight",
        world(2, 1, 2, 2, max_in_flight=2, num_letters=1, without=("fork",)),
        3110,
        13618,
    ),
    "flight-completed": Profile(
        "a batch in flight, blocks published at its end",
        world(
            *(2, 2, 2, 2),
            max_in_flight=1,
            num_letters=1,
            publish="completed",
            without=("fork", "reset_prefix_cache"),
        ),
        5922,
        18712,
    ),
    "flight-two-completed": Profile(
        "two batches in flight, blocks published at their end",
        world(2, 1, 2, 2, max_in_flight=2, num_letters=1, publish="completed", without=("fork",)),
        2730,
        11998,
    ),
    "flight-loads": Profile(
        "loads and stores in flight, that fail",
        world(
            *(2, 1, 2, 2, "load", "store"),
            groups=(SLOT,),
            max_in_flight=1,
            num_letters=1,
            without=("fork", "append", "reset_prefix_cache"),
        ),
        3356,
        12125,
    ),
    "flight-swap": Profile(
        "a batch in flight with a host tier",
        world(
            *(2, 1, 2, 2, *SWAPS),
            num_host_blocks=1,
            max_in_flight=1,
            num_letters=1,
            without=("fork",),
        ),
        595,
        1828,
    ),
    "flight-window": Profile(
        "a batch in flight behind a window",
        world(3, 1, 3, 3, groups=(WINDOW,), max_in_flight=1, num_letters=1, without=("fork",)),
        4160,
        12803,
    ),
    "flight-drafts": Profile(
        "drafts and cuts in flight",
        world(
            *(2, 1, 3, 2, "truncate"),
            max_in_flight=1,
            num_letters=1,
            num_drafts=1,
            without=("fork",),
        ),
        1890,
        7072,
    ),
    "flight-merge": Profile(
        "duplicates that merge when their batch is completed",
        world(
            *(2, 2, 2, 2),
            groups=(SLOT,),
            duplicates="merge",
            publish="completed",
            max_in_flight=1,
            num_letters=1,
            without=("fork", "append", "reset_prefix_cache"),
        ),
        7896,
        25852,
    ),
}
