# SPDX-License-Identifier: Apache-2.0
"""Named worlds of hashes of the engine's own.

A request has none at first. The engine hands in those of its full blocks at any later moment, also
fewer than it could, or never.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.profile import (
    FLYING_SLOTS,
    STAYING,
    SWAPS,
    WINDOW,
    Profile,
    world,
)

HANDED_IN = "add_block_hashes"
OWN: dict[str, Any] = {"kinds_of_requests": ({"block_hashes": ()},)}

HASHES: dict[str, Profile] = {
    "hashes": Profile(
        "hashes of the engine's own that come late, and cuts",
        world(2, 2, 3, 3, HANDED_IN, "truncate", **OWN),
        854,
        6939,
    ),
    "hashes-swap": Profile(
        "hashes of the engine's own, a window and swaps",
        world(
            *(2, 2, 4, 2, HANDED_IN, *SWAPS),
            groups=(WINDOW,),
            num_host_blocks=2,
            num_letters=1,
            without=("fork", "reset_prefix_cache"),
            **OWN,
        ),
        3397,
        25004,
    ),
    "hashes-flight": Profile(
        "hashes of the engine's own, a batch in flight, blocks published at its end",
        world(2, 2, 2, 2, HANDED_IN, publish="completed", without=STAYING, **FLYING_SLOTS, **OWN),
        6706,
        22258,
    ),
}
