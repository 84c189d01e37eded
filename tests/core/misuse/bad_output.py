# SPDX-License-Identifier: Apache-2.0
"""Bad input of engines that run ahead: tokens too early, too late, twice, or for no request."""

from __future__ import annotations

from kvcore import KVCacheManager
from kvcore.types.errors import (
    BatchNotTaken,
    BeyondModelLength,
    DraftsPending,
    InOpenBatch,
    InvalidCount,
    NotComputed,
    OutputOutOfOrder,
    PlaceholdersPending,
    StaleOutput,
    TooManyTokens,
)
from tests.conftest import Backend
from tests.helpers.misuse import bad
from tests.helpers.stories import add, make, serve


def ahead(backend: Backend) -> KVCacheManager:
    """Open batch number 3, with a limit of 8 tokens.

    "come" has 4 tokens and one to come, and took the output of batch 0: that of 1 and 2 is to come;
    "half" computed 2 of 3 tokens; "full" has 8; "drafts" has a draft, not scheduled; "writes" is
    scheduled in the open batch, and so is "guessed", whose next token is to come.
    """
    manager = make(backend, num_blocks=24, max_model_len=8)
    serve(manager, "drafts", [4])
    serve(manager, "full", range(8))
    serve(manager, "come", [0, 1, 2])
    add(manager, "half", [5, 6, 7])
    manager.allocate_slots("half", 2)
    manager.take_batch()
    manager.append(["come"])
    manager.take_batch()
    manager.append(["come"], [3], batch=0)
    manager.take_batch()
    manager.add_drafts("drafts", [9])
    serve(manager, "writes", [30])
    add(manager, "guessed", [40, 41])
    manager.allocate_slots("guessed", 3, num_output_placeholders=1)
    return manager


def flying(backend: Backend) -> KVCacheManager:
    """Sample the first token to come of "both" in batch 0, its second in 1; 2 has only "one".

    Batch 1 samples the next token of "last", which has none to come.
    """
    manager = make(backend, num_blocks=24, max_in_flight=3)
    for name in ("both", "one"):
        add(manager, name, [0, 1, 2])
        manager.allocate_slots(name, 3)
    manager.take_batch()
    manager.append(["both", "one"])
    serve(manager, "last", [9])
    manager.take_batch()
    manager.append(["one"])
    manager.take_batch()
    return manager


def completed(backend: Backend) -> KVCacheManager:
    """As `flying`; batches 0 and 1 were completed, and their tokens never came."""
    manager = flying(backend)
    manager.complete(0)
    manager.complete(1)
    return manager


def left(backend: Backend) -> KVCacheManager:
    """As `completed`; the request has left: it gets what is on its way only in order."""
    manager = completed(backend)
    manager.free("both")
    return manager


def unsampled(backend: Backend) -> KVCacheManager:
    """No batch samples the next token of any request, and batches 0 and 1 were taken.

    "chunk" computed a part of its prompt in 0, "new" nothing, and "cut" was cut to what 0 computed.
    """
    manager = make(backend, num_blocks=24)
    for name in ("chunk", "new", "cut"):
        add(manager, name, [0, 1, 2])
    manager.allocate_slots("chunk", 2)
    manager.allocate_slots("cut", 3)
    manager.take_batch()
    manager.truncate("cut", 2)
    manager.take_batch()
    manager.take_batch()
    return manager


def short(backend: Backend) -> KVCacheManager:
    """Hand in one token of batch 0, which computed a token and two drafts, and rejected none.

    Batch 1 computes what follows the accepted drafts.
    """
    manager = make(backend, num_blocks=24, max_in_flight=2)
    add(manager, "short", [0, 1])
    manager.allocate_slots("short", 4, num_output_placeholders=2)
    manager.take_batch()
    manager.allocate_slots("short", 1, num_output_placeholders=3)
    manager.take_batch()
    manager.add_tokens("short", [2], batch=0)
    return manager


def planned(backend: Backend) -> KVCacheManager:
    """Go on from `flying`; the open batch computes the token before the third one to come."""
    manager = flying(backend)
    manager.append(["both"])
    return manager


FULL = BeyondModelLength(request="full", requested=9, max_model_len=8)
WRITES = InOpenBatch(kind="request", value="writes")
HALF = NotComputed(request="half", num_tokens=3, num_computed=2)
COME = PlaceholdersPending(request="come", num_placeholders=1)
DRAFT = DraftsPending(request="drafts", num_drafts=1)

APPENDS = [
    bad(ahead, WRITES, "append", ["come", "writes"], [1, 1]),
    bad(ahead, WRITES, "append", ["writes"]),
    bad(ahead, HALF, "append", ["come", "half"], [1, 1]),
    bad(ahead, HALF, "append", ["half"]),
    bad(ahead, FULL, "append", ["come", "full"], [1, 1]),
    bad(ahead, FULL, "append", ["full"]),
    bad(ahead, DRAFT, "append", ["drafts"]),
]

OUTPUT = [
    *(
        bad(
            ahead,
            StaleOutput(request="come", batch=0, output_from=1),
            *(call, *arguments),
            batch=0,
        )
        for call, arguments in (("append", (["come"], [1])), ("add_tokens", ("come", [1])))
    ),
    *(
        bad(ahead, error, call, *arguments, **options)
        for call, arguments in (("append", (["come"], [1])), ("add_tokens", ("come", [1])))
        for error, options in (
            (OutputOutOfOrder(request="come", batch=2, num_tokens=4, expected=1), {"batch": 2}),
            (BatchNotTaken(batch=3, open_batch=3), {"batch": 3}),
            (InvalidCount(name="batch", value=-1, least=0), {"batch": -1}),
            (InvalidCount(name="batch", value="1", least=0), {"batch": "1"}),
        )
    ),
    *(
        bad(
            ahead,
            InvalidCount(name="num_rejected", value=value, least=0),
            *("add_tokens", "come", [1]),
            num_rejected=given,
        )
        for given, value in ((-1, -1), (None, None), (0.5, 0.5))
    ),
    *(
        bad(
            flying,
            OutputOutOfOrder(request="both", batch=batch, num_tokens=3, expected=0),
            *(call, *arguments),
            batch=batch,
        )
        for call, arguments in (
            ("append", (["both"], [1])),
            ("add_tokens", ("both", [1])),
        )
        for batch in (1, 2)
    ),
    *(
        bad(
            flying,
            OutputOutOfOrder(request="last", batch=2, num_tokens=1, expected=1),
            *(call, *arguments),
            batch=2,
        )
        for call, arguments in (("append", (["last"], [1])), ("add_tokens", ("last", [1])))
    ),
    bad(
        flying,
        OutputOutOfOrder(request="both", batch=0, num_tokens=4, expected=1),
        *("add_tokens", "both", [1, 1]),
        batch=0,
    ),
    *(
        bad(
            world,
            OutputOutOfOrder(request="both", batch=batch, num_tokens=3, expected=0),
            *(call, *arguments),
            batch=batch,
        )
        for world, call, arguments in (
            (completed, "append", (["both"], [1])),
            (completed, "add_tokens", ("both", [1])),
            (left, "add_tokens", ("both", [1])),
        )
        for batch in (1, 2)
    ),
    bad(
        left,
        OutputOutOfOrder(request="both", batch=0, num_tokens=4, expected=1),
        *("add_tokens", "both", [1, 1]),
        batch=0,
    ),
    *(
        bad(
            unsampled,
            OutputOutOfOrder(request=name, batch=batch, num_tokens=num_tokens, expected=None),
            *("add_tokens", name, [1]),
            batch=batch,
        )
        for name, num_tokens, batch in (
            *(("chunk", 3, 0), ("chunk", 3, 1), ("new", 3, 0), ("new", 3, 1)),
            *(("cut", 2, 1), ("cut", 2, 2)),
        )
    ),
    bad(
        unsampled,
        OutputOutOfOrder(request="cut", batch=1, num_tokens=2, expected=None),
        *("append", ["cut"], [1]),
        batch=1,
    ),
    *(
        bad(short, error, call, *arguments, batch=batch)
        for call, arguments in (("append", (["short"], [1])), ("add_tokens", ("short", [1])))
        for batch, error in (
            (0, StaleOutput(request="short", batch=0, output_from=1)),
            (1, OutputOutOfOrder(request="short", batch=1, num_tokens=3, expected=None)),
        )
    ),
    bad(planned, InOpenBatch(kind="request", value="both"), "add_tokens", "both", [1, 1, 1]),
    bad(ahead, InOpenBatch(kind="request", value="guessed"), "add_tokens", "guessed", [1]),
    bad(ahead, COME, "add_drafts", "come", [1]),
    bad(ahead, COME, "accept", "come", 0),
]

SLOTS = [
    bad(
        ahead,
        InvalidCount(name="num_output_placeholders", value=-1, least=0),
        *("allocate_slots", "come", 1),
        num_output_placeholders=-1,
    ),
    bad(
        ahead,
        TooManyTokens(request="come", num_tokens=4, requested=6),
        *("allocate_slots", "come", 1),
    ),
    *(
        bad(
            ahead,
            TooManyTokens(request="come", num_tokens=4, requested=7),
            *("allocate_slots", "come", new),
            num_output_placeholders=1,
            num_external_computed_tokens=2 - new,
        )
        for new in (1, 2)
    ),
    bad(ahead, DRAFT, "allocate_slots", "drafts", 1, num_output_placeholders=1),
]

ROWS = [*APPENDS, *OUTPUT, *SLOTS]
