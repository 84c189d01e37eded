# SPDX-License-Identifier: Apache-2.0
"""Named worlds of engines that run ahead: positions are scheduled before their tokens are known.

Output is handed in at any later moment; at most two outputs are outstanding. Each world also has
what its name says: batches in flight, drafts, windows, groups, a host tier, forks, merges, loads.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.profile import FULL, SLOT, SWAPS, WINDOW, Profile, world
from kvcore.types.groups import Group

LEFT = ("remove_request", "reset_prefix_cache")
ALONE = ("fork", *LEFT)
AHEAD: dict[str, Any] = {"num_output_placeholders": 1, "num_letters": 1}
FLYING: dict[str, Any] = {**AHEAD, "max_in_flight": 1, "without": ALONE}
DRAFTS: dict[str, Any] = {**FLYING, "num_output_placeholders": 2}
REJECTIONS: dict[str, Any] = {**AHEAD, "num_output_placeholders": 3}
FORGETS: dict[str, Any] = {"forgets_overwritten": True}
BY_CALLS: dict[str, Any] = {"groups": (SLOT,), "moves": "calls"}
CALLS: dict[str, Any] = {**FLYING, **BY_CALLS, "moves_per_batch": 2}
LOADS: dict[str, Any] = {**BY_CALLS, "num_external": 1, "loads_fail": True}
ROOMY = "one request never lacks a block"
NEVER_REFUSED = {f"call {name}: refused later": ROOMY for name in ("allocate_slots", "append")}
SHOWS = ("call add_tokens: done", "call add_tokens: StaleOutput", "goal stale output")

RUN_AHEAD: dict[str, Profile] = {
    "ahead": Profile(
        "steps planned before the tokens of the ones before them are known",
        world(3, 2, 3, 2, "truncate", without=ALONE, **AHEAD),
        *(45795, 114856),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-large": Profile(
        "steps planned before the tokens of the ones before them are known; a larger one",
        world(3, 2, 5, 2, "truncate", without=ALONE, **AHEAD),
        *(296201, 778667),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-fours": Profile(
        "steps planned ahead inside blocks of four",
        world(2, 1, 5, 2, without=ALONE, groups=(Group(4),), **AHEAD),
        *(380, 765),
        not_shown=NEVER_REFUSED,
    ),
    "ahead-moves": Profile(
        "steps planned ahead, requests that leave in the step that schedules them",
        world(3, 1, 3, 1, groups=(SLOT,), moves_per_batch=2, without=ALONE, **AHEAD),
        *(2361, 5076),
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-letters": Profile(
        "a batch in flight whose output may be either of two tokens",
        world(2, 1, 4, 2, "truncate", **{**FLYING, "num_letters": 2}),
        *(7871, 27962),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-pairs": Profile(
        "two requests and a batch in flight",
        world(2, 2, 2, 1, "truncate", groups=(SLOT,), **FLYING),
        *(24518, 83005),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-pairs-large": Profile(
        "two requests and a batch in flight; a larger one",
        world(3, 2, 3, 2, "truncate", **FLYING),
        *(735820, 2633007),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-pairs-full": Profile(
        "two requests of five tokens and a batch in flight",
        world(3, 2, 5, 2, "truncate", **FLYING),
        *(6_089_775, 22_969_112),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-two": Profile(
        "two batches in flight",
        world(2, 1, 3, 2, "truncate", **{**FLYING, "max_in_flight": 2}),
        *(27120, 115964),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-two-full": Profile(
        "two requests of five tokens, two batches in flight; what is overwritten is forgotten",
        world(3, 2, 5, 2, "truncate", **FORGETS, **{**FLYING, "max_in_flight": 2}),
        *(6_133_693, 34_119_994),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts": Profile(
        "a draft to come, accepted or rejected",
        world(3, 1, 4, 1, **DRAFTS),
        *(7274, 24303),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-drafts-large": Profile(
        "two requests and a draft to come",
        world(3, 2, 3, 1, **DRAFTS),
        *(391735, 1436660),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-full": Profile(
        "two requests of five tokens, a draft to come, with cuts; what is overwritten is forgotten",
        world(4, 2, 5, 1, "truncate", **FORGETS, **DRAFTS),
        *(3_715_868, 17_061_511),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-completed-full": Profile(
        "the same, published when their batch is completed",
        world(4, 2, 5, 1, "truncate", publish="completed", **FORGETS, **DRAFTS),
        *(4_000_329, 18_425_584),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-two": Profile(
        "a draft to come, and two batches in flight",
        world(3, 1, 4, 1, **{**DRAFTS, "max_in_flight": 2}),
        *(57137, 250641),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-completed": Profile(
        "a draft to come, blocks published when their batch is completed",
        world(3, 1, 4, 1, publish="completed", **DRAFTS),
        *(7458, 24846),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-delays": Profile(
        "blocks cached late, blocks published when their batch is completed",
        world(
            *(2, 1, 4, 2),
            publish="completed",
            delays=(False, True),
            moves="calls",
            **FLYING,
        ),
        *(10821, 35595),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-window": Profile(
        "a draft to come behind a window",
        world(4, 1, 4, 1, groups=(WINDOW,), **DRAFTS),
        *(39631, 130147),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-window-large": Profile(
        "a draft to come behind a window; a larger one",
        world(5, 1, 5, 1, groups=(WINDOW,), **DRAFTS),
        *(209516, 693194),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-window-full": Profile(
        "a draft to come behind a window, with cuts",
        world(5, 1, 5, 1, "truncate", groups=(WINDOW,), **DRAFTS),
        *(2_476_915, 9_044_166),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-chunks": Profile(
        "a draft to come, attention in chunks of two tokens",
        world(4, 1, 4, 1, groups=(Group(1, kind="chunked_local", window=2),), **DRAFTS),
        *(42319, 138300),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-groups": Profile(
        "a draft to come in a full and a windowed group",
        world(4, 1, 3, 1, groups=(SLOT, WINDOW), **DRAFTS),
        *(2559, 8944),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-groups-large": Profile(
        "a draft to come in a full and a windowed group; a larger one",
        world(6, 1, 5, 1, groups=(SLOT, WINDOW), **DRAFTS),
        *(220064, 802115),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-groups-full": Profile(
        "two requests in a full and a windowed group, what is overwritten unread forgotten",
        world(6, 2, 5, 1, "truncate", groups=(SLOT, WINDOW), **FORGETS, **FLYING),
        *(330_920, 1_289_822),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-sizes": Profile(
        "a draft to come in groups of two block sizes, what is overwritten unread forgotten",
        world(5, 1, 6, 1, groups=(FULL, WINDOW), **FORGETS, **DRAFTS),
        *(3708, 11976),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-swap": Profile(
        "a host tier, swapped while output is to come",
        world(3, 1, 4, 2, *SWAPS, num_host_blocks=2, **FLYING),
        *(5591, 16285),
        backend="rust",
        shows=SHOWS,
        not_shown={"call append: refused later": ROOMY},
    ),
    "ahead-swap-large": Profile(
        "a host tier, swapped and cut while output is to come",
        world(3, 1, 4, 2, "truncate", *SWAPS, num_host_blocks=2, **FLYING),
        *(31185, 100230),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown={"call append: refused later": ROOMY},
    ),
    "ahead-fork": Profile(
        "forks while output is to come",
        world(2, 2, 2, 1, groups=(SLOT,), **{**FLYING, "without": LEFT}),
        *(17814, 59504),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-fork-large": Profile(
        "forks while output is to come; a larger one",
        world(3, 2, 3, 1, **{**FLYING, "without": LEFT}),
        *(160996, 526386),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-fork-full": Profile(
        "forks and cuts of two requests of four tokens, what is overwritten unread forgotten",
        world(4, 2, 4, 1, "truncate", **FORGETS, **{**FLYING, "without": LEFT}),
        *(738_921, 2_981_852),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown={
            f"call {name}: refused later": "two requests never lack a block"
            for name in ("allocate_slots", "append")
        },
    ),
    "ahead-pins": Profile(
        "drafts to come in blocks that are pinned, whose copies are cancelled",
        world(3, 1, 4, 1, "pin", "unpin", groups=(FULL,), **DRAFTS),
        *(51833, 192395),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-pins-two": Profile(
        "pinned blocks, two batches in flight and three outputs to come",
        world(
            *(3, 1, 5, 1, "pin", "unpin"),
            groups=(FULL,),
            num_outputs=3,
            **{**FLYING, "max_in_flight": 2},
        ),
        *(695_560, 3_310_531),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-rejections": Profile(
        "two drafts to come in blocks that are pinned, whose rejection ends in an earlier block",
        world(3, 1, 5, 1, "pin", "unpin", groups=(FULL,), without=ALONE, **REJECTIONS),
        *(67788, 191240),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-leave": Profile(
        "requests removed while output is to come",
        world(2, 1, 3, 1, **{**FLYING, "without": ("fork", "reset_prefix_cache")}),
        *(1107, 3458),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-merge": Profile(
        "duplicates that merge when output comes",
        world(2, 2, 2, 1, groups=(SLOT,), duplicates="merge", **FLYING),
        *(13873, 47394),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-loads": Profile(
        "external loads that fail while output is to come",
        world(3, 1, 2, 2, **LOADS, **FLYING),
        *(12556, 46459),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-loads-full": Profile(
        "external loads of two requests that fail, what is overwritten unread forgotten",
        world(4, 2, 5, 2, **LOADS, **FORGETS, **FLYING),
        *(3_316_420, 22_563_569),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-loads-by-key": Profile(
        "loads by key while output is to come, published when a batch is completed",
        world(2, 1, 3, 2, "load", publish="completed", **BY_CALLS, **FLYING),
        *(4052, 16161),
        backend="rust",
        shows=(*SHOWS, "call load: done"),
        not_shown={"call append: refused later": ROOMY},
    ),
    "ahead-calls": Profile(
        "steps of any length planned ahead, cut and shortened, two calls in a batch",
        world(2, 1, 3, 2, "truncate", "unschedule", **CALLS),
        *(14242, 61365),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-calls-full": Profile(
        "two requests in steps of any length planned ahead, what is overwritten unread forgotten",
        world(3, 2, 3, 2, "truncate", "unschedule", **FORGETS, **CALLS),
        *(700_640, 4_720_680),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
}
