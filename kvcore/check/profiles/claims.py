# SPDX-License-Identifier: Apache-2.0
"""Named worlds whose content must be kept: prefixes are pinned, or tenants have floors.

Blocks hold one token unless stated otherwise. A pool leaves room for one request beside the content
that is pinned or kept, so that no request waits for a pin to end, or for a tenant.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.features import NEVER_REFUSED
from kvcore.check.profiles.profile import (
    FLYING_SLOTS,
    SHARING,
    SLOT,
    STAYING,
    SWAPS,
    Profile,
    world,
)
from kvcore.check.profiles.retention import LONG, SHORT, WISHES
from kvcore.types.groups import Group

PINS = ("pin_prefix", "unpin_prefix")
SHOWS = tuple(f"call {name}: done" for name in PINS)
ROOM: dict[str, Any] = {"max_model_len": 2, "max_pinned_blocks": 1}
TENANTS: dict[str, Any] = {
    "kinds_of_requests": ({}, {"cache_salt": "a"}),
    "floors": {"a": 1},
    "max_model_len": 2,
    "num_letters": 1,
}
WISHING = ({**LONG, "cache_salt": "a"}, SHORT)

CLAIMS: dict[str, Profile] = {
    "prefix-pins": Profile(
        "prefixes pinned by name, and blocks by their ids",
        world(
            *(3, 2, 2, 2, *PINS, "pin", "unpin"),
            groups=(SLOT,),
            num_pins=2,
            num_letters=1,
            without=SHARING,
            **ROOM,
        ),
        4392,
        33128,
        backend="rust",
        shows=(*SHOWS, "call pin_prefix: TooManyPinned"),
    ),
    "prefix-pins-fork": Profile(
        "prefixes pinned by name, requests fork, append and are cut",
        world(
            *(4, 2, 3, 2, *PINS, "truncate"),
            groups=(SLOT,),
            num_letters=1,
            max_model_len=3,
            max_pinned_blocks=1,
        ),
        2836,
        20037,
        backend="rust",
        shows=SHOWS,
    ),
    "prefix-pins-window": Profile(
        "prefixes pinned by name in two groups, of which one gives blocks back",
        world(
            *(10, 1, 3, 3, *PINS),
            groups=(SLOT, Group(1, kind="sliding_window", window=2)),
            max_model_len=3,
            max_pinned_blocks=4,
            num_letters=1,
            without=("fork", "reset_prefix_cache"),
        ),
        47975,
        150362,
        backend="rust",
        not_shown=NEVER_REFUSED,
        shows=(*SHOWS, "call pin_prefix: NothingToPin"),
    ),
    "prefix-pins-epoch": Profile(
        "prefixes pinned by name, weights that change",
        world(3, 2, 2, 2, *PINS, "advance_epoch", groups=(SLOT,), without=SHARING, **ROOM),
        3353,
        21089,
        backend="rust",
        shows=(*SHOWS, "call pin_prefix: StaleRequest"),
    ),
    "prefix-pins-retention": Profile(
        "prefixes pinned by name, levels, and time that passes",
        world(
            *(3, 2, 2, 2, *PINS, "tick"),
            groups=(SLOT,),
            num_letters=1,
            without=SHARING,
            **(ROOM | WISHES),
        ),
        25477,
        151998,
        backend="rust",
        shows=SHOWS,
    ),
    "prefix-pins-swap": Profile(
        "prefixes pinned by name, requests are swapped",
        world(
            *(3, 2, 2, 2, *PINS, *SWAPS), groups=(SLOT,), num_host_blocks=2, without=SHARING, **ROOM
        ),
        2732,
        17820,
        backend="rust",
        shows=SHOWS,
    ),
    "prefix-pins-delays": Profile(
        "prefixes pinned by name, whose own blocks are cached late, two moves in a batch",
        world(
            *(3, 2, 2, 2, *PINS),
            groups=(SLOT,),
            num_letters=1,
            delays=(False, True),
            moves="calls",
            moves_per_batch=2,
            without=SHARING,
            **ROOM,
        ),
        906,
        59317,
        backend="rust",
        shows=(*SHOWS, "call pin_prefix: NothingToPin"),
    ),
    "prefix-pins-flight": Profile(
        "prefixes pinned by name, a batch in flight",
        world(3, 2, 2, 2, *PINS, without=STAYING, **FLYING_SLOTS, **ROOM),
        16812,
        49152,
        backend="rust",
        shows=SHOWS,
    ),
    "floors": Profile(
        "a tenant with a floor, and one without",
        world(3, 2, 2, 2, "evict_blocks", groups=(SLOT,), without=("fork",), **TENANTS),
        1485,
        11916,
        backend="rust",
    ),
    "floors-epoch": Profile(
        "a tenant with a floor, weights that change",
        world(
            *(3, 2, 2, 2, "advance_epoch"),
            groups=(SLOT,),
            without=SHARING,
            **TENANTS,
        ),
        1771,
        9337,
        backend="rust",
    ),
    "floors-retention": Profile(
        "tenants with floors and levels, time that passes",
        world(
            *(3, 2, 2, 2, "tick"),
            groups=(SLOT,),
            without=SHARING,
            **(TENANTS | {"eviction": "retention", "kinds_of_requests": WISHING}),
        ),
        4087,
        20804,
        backend="rust",
    ),
    "floors-due": Profile(
        "a tenant with a floor, and what waiting requests look up",
        world(3, 2, 2, 2, groups=(SLOT,), eviction="queue_aware", without=SHARING, **TENANTS),
        483,
        2214,
        backend="rust",
    ),
    "floors-flight": Profile(
        "a tenant with a floor, a batch in flight",
        world(3, 2, 2, 2, without=STAYING, **(FLYING_SLOTS | TENANTS)),
        26105,
        67852,
        backend="rust",
    ),
}
