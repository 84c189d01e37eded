# SPDX-License-Identifier: Apache-2.0
"""Named worlds in which external loads fail, each before or after any move of an engine.

Blocks hold one token, so that every token of a load has a block of its own; in `loads-fail-inside`
a load begins inside a block that already has tokens. A load can fail from each of its tokens on.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.profile import (
    FLYING_SLOTS,
    SHARING,
    SLOT,
    STAYING,
    SWAPS,
    WINDOW,
    Profile,
    world,
)

FAILING: dict[str, Any] = {"num_external": 1, "loads_fail": True, "moves": "calls"}
IN_FLIGHT: dict[str, Any] = {**FAILING, **FLYING_SLOTS}
AGAIN: dict[str, Any] = {**IN_FLIGHT, "num_external": 2, "max_in_flight": 2}
LEAVING = (2, 2, 2, 2, "truncate", *SWAPS)
SHOWS = ("call rewind: done", "goal reached")

LOADS_FAIL: dict[str, Profile] = {
    "loads-fail": Profile(
        "external loads that fail; requests are cut, swapped and forked meanwhile",
        world(2, 2, 2, 2, "truncate", *SWAPS, groups=(SLOT,), num_host_blocks=2, **FAILING),
        879,
        18812,
        backend="both",
        shows=SHOWS,
    ),
    "loads-fail-pairs": Profile(
        "two calls in a batch that loads",
        world(
            *(2, 2, 2, 2),
            groups=(SLOT,),
            moves_per_batch=2,
            without=("reset_prefix_cache",),
            **FAILING,
        ),
        217,
        61199,
        backend="rust",
        shows=SHOWS,
    ),
    "loads-fail-merge": Profile(
        "duplicates of loaded blocks that merge",
        world(
            *(2, 2, 2, 2),
            groups=(SLOT,),
            moves_per_batch=2,
            duplicates="merge",
            without=SHARING,
            **FAILING,
        ),
        147,
        40063,
        backend="rust",
        shows=SHOWS,
    ),
    "loads-fail-completed": Profile(
        "blocks published when the batch that loads is completed",
        world(2, 2, 3, 3, "truncate", groups=(SLOT,), publish="completed", **FAILING),
        508,
        25305,
        backend="rust",
        shows=SHOWS,
    ),
    "loads-fail-two": Profile(
        "external loads of two requests in one batch, whose blocks merge",
        world(
            *(4, 2, 2, 2, "evict_blocks"),
            groups=(SLOT,),
            num_letters=1,
            moves_per_batch=2,
            duplicates="merge",
            without=STAYING,
            **FAILING,
        ),
        *(225, 54350),
        backend="rust",
        shows=SHOWS,
        not_shown={"call allocate_slots: refused later": "a block for each token"},
    ),
    "loads-fail-inside": Profile(
        "loads that begin inside a block, which may merge with one that was computed",
        world(
            *(2, 2, 2, 2),
            duplicates="merge",
            num_letters=1,
            without=("append", "reset_prefix_cache"),
            **FAILING,
        ),
        50,
        703,
        backend="both",
        shows=(*SHOWS, "goal merge"),
        not_shown={"call allocate_slots: refused later": "each request needs one block at most"},
    ),
    "loads-fail-window": Profile(
        "loads behind a window",
        world(4, 2, 3, 3, groups=(SLOT, WINDOW), **FAILING),
        3422,
        166449,
        backend="rust",
        shows=SHOWS,
    ),
    "loads-fail-4x2x4": Profile(
        "loads of two tokens, every way to leave",
        world(
            *(4, 2, 4, 4, "truncate", *SWAPS),
            groups=(SLOT,),
            num_host_blocks=4,
            num_letters=1,
            **{**FAILING, "num_external": 2},
        ),
        43520,
        3085655,
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "loads-fail-4x2x4-completed": Profile(
        "the same, published when a batch is completed",
        world(
            *(4, 2, 4, 4, "truncate", *SWAPS),
            groups=(SLOT,),
            num_host_blocks=4,
            num_letters=1,
            publish="completed",
            **{**FAILING, "num_external": 2},
        ),
        40421,
        2897992,
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "flight-loads-fail": Profile(
        "external loads in flight that fail",
        world(2, 2, 2, 2, without=STAYING, **IN_FLIGHT),
        36964,
        144403,
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "flight-loads-completed": Profile(
        "the same, published when a batch is completed",
        world(2, 2, 2, 2, without=STAYING, publish="completed", **IN_FLIGHT),
        32624,
        126850,
        slow=True,
        backend="rust",
        shows=SHOWS[:1],
    ),
    "flight-loads-fork": Profile(
        "external loads in flight that fail; requests are forked meanwhile",
        world(2, 2, 2, 2, without=("append", "remove_request", "reset_prefix_cache"), **IN_FLIGHT),
        42615,
        166131,
        backend="rust",
        shows=SHOWS,
    ),
    "flight-loads-rewind": Profile(
        "external loads in flight; requests are forked, and cut to in front of the load, too",
        world(
            *(2, 2, 2, 2, "rewind"),
            moves_per_batch=2,
            enable_caching=False,
            num_external=1,
            moves="calls",
            without=("append", "free", "remove_request", "reset_prefix_cache"),
            **FLYING_SLOTS,
        ),
        57826,
        333061,
        slow=True,
        backend="rust",
        shows=("call rewind: done", "call rewind: HeldByOthers"),
        not_shown={"goal abort in flight": "no request is freed"},
    ),
    "flight-loads-swap": Profile(
        "external loads in flight that fail; a request is cut and swapped meanwhile",
        world(2, 1, 2, 2, "truncate", *SWAPS, num_host_blocks=2, without=SHARING, **IN_FLIGHT),
        2606,
        8435,
        backend="both",
        not_shown={
            "call swap_in: refused later": "the one request's blocks stay on the device",
            "command SwapIn": "the one request's blocks stay on the device",
        },
    ),
    "flight-loads-remove": Profile(
        "external loads in flight that fail; two calls in a batch, requests are removed",
        world(2, 1, 2, 2, moves_per_batch=2, without=SHARING, **IN_FLIGHT),
        5491,
        23186,
        backend="both",
    ),
    "flight-loads-again": Profile(
        "an external load that fails while its request loads again; two batches in flight",
        world(3, 1, 2, 2, "load", without=STAYING, **AGAIN),
        281884,
        1631537,
        slow=True,
        backend="rust",
        shows=("call rewind: done", "command Load", "call complete_operation: done"),
    ),
    "flight-loads-leave": Profile(
        "external loads in flight that fail; two requests, every way to leave",
        world(*LEAVING, num_host_blocks=2, without=SHARING[-1:], **IN_FLIGHT),
        239203,
        920640,
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "flight-loads-leave-completed": Profile(
        "the same, published when a batch is completed",
        world(*LEAVING, num_host_blocks=2, without=SHARING[-1:], publish="completed", **IN_FLIGHT),
        274021,
        1051104,
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
}
