# SPDX-License-Identifier: Apache-2.0
"""Named worlds of engines that run ahead: positions are scheduled before their tokens are known.

Output is handed in at any later moment; at most two outputs are outstanding. Each world also has
what its name says: batches in flight, drafts, windows, groups, a host tier, forks, merges, loads.
Those with batches in flight list `cancel`, which is tried in any case: it withdraws keys that
output gave, so a block may be cached without its parent, and PREFIX-CLOSED and EVICT-ORDER are not
checked.
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
        world(2, 1, 4, 2, "truncate", "cancel", **{**FLYING, "num_letters": 2}),
        *(9371, 33142),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-pairs": Profile(
        "two requests and a batch in flight",
        world(2, 2, 2, 1, "truncate", "cancel", groups=(SLOT,), **FLYING),
        *(24694, 83489),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-pairs-large": Profile(
        "two requests and a batch in flight; a larger one",
        world(3, 2, 3, 2, "truncate", "cancel", **FLYING),
        *(793414, 2857638),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-pairs-full": Profile(
        "two requests of five tokens and a batch in flight",
        world(3, 2, 5, 2, "truncate", "cancel", **FLYING),
        *(6_669_465, 25_340_321),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-two": Profile(
        "two batches in flight",
        world(2, 1, 3, 2, "truncate", "cancel", **{**FLYING, "max_in_flight": 2}),
        *(31161, 134304),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-two-full": Profile(
        "two requests of five tokens, two batches in flight; what is overwritten is forgotten",
        world(3, 2, 5, 2, "truncate", "cancel", **FORGETS, **{**FLYING, "max_in_flight": 2}),
        *(9_971_579, 55_787_761),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts": Profile(
        "a draft to come, accepted or rejected",
        world(3, 1, 4, 1, "cancel", **DRAFTS),
        *(7915, 26225),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-drafts-large": Profile(
        "two requests and a draft to come",
        world(3, 2, 3, 1, "cancel", **DRAFTS),
        *(433725, 1590424),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-full": Profile(
        "two requests of five tokens, a draft to come, with cuts; what is overwritten is forgotten",
        world(4, 2, 5, 1, "truncate", "cancel", **FORGETS, **DRAFTS),
        *(5_764_243, 26_326_351),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-completed-full": Profile(
        "the same, published when their batch is completed",
        world(4, 2, 5, 1, "truncate", "cancel", publish="completed", **FORGETS, **DRAFTS),
        *(5_923_695, 27_297_817),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-two": Profile(
        "a draft to come, and two batches in flight",
        world(3, 1, 4, 1, "cancel", **{**DRAFTS, "max_in_flight": 2}),
        *(66726, 296361),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-drafts-completed": Profile(
        "a draft to come, blocks published when their batch is completed",
        world(3, 1, 4, 1, "cancel", publish="completed", **DRAFTS),
        *(8069, 26710),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-delays": Profile(
        "blocks cached late, blocks published when their batch is completed",
        world(
            *(2, 1, 4, 2, "cancel"),
            publish="completed",
            delays=(False, True),
            moves="calls",
            **FLYING,
        ),
        *(11444, 37411),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-window": Profile(
        "a draft to come behind a window",
        world(4, 1, 4, 1, "cancel", groups=(WINDOW,), **DRAFTS),
        *(43505, 141090),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-window-large": Profile(
        "a draft to come behind a window; a larger one",
        world(5, 1, 5, 1, "cancel", groups=(WINDOW,), **DRAFTS),
        *(291099, 967935),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-window-full": Profile(
        "a draft to come behind a window, with cuts",
        world(5, 1, 5, 1, "truncate", "cancel", groups=(WINDOW,), **DRAFTS),
        *(2_985_646, 10_829_399),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-chunks": Profile(
        "a draft to come, attention in chunks of two tokens",
        world(4, 1, 4, 1, "cancel", groups=(Group(1, kind="chunked_local", window=2),), **DRAFTS),
        *(43991, 142804),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-groups": Profile(
        "a draft to come in a full and a windowed group",
        world(4, 1, 3, 1, "cancel", groups=(SLOT, WINDOW), **DRAFTS),
        *(2592, 9038),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-groups-large": Profile(
        "a draft to come in a full and a windowed group; a larger one",
        world(6, 1, 5, 1, "cancel", groups=(SLOT, WINDOW), **DRAFTS),
        *(224254, 815371),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-groups-full": Profile(
        "two requests in a full and a windowed group, what is overwritten unread forgotten",
        world(6, 2, 5, 1, "truncate", "cancel", groups=(SLOT, WINDOW), **FORGETS, **FLYING),
        *(422_208, 1_630_227),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-sizes": Profile(
        "a draft to come in groups of two block sizes, what is overwritten unread forgotten",
        world(5, 1, 6, 1, "cancel", groups=(FULL, WINDOW), **FORGETS, **DRAFTS),
        *(6253, 20201),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-swap": Profile(
        "a host tier, swapped while output is to come",
        world(3, 1, 4, 2, "cancel", *SWAPS, num_host_blocks=2, **FLYING),
        *(6313, 18510),
        backend="rust",
        shows=SHOWS,
        not_shown={"call append: refused later": ROOMY},
    ),
    "ahead-swap-large": Profile(
        "a host tier, swapped and cut while output is to come",
        world(3, 1, 4, 2, "truncate", "cancel", *SWAPS, num_host_blocks=2, **FLYING),
        *(35322, 113528),
        slow=True,
        backend="rust",
        shows=SHOWS,
        not_shown={"call append: refused later": ROOMY},
    ),
    "ahead-fork": Profile(
        "forks while output is to come",
        world(2, 2, 2, 1, "cancel", groups=(SLOT,), **{**FLYING, "without": LEFT}),
        *(17923, 59787),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-fork-large": Profile(
        "forks while output is to come; a larger one",
        world(3, 2, 3, 1, "cancel", **{**FLYING, "without": LEFT}),
        *(183757, 604320),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-fork-full": Profile(
        "forks and cuts of two requests of four tokens, what is overwritten unread forgotten",
        world(4, 2, 4, 1, "truncate", "cancel", **FORGETS, **{**FLYING, "without": LEFT}),
        *(1_043_791, 4_207_179),
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
        world(3, 1, 4, 1, "pin", "unpin", "cancel", groups=(FULL,), **DRAFTS),
        *(57292, 211035),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-pins-two": Profile(
        "pinned blocks, two batches in flight and three outputs to come",
        world(
            *(3, 1, 5, 1, "pin", "unpin", "cancel"),
            groups=(FULL,),
            num_outputs=3,
            **{**FLYING, "max_in_flight": 2},
        ),
        *(1_009_634, 4_829_170),
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
        world(2, 1, 3, 1, "cancel", **{**FLYING, "without": ("fork", "reset_prefix_cache")}),
        *(1230, 3823),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-merge": Profile(
        "duplicates that merge when output comes",
        world(2, 2, 2, 1, "cancel", groups=(SLOT,), duplicates="merge", **FLYING),
        *(13926, 47528),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-loads": Profile(
        "external loads that fail while output is to come",
        world(3, 1, 2, 2, "cancel", **LOADS, **FLYING),
        *(12596, 46565),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "ahead-loads-full": Profile(
        "external loads of two requests that fail, what is overwritten unread forgotten",
        world(4, 2, 5, 2, "cancel", **LOADS, **FORGETS, **FLYING),
        *(3_566_211, 24_160_657),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-loads-by-key": Profile(
        "loads by key while output is to come, published when a batch is completed",
        world(2, 1, 3, 2, "load", "cancel", publish="completed", **BY_CALLS, **FLYING),
        *(4547, 17912),
        backend="rust",
        shows=(*SHOWS, "call load: done"),
        not_shown={"call append: refused later": ROOMY},
    ),
    "ahead-calls": Profile(
        "steps of any length planned ahead, cut and shortened, two calls in a batch",
        world(2, 1, 3, 2, "truncate", "unschedule", "cancel", **CALLS),
        *(14704, 63377),
        backend="rust",
        shows=SHOWS,
    ),
    "ahead-calls-full": Profile(
        "two requests in steps of any length planned ahead, what is overwritten unread forgotten",
        world(3, 2, 3, 2, "truncate", "unschedule", "cancel", **FORGETS, **CALLS),
        *(827_882, 5_506_285),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
}
