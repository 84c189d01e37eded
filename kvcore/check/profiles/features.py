# SPDX-License-Identifier: Apache-2.0
"""Named worlds of single features: each has an option that the other worlds leave out.

They follow registry.py. Each world was added for a seeded bug that no other named world found then.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.profile import FULL, SLOT, SWAPS, WINDOW, Profile, world
from kvcore.types.extra_inputs import LoRA
from kvcore.types.groups import Group

CHUNK = Group(1, kind="chunked_local", window=2)
NARROW = Group(1, kind="sliding_window", window=3)
ENCODER = Group(2, kind="cross_attention")
KINDS: tuple[dict[str, Any], ...] = ({}, {"cache_salt": "one"}, {"lora": LoRA("one")})

ROOMY = "the pool holds all that the requests can grow to"
NEVER_REFUSED = {f"call {name}: refused later": ROOMY for name in ("allocate_slots", "append")}

FEATURES: dict[str, Profile] = {
    "chunks": Profile(
        "attention in chunks of two tokens", world(2, 2, 3, 3, groups=(CHUNK,)), 587, 4554
    ),
    "chunks-swap": Profile(
        "requests that are swapped out at the end of a chunk, with no block, two moves in a batch",
        world(
            *(3, 1, 3, 2, *SWAPS),
            groups=(CHUNK,),
            num_host_blocks=2,
            num_letters=1,
            moves_per_batch=2,
            without=("fork", "reset_prefix_cache"),
        ),
        *(189, 1759),
        not_shown=NEVER_REFUSED
        | {
            "call swap_in: refused later": ROOMY,
            "command SwapIn": "what one request left on the device is still found there",
        },
    ),
    "encoder": Profile(
        "an encoder's group, cut and swapped",
        world(
            *(4, 2, 3, 3, "truncate", *SWAPS),
            groups=(SLOT, ENCODER),
            num_encoder=3,
            enable_caching=False,
            num_host_blocks=4,
        ),
        47,
        367,
        not_shown={"command CopyOnWrite": "an encoder's blocks are not written again"},
    ),
    "eagle": Profile(
        "a look-up that drops the last hit block",
        world(3, 2, 3, 3, groups=(SLOT,), use_eagle=True),
        508,
        3920,
    ),
    "lookahead": Profile(
        "a lookahead slot in each allocation", world(2, 2, 4, 4, num_lookahead=1), 331, 2830
    ),
    "salts": Profile(
        "salts and adapters, loads by key",
        world(3, 2, 2, 2, "load", groups=(SLOT,), kinds_of_requests=KINDS, num_letters=1),
        499,
        3487,
        not_shown={"call load: refused later": "a load takes a block, and one is always free"},
    ),
    "zeroing": Profile(
        "new blocks are zeroed",
        world(2, 2, 3, 3, groups=(Group(2, zero_new_blocks=True),)),
        205,
        1526,
    ),
    "watermark": Profile(
        "an admission leaves a block free",
        world(2, 2, 3, 3, *SWAPS, num_host_blocks=2, watermark_blocks=1),
        561,
        4474,
    ),
    "preallocated": Profile(
        "spare blocks for two more tokens",
        world(2, 2, 4, 4, num_preallocate_tokens=2),
        232,
        1942,
    ),
    "preallocated-groups": Profile(
        "spare blocks for two more tokens, in two groups",
        world(5, 2, 3, 1, groups=(FULL, NARROW), num_preallocate_tokens=2),
        *(445, 2506),
        not_shown={"goal trim": "no request is longer than the window"},
    ),
    "fours": Profile(
        "three moves in a batch inside blocks of four",
        world(
            *(2, 2, 5, 2),
            groups=(Group(4),),
            moves_per_batch=3,
            num_letters=1,
            without=("remove_request", "reset_prefix_cache"),
        ),
        131,
        3660,
    ),
    "cuts": Profile(
        "cuts inside a block of three",
        world(2, 1, 4, 4, "truncate", groups=(Group(3),), without=("fork",)),
        55,
        296,
        not_shown=NEVER_REFUSED,
    ),
    "cuts-lookahead": Profile(
        "cut tokens added again, computed in part with a lookahead slot behind",
        world(
            *(2, 1, 4, 4, "truncate", "add_tokens"),
            groups=(Group(3),),
            num_letters=1,
            num_lookahead=1,
            moves="calls",
            without=("fork", "append"),
        ),
        69,
        479,
        not_shown={"call allocate_slots: refused later": ROOMY},
    ),
    "calls": Profile(
        "each call by itself, cuts and events",
        world(2, 2, 4, 4, "truncate", moves="calls", enable_events=True),
        1781,
        19166,
    ),
    "three": Profile(
        "three moves in a batch, cuts and swaps",
        world(
            *(2, 2, 3, 3, "truncate", *SWAPS),
            num_host_blocks=1,
            moves_per_batch=3,
            num_letters=1,
            without=("append", "remove_request", "reset_prefix_cache"),
        ),
        172,
        16016,
        shows=("call free: HitInOpenBatch",),
        not_shown={"command CopyOnWrite": "no request appends, so no shared block is written"},
    ),
    "pins-three": Profile(
        "blocks pinned between the calls of a batch, three moves in it",
        world(
            *(2, 1, 3, 3, "pin", "unpin"),
            num_letters=1,
            moves_per_batch=3,
            moves="calls",
            without=("fork", "reset_prefix_cache"),
        ),
        *(76, 5805),
    ),
    "unschedule": Profile(
        "what the open batch computes made shorter, three moves in a batch",
        world(
            *(3, 2, 4, 4, "unschedule"),
            moves_per_batch=3,
            num_letters=1,
            without=("remove_request", "reset_prefix_cache"),
        ),
        579,
        32123,
        shows=("call unschedule: done", "call unschedule: HitInOpenBatch"),
    ),
    "window": Profile(
        "blocks behind a window given back by a call",
        world(
            *(3, 1, 4, 4, "remove_skipped_blocks"),
            groups=(WINDOW,),
            moves_per_batch=2,
            num_letters=1,
            without=("fork",),
        ),
        233,
        4963,
        not_shown=NEVER_REFUSED,
    ),
    "caps": Profile(
        "steps of one token behind a window",
        world(
            *(4, 1, 5, 5),
            groups=(WINDOW,),
            max_num_batched_tokens=1,
            num_letters=1,
            without=("fork",),
            moves="calls",
        ),
        3347,
        19166,
        not_shown=NEVER_REFUSED,
    ),
}
