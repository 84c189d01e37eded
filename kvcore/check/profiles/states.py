# SPDX-License-Identifier: Apache-2.0
"""Named worlds of recurrent states beside attention, whose hits end at whole blocks; some engines
run ahead of the tokens.

They follow registry.py.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.profiles.ahead import SHOWS
from kvcore.check.profiles.features import NEVER_REFUSED, ROOMY
from kvcore.check.profiles.loads import SHOWS as FAILED
from kvcore.check.profiles.profile import FULL, STATE, SWAPS, Profile, world
from kvcore.types.groups import Group

HYBRID: dict[str, Any] = {"groups": (FULL, STATE)}
ALONE: dict[str, Any] = {**HYBRID, "num_letters": 1}
LEFT = ("remove_request", "reset_prefix_cache")
AHEAD: dict[str, Any] = {**ALONE, "num_output_placeholders": 1, "without": ("fork", *LEFT)}
FLYING: dict[str, Any] = {**AHEAD, "max_in_flight": 1}
MARKED: dict[str, Any] = {
    "groups": (FULL, Group(4, kind="state")),
    "num_letters": 1,
    "marks": True,
    "moves": "calls",
}
SLOTS: dict[str, Any] = {
    "groups": (Group(4), Group(1, kind="state")),
    "max_in_flight": 2,
    "without": ("fork", "free", *LEFT),
}

STATES: dict[str, Profile] = {
    "states": Profile("recurrent states beside attention", world(4, 2, 3, 3, **HYBRID), 533, 4126),
    "states-cut": Profile(
        "recurrent states, cut, two moves in a batch",
        world(4, 1, 4, 4, "truncate", "unschedule", moves_per_batch=2, without=("fork",), **ALONE),
        149,
        3600,
        not_shown=NEVER_REFUSED,
    ),
    "states-pairs": Profile(
        "recurrent states of two requests, each call by itself, two in a batch",
        world(5, 2, 4, 4, moves="calls", moves_per_batch=2, without=("fork",), **ALONE),
        3246,
        234061,
        backend="rust",
    ),
    "states-merge": Profile(
        "recurrent states, duplicates merge",
        world(
            *(5, 2, 4, 4),
            duplicates="merge",
            moves="calls",
            without=("fork", *LEFT),
            **ALONE,
        ),
        955,
        6263,
    ),
    "states-merge-two": Profile(
        "recurrent states, duplicates merge, two moves in a batch",
        world(
            *(5, 2, 4, 4),
            duplicates="merge",
            moves_per_batch=2,
            without=("fork", *LEFT),
            **ALONE,
        ),
        *(305, 2900),
    ),
    "states-delays": Profile(
        "recurrent states, computed blocks are published when the engine says so",
        world(
            *(4, 2, 3, 3, "cache_blocks"),
            delays=(False, True),
            moves="calls",
            without=("fork", "append", *LEFT),
            **ALONE,
        ),
        254,
        2214,
    ),
    "states-eagle": Profile(
        "recurrent states, hits drop the last block of attention",
        world(
            *(6, 2, 5, 5),
            groups=(Group(2, eagle=True), STATE),
            use_eagle=True,
            num_letters=1,
            without=("fork", *LEFT),
        ),
        519,
        1482,
    ),
    "states-rewind": Profile(
        "recurrent states, requests are taken back to a count",
        world(5, 1, 5, 5, "rewind", without=("fork",), **ALONE),
        190,
        928,
        not_shown=NEVER_REFUSED,
    ),
    "states-epochs": Profile(
        "recurrent states, weights change twice",
        world(4, 2, 3, 3, "advance_epoch", without=("fork", *LEFT), **ALONE),
        403,
        1404,
    ),
    "states-pins": Profile(
        "recurrent states, blocks are pinned and evicted",
        world(4, 2, 3, 3, "pin", "unpin", "evict_blocks", without=("fork", *LEFT), **ALONE),
        3018,
        21913,
        backend="rust",
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
    "states-loads-fail": Profile(
        "recurrent states behind loads that fail, stored and loaded by key, too",
        world(
            *(4, 2, 3, 3, "load", "store"),
            num_external=1,
            loads_fail=True,
            moves="calls",
            without=("append", "fork", *LEFT),
            **ALONE,
        ),
        1136,
        50629,
        backend="rust",
        shows=FAILED,
    ),
    "states-loads-completed": Profile(
        "recurrent states behind loads that fail, findable when their batch is completed",
        world(
            *(3, 1, 3, 3),
            num_external=1,
            loads_fail=True,
            moves="calls",
            max_in_flight=1,
            publish="completed",
            without=("append", "fork", *LEFT),
            **ALONE,
        ),
        2113,
        7134,
        backend="rust",
        shows=("call rewind: done",),
    ),
    "states-external": Profile(
        "recurrent states that a connector brings, also behind those of the request",
        world(4, 1, 4, 4, num_external=2, moves="calls", without=("fork", *LEFT), **ALONE),
        101,
        840,
        not_shown=NEVER_REFUSED,
    ),
    "states-external-two": Profile(
        "recurrent states that a connector brings, refused behind a step, two moves in a batch",
        world(
            *(4, 1, 4, 4),
            num_external=2,
            moves="calls",
            moves_per_batch=2,
            without=("fork", *LEFT),
            **ALONE,
        ),
        103,
        4081,
        backend="rust",
        shows=("call allocate_slots: InOpenBatch",),
        not_shown=NEVER_REFUSED,
    ),
    "states-marks": Profile(
        "recurrent states that calls keep inside a block",
        world(3, 2, 4, 4, enable_events=True, without=("append", "fork", *LEFT), **MARKED),
        272,
        2253,
        backend="rust",
        not_shown={
            "goal trim": "a request holds one state",
        },
    ),
    "states-marks-flight": Profile(
        "recurrent states that calls keep inside a block, a batch in flight",
        world(
            *(4, 1, 3, 3),
            max_in_flight=1,
            publish="completed",
            without=("append", "fork", *LEFT),
            **MARKED,
        ),
        5327,
        14730,
        backend="rust",
        not_shown={
            "call allocate_slots: refused later": ROOMY,
            "goal trim": "a request holds one state",
        },
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
        665,
        21605,
    ),
    "states-flight": Profile(
        "recurrent states, a batch in flight",
        world(4, 1, 3, 3, max_in_flight=1, moves="calls", without=("fork",), **ALONE),
        4817,
        15430,
        not_shown=NEVER_REFUSED,
    ),
    "states-fork-flight": Profile(
        "recurrent states, forks, a batch in flight",
        world(4, 2, 3, 2, max_in_flight=1, without=("free", *LEFT), **ALONE),
        5477,
        14427,
        not_shown=dict.fromkeys(
            ("command Touch", "goal quarantine", "goal abort in flight"), "no request is freed"
        ),
    ),
    "states-completed": Profile(
        "recurrent states, a batch in flight that publishes at its end",
        world(4, 1, 3, 3, max_in_flight=1, publish="completed", without=("fork",), **ALONE),
        2038,
        6179,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead": Profile(
        "recurrent states of tokens to come",
        world(5, 1, 4, 2, "truncate", **AHEAD),
        *(6745, 13789),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-slots": Profile(
        "a recurrent state of each token to come, two batches in flight",
        world(4, 1, 3, 1, **{**FLYING, **SLOTS}),
        *(2232, 6362),
        backend="rust",
        shows=SHOWS,
        not_shown={
            "command Touch": "no request has the tokens of a block of attention, so none hits",
            "goal abort in flight": "no request is freed",
        },
    ),
    "states-ahead-moves": Profile(
        "recurrent states of tokens to come, two moves in a batch",
        world(4, 1, 3, 2, "unschedule", moves_per_batch=2, **AHEAD),
        *(8404, 17778),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-flight": Profile(
        "recurrent states of tokens to come, a batch in flight",
        world(4, 1, 4, 1, "truncate", **FLYING),
        *(9301, 27303),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-two": Profile(
        "recurrent states of tokens to come, two batches in flight",
        world(4, 1, 3, 1, **{**FLYING, "max_in_flight": 2}),
        *(7067, 26944),
        backend="rust",
        shows=SHOWS,
    ),
    "states-ahead-three": Profile(
        "recurrent states, three outputs to come",
        world(5, 1, 5, 2, num_outputs=3, **AHEAD),
        *(5377, 12450),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-completed": Profile(
        "recurrent states of tokens to come, findable when their batch is completed",
        world(4, 1, 3, 2, "truncate", publish="completed", **FLYING),
        *(6211, 17713),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-fork": Profile(
        "recurrent states, forks while output is to come",
        world(4, 2, 3, 2, **{**AHEAD, "without": LEFT}),
        *(5817, 13988),
        backend="rust",
        shows=SHOWS,
    ),
    "states-ahead-swap": Profile(
        "recurrent states, swapped while output is to come, findable on completion",
        world(
            *(4, 1, 3, 1, *SWAPS),
            num_host_blocks=4,
            moves_per_batch=2,
            publish="completed",
            **{**FLYING, "without": ("fork", "free", *LEFT)},
        ),
        *(7380, 23610),
        backend="rust",
        shows=SHOWS,
        not_shown={"goal abort in flight": "no request is freed"},
    ),
    "states-ahead-drafts": Profile(
        "recurrent states, a draft to come behind known tokens, which begins anew if rejected",
        world(6, 1, 4, 2, **{**AHEAD, "num_output_placeholders": 2}),
        *(4383, 9635),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-drafts-flight": Profile(
        "recurrent states, a draft to come behind known tokens, a batch in flight",
        world(6, 1, 4, 2, **{**FLYING, "num_output_placeholders": 2}),
        *(89145, 330684),
        backend="rust",
        shows=SHOWS,
        not_shown=NEVER_REFUSED,
    ),
    "states-ahead-large": Profile(
        "recurrent states of tokens to come, two batches in flight; a larger one",
        world(5, 1, 4, 2, "truncate", **{**FLYING, "max_in_flight": 2}),
        *(270679, 1029038),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "states-ahead-completed-large": Profile(
        "two batches in flight, states findable when their batch is completed; a larger one",
        world(
            *(5, 1, 4, 2, "truncate"),
            publish="completed",
            **{**FLYING, "max_in_flight": 2},
        ),
        *(401127, 1524296),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
    "states-ahead-fork-large": Profile(
        "recurrent states, a batch in flight, forks while output is to come; a larger one",
        world(5, 2, 3, 1, **{**FLYING, "without": LEFT}),
        *(610189, 1956087),
        slow=True,
        backend="rust",
        shows=SHOWS,
    ),
}
