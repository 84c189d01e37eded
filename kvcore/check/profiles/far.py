# SPDX-License-Identifier: Apache-2.0
"""Named worlds with a far tier, whose answers may be wrong or late at any moment.

The client is the code that the runtime uses (kvcore/far); blocks hold one token unless a sentence
says otherwise, and prompts have all their tokens at once. The tier has the pages of the first
tokens of a prompt when a run begins. Only Python explores them.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.check.profiles.profile import FULL, SLOT, Profile, world
from kvcore.check.world.world import Far, World

WITHOUT = ("fork", "append", "reset_prefix_cache")


def far_world(num_blocks: int, num_requests: int, num_tokens: int, far: Far, **more: Any) -> World:
    """Make a world of this size above a far tier."""
    more = {"num_prompt": num_tokens, "groups": (SLOT,), "num_letters": 1, **more}
    prompt = more.pop("num_prompt")
    sizes = (num_blocks, num_requests, num_tokens, prompt, "load", "store")
    return world(*sizes, without=WITHOUT, far=far, **more)


ONE = Far(stored=(0,))
TWO = Far(stored=(0, 0), num_slots=2, num_faults=2)
ALONE = "a request that is alone always has room"
NO_REFUSAL = {"call load: refused later": ALONE}

FAR: dict[str, Profile] = {
    "far": Profile(
        "a far tier with one fault, and one slot",
        far_world(2, 1, 2, ONE),
        1838,
        6150,
        not_shown=NO_REFUSAL,
    ),
    "far-epochs": Profile(
        "a far tier without faults, and weights that change once",
        far_world(2, 1, 2, attrs.evolve(ONE, num_faults=0, num_epochs=1)),
        1637,
        5017,
        slow=True,
        shows=("call advance_epoch: done", "move weigh"),
        not_shown=NO_REFUSAL,
    ),
    "far-flight": Profile(
        "a far tier without faults, and a batch in flight",
        far_world(2, 1, 2, attrs.evolve(ONE, num_faults=0), max_in_flight=1),
        4868,
        16472,
        slow=True,
    ),
    "far-pages": Profile(
        "a far tier with one fault, and chains of two pages in two slots",
        far_world(3, 1, 3, Far(stored=(0, 0), num_slots=2)),
        3975,
        12946,
        slow=True,
        not_shown=NO_REFUSAL,
    ),
    "far-blocks": Profile(
        "a far tier with two faults, two slots, and blocks of two tokens",
        far_world(2, 1, 4, TWO, groups=(FULL,)),
        8830,
        36782,
        slow=True,
        not_shown=NO_REFUSAL,
    ),
    "far-blocks-flight": Profile(
        "a far tier with two faults, two slots, blocks of two tokens, and a batch in flight",
        far_world(2, 1, 4, TWO, groups=(FULL,), max_in_flight=1),
        269810,
        1269719,
        slow=True,
    ),
    "far-pairs": Profile(
        "a far tier with one fault, one slot and two requests",
        far_world(2, 2, 2, ONE),
        18182,
        84106,
        slow=True,
        not_shown={
            "call load: refused later": "blocks that are held are those that the other would load",
            "goal duplicates": "one request begins in a batch, and the next one hits its blocks",
        },
    ),
}
