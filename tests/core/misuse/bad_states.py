# SPDX-License-Identifier: Apache-2.0
"""Bad input on recurrent states."""

from __future__ import annotations

from kvcore import Group, Hit, KVCacheBlocks, KVCacheManager
from kvcore.types.errors import (
    BeyondDrafts,
    DraftsPending,
    InOpenBatch,
    NoStateGroup,
    StaleHits,
    TooManyDrafts,
    UnalignedCheckpoint,
)
from tests.conftest import Backend
from tests.helpers.misuse import Row, bad
from tests.helpers.stories import add, make, serve, step

GROUPS = (Group(2), Group(2, kind="state"))


def running(backend: Backend) -> KVCacheManager:
    """Compute the five tokens of "runs"; "drafts" has three and one draft, which waits."""
    manager = make(backend, 12, groups=GROUPS)
    serve(manager, "runs", range(5))
    add(manager, "drafts", range(10, 13))
    manager.add_drafts("drafts", [13])
    step(manager)
    return manager


def cached(backend: Backend) -> KVCacheManager:
    """Withdraw the key of the state after two tokens, which "again" would hit."""
    manager = make(backend, 12, groups=GROUPS)
    serve(manager, "first", range(2))
    step(manager)
    add(manager, "again", range(3))
    manager.evict_blocks([2])
    return manager


def stateless(backend: Backend) -> KVCacheManager:
    """Add a request to a manager of attention alone."""
    manager = make(backend, 12, groups=GROUPS[:1])
    add(manager, "whole", range(4))
    return manager


def drafting(backend: Backend) -> KVCacheManager:
    """Give "most" two drafts behind three tokens, one more than have a state; one draft of "taken"
    is scheduled.
    """
    manager = make(backend, 20, groups=(Group(2), Group(2, kind="state", draft_states=1)))
    for name, first in (("most", 0), ("taken", 10)):
        serve(manager, name, range(first, first + 3))
    step(manager)
    manager.add_drafts("most", [3, 4])
    manager.add_drafts("taken", [13])
    manager.allocate_slots("taken", 1)
    step(manager)
    return manager


def begun(backend: Backend) -> KVCacheManager:
    """The open batch computes tokens of "first", which computed none before, of "next" and of
    "behind", whose external tokens came before them.
    """
    manager = make(backend, 20, groups=GROUPS)
    for name, first in (("first", 0), ("next", 10), ("behind", 20)):
        add(manager, name, range(first, first + 6))
    manager.allocate_slots("next", 2)
    step(manager)
    manager.allocate_slots("first", 1)
    manager.allocate_slots("next", 2)
    manager.allocate_slots("behind", 1, num_external_computed_tokens=2)
    return manager


def encoding(backend: Backend) -> KVCacheManager:
    """The open batch brings an encoder's tokens, and computes one token behind external ones."""
    groups = (Group(2), Group(2, kind="cross_attention"), Group(2, kind="state"))
    manager = make(backend, 20, groups=groups, enable_caching=False)
    add(manager, "encodes", range(8))
    manager.allocate_slots("encodes", 1, num_external_computed_tokens=2, num_encoder_tokens=4)
    return manager


PENDING = DraftsPending(request="taken", num_drafts=1)

ROWS: list[Row] = [
    bad(
        drafting,
        TooManyDrafts(request="most", num_drafts=2, most=1),
        *("allocate_slots", "most", 2),
    ),
    bad(
        drafting,
        UnalignedCheckpoint(request="most", num_tokens=3, requested=4, multiple=2),
        *("allocate_slots", "most", 1),
        checkpoint=True,
    ),
    bad(drafting, PENDING, "allocate_slots", "taken", 1),
    bad(drafting, PENDING, "fork", "taken", "child"),
    bad(drafting, PENDING, "append", ["taken"], [13]),
    bad(drafting, PENDING, "append", ["taken"]),
    bad(drafting, PENDING, "add_tokens", "taken", [13]),
    bad(drafting, PENDING, "add_drafts", "taken", [14]),
    bad(drafting, PENDING, "unschedule", "taken", 3),
    bad(
        drafting,
        BeyondDrafts(request="taken", num_scheduled=1, requested=2),
        *("accept", "taken", 2),
    ),
    bad(
        running,
        TooManyDrafts(request="drafts", num_drafts=1, most=0),
        *("allocate_slots", "drafts", 4),
    ),
    bad(
        running,
        TooManyDrafts(request="runs", num_drafts=2, most=1),
        *("allocate_slots", "runs", 2),
        num_output_placeholders=2,
    ),
    bad(
        running,
        UnalignedCheckpoint(request="drafts", num_tokens=3, requested=1, multiple=2),
        *("allocate_slots", "drafts", 1),
        checkpoint=True,
    ),
    bad(
        running,
        UnalignedCheckpoint(request="runs", num_tokens=5, requested=6, multiple=2),
        *("allocate_slots", "runs", 1),
        num_output_placeholders=1,
        checkpoint=True,
    ),
    bad(
        stateless,
        NoStateGroup(request="whole"),
        *("allocate_slots", "whole", 2),
        checkpoint=True,
    ),
    *(
        bad(
            begun,
            InOpenBatch(kind="request", value=name),
            *("allocate_slots", name, 1),
            num_external_computed_tokens=1,
        )
        for name in ("first", "next", "behind")
    ),
    bad(begun, InOpenBatch(kind="request", value="next"), "load", "next", 2),
    bad(
        encoding,
        InOpenBatch(kind="request", value="encodes"),
        *("allocate_slots", "encodes", 0),
        num_external_computed_tokens=1,
    ),
    bad(
        cached,
        StaleHits(request="again", block=2, position=0),
        *("allocate_slots", "again", 1, Hit(KVCacheBlocks(((1,), (2,))), 2)),
    ),
]
