# SPDX-License-Identifier: Apache-2.0
"""Named worlds of the eviction policies that order the queue by rank.

A policy may cost hits, never correctness: every property holds in every order of eviction, except
those of prefixes that stay whole, which hold for some policies only. Times are folded
(remembered.py); `learned` keeps counting, so its world is explored up to a depth, in
tests/check/test_policies.py.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.epochs import ADVANCE, SHOWS
from kvcore.check.profiles.profile import SHARING, SLOT, Profile, world

SMALL: dict[str, Any] = {"groups": (SLOT,), "without": ("reset_prefix_cache",)}

POLICIES: dict[str, Profile] = {
    "policy-due": Profile(
        "what waiting requests look up leaves last",
        world(2, 2, 3, 3, eviction="queue_aware"),
        276,
        1862,
    ),
    "policy-lru2": Profile(
        "the use before the last decides what leaves",
        world(2, 2, 2, 2, eviction="lru2", **SMALL),
        10327,
        58074,
    ),
    "policy-s3fifo": Profile(
        "a small and a main queue decide what leaves",
        world(2, 2, 2, 2, eviction="s3fifo", num_letters=1, **SMALL),
        2798,
        11715,
    ),
    "policy-epoch": Profile(
        "weights change while requests wait for what is cached",
        world(2, 2, 2, 2, ADVANCE, groups=(SLOT,), eviction="queue_aware", without=SHARING),
        408,
        2060,
        shows=SHOWS,
    ),
}
