# SPDX-License-Identifier: Apache-2.0
"""Named worlds of drafts beside recurrent states: each draft has a state of its own until it is
accepted or dropped.

They follow registry.py.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.features import NEVER_REFUSED, ROOMY
from kvcore.check.profiles.profile import FULL, SWAPS, Profile, world
from kvcore.types.groups import Group

LEFT = ("remove_request", "reset_prefix_cache")
DRAFTS: dict[str, Any] = {
    "groups": (FULL, Group(2, kind="state", draft_states=1)),
    "num_letters": 1,
    "num_drafts": 1,
}
ALONE: dict[str, Any] = {**DRAFTS, "without": ("fork", *LEFT)}
FLYING: dict[str, Any] = {**ALONE, "max_in_flight": 1}
THREE: dict[str, Any] = {
    **ALONE,
    "groups": (FULL, Group(4, kind="state", draft_states=3)),
    "num_drafts": 3,
}

STATE_DRAFTS: dict[str, Profile] = {
    "states-drafts": Profile(
        "recurrent states after drafts, of which any number is accepted",
        world(6, 2, 4, 3, **ALONE),
        *(2023, 7291),
        backend="rust",
    ),
    "states-drafts-cut": Profile(
        "recurrent states after drafts, cut and rewound, two moves in a batch",
        world(
            *(5, 1, 5, 3, "truncate", "rewind", "unschedule", "remove_skipped_blocks"),
            moves_per_batch=2,
            **ALONE,
        ),
        *(694, 18299),
        backend="rust",
        not_shown=NEVER_REFUSED,
    ),
    "states-drafts-chunks": Profile(
        "recurrent states after drafts, steps of any length, two in a batch",
        world(
            *(5, 1, 5, 4, "truncate"),
            moves="calls",
            moves_per_batch=2,
            **{**DRAFTS, "without": ("append", "fork", *LEFT)},
        ),
        *(1285, 33518),
        backend="rust",
        not_shown={"call allocate_slots: refused later": ROOMY},
    ),
    "states-drafts-moved": Profile(
        "recurrent states after drafts, a step that later calls move, three in a batch",
        world(
            *(5, 1, 4, 3, "truncate"),
            moves="calls",
            moves_per_batch=3,
            **{**DRAFTS, "without": ("append", "fork", "free", *LEFT)},
        ),
        *(247, 3941),
        backend="rust",
        not_shown={"call allocate_slots: refused later": ROOMY},
    ),
    "states-drafts-far": Profile(
        "recurrent states after drafts, blocks behind the state before the step",
        world(
            *(6, 1, 6, 5, "remove_skipped_blocks"),
            moves="calls",
            **{**DRAFTS, "without": ("append", "fork", "free", *LEFT)},
        ),
        *(170, 424),
        not_shown={
            "call allocate_slots: refused later": ROOMY,
            **dict.fromkeys(("command Touch", "goal full hit"), "the only request is never freed"),
        },
    ),
    "states-drafts-three": Profile(
        "recurrent states after three drafts, over the end of a block",
        world(8, 1, 6, 3, "truncate", **THREE),
        *(3847, 15120),
        backend="rust",
        not_shown=NEVER_REFUSED,
    ),
    "states-drafts-fork": Profile(
        "recurrent states after drafts, forks",
        world(6, 2, 4, 3, **{**DRAFTS, "without": LEFT}),
        *(2418, 9270),
        backend="rust",
    ),
    "states-drafts-swap": Profile(
        "recurrent states after drafts, swapped to and fro",
        world(4, 2, 3, 3, *SWAPS, num_host_blocks=6, **ALONE),
        *(573, 2847),
    ),
    "states-drafts-swap-three": Profile(
        "recurrent states after drafts, steps of two calls that are swapped out, three in a batch",
        world(
            *(4, 1, 4, 3, *SWAPS),
            num_host_blocks=4,
            moves="calls",
            moves_per_batch=3,
            **{**DRAFTS, "without": ("append", "fork", *LEFT)},
        ),
        *(224, 12634),
        backend="rust",
        not_shown={f"call {name}: refused later": ROOMY for name in ("allocate_slots", "swap_in")},
    ),
    "states-drafts-marks": Profile(
        "recurrent states after drafts, and those that calls keep inside a block",
        world(
            *(5, 1, 5, 3),
            marks=True,
            moves="calls",
            **{**THREE, "without": ("append", "fork", *LEFT)},
        ),
        *(783, 4726),
        not_shown={"call allocate_slots: refused later": ROOMY},
    ),
    "states-drafts-tails": Profile(
        "recurrent states after drafts, hits inside blocks",
        world(5, 2, 4, 3, hash_block_size=1, **ALONE),
        *(1100, 4057),
    ),
    "states-drafts-external": Profile(
        "recurrent states after drafts, and those that a connector brings",
        world(5, 1, 4, 4, num_external=2, moves="calls", **ALONE),
        *(386, 3046),
        not_shown=NEVER_REFUSED,
    ),
    "states-drafts-flight": Profile(
        "recurrent states after drafts, a batch in flight",
        world(4, 1, 4, 3, **FLYING),
        *(4483, 11887),
        backend="rust",
        not_shown={"call append: refused later": ROOMY},
    ),
    "states-drafts-completed": Profile(
        "recurrent states after drafts, a batch in flight that publishes at its end",
        world(5, 1, 3, 3, publish="completed", **FLYING),
        *(7880, 20383),
        backend="rust",
        not_shown=NEVER_REFUSED,
    ),
    "states-drafts-two": Profile(
        "recurrent states after drafts, two batches in flight; a larger one",
        world(5, 1, 3, 2, **{**FLYING, "max_in_flight": 2}),
        *(80228, 312525),
        slow=True,
        backend="rust",
    ),
    "states-drafts-large": Profile(
        "recurrent states after drafts, two requests, cut and rewound; a larger one",
        world(6, 2, 5, 3, "truncate", "rewind", **ALONE),
        *(12390, 78116),
        slow=True,
        backend="rust",
    ),
}
