# SPDX-License-Identifier: Apache-2.0
"""Named worlds of recurrent states beside attention, whose hits end at whole blocks.

They follow registry.py.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.features import NEVER_REFUSED, ROOMY
from kvcore.check.profiles.profile import FULL, STATE, SWAPS, Profile, world

HYBRID: dict[str, Any] = {"groups": (FULL, STATE)}
ALONE: dict[str, Any] = {**HYBRID, "num_letters": 1}

STATES: dict[str, Profile] = {
    "states": Profile("recurrent states beside attention", world(4, 2, 3, 3, **HYBRID), 533, 4126),
    "states-cut": Profile(
        "recurrent states, cut, two moves in a batch",
        world(4, 1, 4, 4, "truncate", "unschedule", moves_per_batch=2, without=("fork",), **ALONE),
        149,
        3600,
        not_shown=NEVER_REFUSED,
    ),
    "states-swap": Profile(
        "recurrent states, swapped to and fro",
        world(
            *(4, 2, 3, 3, *SWAPS),
            num_host_blocks=4,
            without=("remove_request", "reset_prefix_cache"),
            **ALONE,
        ),
        205,
        791,
    ),
    "states-loads": Profile(
        "recurrent states, stored and loaded by key",
        world(4, 1, 4, 4, "load", "store", without=("fork",), **ALONE),
        1190,
        8796,
        not_shown={**NEVER_REFUSED, "call load: refused later": ROOMY},
    ),
    "states-fork": Profile(
        "recurrent states, forks, two calls in a batch",
        world(
            *(5, 2, 3, 3),
            moves_per_batch=2,
            moves="calls",
            without=("append", "remove_request", "reset_prefix_cache"),
            **ALONE,
        ),
        456,
        12164,
    ),
    "states-flight": Profile(
        "recurrent states, a batch in flight",
        world(4, 1, 3, 3, max_in_flight=1, moves="calls", without=("fork",), **ALONE),
        4164,
        13157,
        not_shown=NEVER_REFUSED,
    ),
    "states-completed": Profile(
        "recurrent states, a batch in flight that publishes at its end",
        world(4, 1, 3, 3, max_in_flight=1, publish="completed", without=("fork",), **ALONE),
        2038,
        6179,
        not_shown=NEVER_REFUSED,
    ),
}
