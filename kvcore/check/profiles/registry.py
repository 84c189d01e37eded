# SPDX-License-Identifier: Apache-2.0
"""Named worlds: small ones, each for one part of the core, that are explored completely.

The numbers of states and edges are pinned: a different number means that the core can reach other
states, or that another world is explored. A world's options (coverage.py) and its `shows` determine
what it must show; whatever it cannot show has a reason.
"""

from __future__ import annotations

from kvcore.check.profiles.ahead import RUN_AHEAD
from kvcore.check.profiles.claims import CLAIMS
from kvcore.check.profiles.epochs import EPOCHS
from kvcore.check.profiles.far import FAR
from kvcore.check.profiles.features import FEATURES, NEVER_REFUSED
from kvcore.check.profiles.hashes import HASHES
from kvcore.check.profiles.loads import LOADS_FAIL
from kvcore.check.profiles.policies import POLICIES
from kvcore.check.profiles.profile import (
    FLYING,
    FLYING_SLOTS,
    FULL,
    SHARING,
    SLOT,
    STAYING,
    SWAPS,
    TWO_FLYING,
    WINDOW,
    Profile,
    world,
)
from kvcore.check.profiles.retention import RETENTION
from kvcore.check.profiles.state_drafts import STATE_DRAFTS
from kvcore.check.profiles.states import STATES
from kvcore.check.profiles.tails import TAILS
from kvcore.types.groups import Group

__all__ = ["PROFILES", "Profile"]

NEVER_HIT = {"command Touch": "no prompt is longer than a block, so there is no hit"}

PROFILES: dict[str, Profile] = {
    "3x2x4": Profile(
        "3 blocks, 2 requests, 4 tokens, two moves in a batch",
        world(3, 2, 4, 4, moves_per_batch=2),
        *(2987, 251344),
        backend="both",
    ),
    "4x2x4": Profile(
        "4 blocks, 2 requests, 4 tokens, two moves in a batch",
        world(4, 2, 4, 4, moves_per_batch=2),
        *(21667, 1910378),
        backend="rust",
        not_shown=NEVER_REFUSED,
    ),
    "4x2x6": Profile("prompts of 5, 6 tokens", world(4, 2, 6, 5), *(22972, 261907), slow=True),
    "4x3x4": Profile("3 requests, prompts of 3", world(4, 3, 4, 3), 133103, 1377807),
    "4x3x4-two": Profile(
        "3 requests, prompts of 3, two moves in a batch",
        world(4, 3, 4, 3, moves_per_batch=2),
        *(260770, 31495828),
        slow=True,
        backend="rust",
    ),
    "decode": Profile(
        "blocks of 4 tokens, prompts that end inside one",
        world(3, 2, 7, 6, groups=(Group(4),), num_letters=1, moves_per_batch=2),
        951,
        50308,
    ),
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
    "drafts": Profile(
        "drafts, accepted in any number, and rewound",
        world(2, 2, 3, 3, "rewind", num_drafts=2),
        1145,
        14074,
    ),
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
        world(2, 2, 3, 3, duplicates="merge", moves_per_batch=2),
        262,
        16790,
    ),
    "merge-late": Profile(
        "blocks cached late that merge, or leave in the batch that caches them",
        world(
            *(3, 2, 4, 4, "cache_blocks"),
            duplicates="merge",
            delays=(False, True),
            num_letters=1,
            moves="calls",
            moves_per_batch=2,
            without=("fork", "append", "remove_request", "reset_prefix_cache"),
        ),
        458,
        44811,
        shows=("goal merge",),
    ),
    "merge-forks": Profile(
        "forks of requests whose blocks wait to be merged",
        world(
            *(3, 2, 2, 2),
            groups=(SLOT,),
            duplicates="merge",
            delays=(False, True),
            num_letters=1,
            moves="calls",
            moves_per_batch=2,
            without=("append", "remove_request", "reset_prefix_cache"),
        ),
        151,
        6200,
        shows=("goal merge",),
    ),
    "completed": Profile(
        "blocks published when a batch is completed",
        world(2, 2, 3, 3, publish="completed", moves_per_batch=2),
        289,
        18643,
    ),
    "uncached": Profile(
        "blocks without content leave first",
        world(2, 2, 3, 3, eviction="uncached_first"),
        192,
        1402,
    ),
    "flight": Profile(
        "a batch in flight",
        world(2, 2, 2, 2, without=("fork", "reset_prefix_cache"), **FLYING),
        *(3820, 12325),
        not_shown=NEVER_REFUSED
        | NEVER_HIT
        | {"goal sharing": "no request forks, and there is no hit"},
    ),
    "flight-hits": Profile(
        "a batch in flight, blocks of one token that are hit",
        world(2, 2, 2, 2, without=SHARING, **FLYING_SLOTS),
        3430,
        11682,
    ),
    "flight-fork": Profile(
        "a batch in flight, forks",
        world(2, 2, 3, 2, without=("remove_request", "reset_prefix_cache"), **FLYING),
        9912,
        27690,
    ),
    "flight-two": Profile(
        "two batches in flight",
        world(2, 2, 2, 2, without=STAYING, **TWO_FLYING),
        20616,
        81184,
    ),
    "flight-completed": Profile(
        "a batch in flight, blocks published at its end",
        world(
            2, 2, 2, 2, publish="completed", without=("fork", "reset_prefix_cache"), **FLYING_SLOTS
        ),
        5252,
        18001,
    ),
    "flight-two-completed": Profile(
        "two batches in flight, blocks published at their end",
        world(2, 2, 2, 2, publish="completed", without=STAYING, **TWO_FLYING),
        15494,
        61669,
    ),
    "flight-loads": Profile(
        "loads and stores in flight, that fail",
        world(2, 2, 2, 2, "load", "store", without=STAYING, **FLYING_SLOTS),
        18780,
        68066,
    ),
    "flight-swap": Profile(
        "a batch in flight with a host tier",
        world(2, 2, 2, 2, *SWAPS, num_host_blocks=2, without=SHARING, **FLYING_SLOTS),
        9404,
        32204,
    ),
    "flight-window": Profile(
        "a batch in flight behind a window",
        world(
            2,
            2,
            3,
            2,
            groups=(WINDOW,),
            without=("fork", "remove_request", "reset_prefix_cache"),
            **FLYING,
        ),
        7573,
        21219,
    ),
    "flight-drafts": Profile(
        "drafts and cuts in flight",
        world(2, 2, 3, 2, "truncate", num_drafts=1, without=STAYING, **FLYING_SLOTS),
        14244,
        49598,
    ),
    "flight-unschedule": Profile(
        "a batch in flight, and less of the open one than was planned",
        world(
            *(2, 2, 2, 2, "unschedule"),
            moves_per_batch=2,
            without=(*STAYING, "fork", "append"),
            **FLYING_SLOTS,
        ),
        15521,
        56028,
        shows=("call unschedule: done",),
    ),
    "flight-merge": Profile(
        "duplicates that merge when their batch is completed",
        world(2, 2, 2, 2, duplicates="merge", publish="completed", without=SHARING, **FLYING_SLOTS),
        3335,
        11438,
    ),
    "flight-merge-late": Profile(
        "a batch in flight, blocks cached late that merge with what it writes",
        world(
            *(2, 2, 1, 1, "cache_blocks"),
            groups=(SLOT,),
            max_in_flight=1,
            num_letters=1,
            duplicates="merge",
            delays=(False, True),
            moves_per_batch=2,
            moves="calls",
            without=("fork", "append", "free", "remove_request", "reset_prefix_cache"),
        ),
        *(1612, 5174),
        shows=("goal merge",),
        not_shown={
            "call allocate_slots: refused later": "a block for each token",
            "goal abort in flight": "no request is freed",
            **NEVER_HIT,
        },
    ),
    **RUN_AHEAD,
    **LOADS_FAIL,
    **FEATURES,
    **EPOCHS,
    **POLICIES,
    **RETENTION,
    **STATES,
    **STATE_DRAFTS,
    **TAILS,
    **CLAIMS,
    **HASHES,
    **FAR,
}
