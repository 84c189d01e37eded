# SPDX-License-Identifier: Apache-2.0
"""The outcome of a call in a record: done, refused, or the number of an error.

    0            done; then the row of a request that was added or forked, the number of an epoch,
                 the length of a hit or a pin, whether a reset was done, the checksum of a
                 batch's columns and keys
    1, 2         refused, later or never; then how far an append came, blocks needed, available,
                 pending
    3 and more   misuse, by its place in ERRORS
    255          another exception

In a record by keys (names.py) the hashes of new full blocks follow, if a call that adds tokens did
not raise.
The number of an error never changes. Twin: rust/src/record/outcomes.rs.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.record.checksum import crc32c
from kvcore.record.fields import NotReadable, Source, put_varint
from kvcore.state.state import State
from kvcore.types.commands import Batch
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Appended, Hit, Reason, Refused

ERRORS = (
    *("UnknownRequest", "UnknownRow", "RepeatedRequest", "EmptyRequestId", "EmptyTokens"),
    *("InvalidToken", "LengthMismatch", "InvalidCount", "TooManyTokens", "BeyondModelLength"),
    *("BeyondComputed", "BeforeOpenBatch", "WrongBlockHashes", "DraftsPending"),
    *("PlaceholdersPending", "NotComputed", "StaleOutput", "OutputOutOfOrder", "BatchNotTaken"),
    *("BeyondDrafts", "InOpenBatch", "TooManyInFlight", "NotInFlight", "BatchOutOfOrder"),
    *("LoadUnfinished", "LoadUnconfirmed", "WrongLoad", "NotPublished", "UnknownOperation"),
    *("HeldByOthers", "NoEncoderGroup", "BeyondRequest", "HitsOnRunningRequest", "WrongHit"),
    *("StaleHits", "CachingDisabled", "SwappedOut", "NotSwapped", "NotRunning"),
    *("StillHoldsBlocks", "HitInOpenBatch", "NoHostTier", "UnknownBlock", "NotPinned"),
    *("UnusedBlock", "InvalidExtraKey", "UnsortedMedia", "CountMismatch", "EpochWentBack"),
    *("StaleRequest", "PolicyFailed", "TimeWentBack", "EmptyPinName", "UnknownPin"),
    *("RepeatedPin", "NothingToPin", "TooManyPinned", "TooManyDrafts", "NoStateGroup"),
    "UnalignedCheckpoint",
)
DONE, LATER, NEVER, FIRST_ERROR, OTHER = 0, 1, 2, 3, 255
ROWS, BATCH = ("add_request", "fork"), "take_batch"
NUMBERED = (*ROWS, "advance_epoch", "pin_prefix")
EXTENDS = ("add_request", "add_tokens", "accept", "append")
"""Calls that add tokens, whose record ends with the hashes of the blocks that they fill."""
WITH_NUMBER = {*NUMBERED, "get_computed_blocks", "reset_prefix_cache"}


@attrs.frozen
class Recorded:
    """An outcome as it was recorded.

    what: "done", "refused" or the name of an error. numbers: the figures recorded with it.
    """

    what: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.what, *(f"{number:,}" for number in self.numbers)])


JUST_DONE = Recorded("done")


def write_value(name: str, value: Any) -> bytes:
    """Encode the outcome of a call that returned a value."""
    out = bytearray()
    refused = value.refused if isinstance(value, Appended) else value
    if isinstance(refused, Refused):
        out.append(LATER if refused.reason is Reason.LATER else NEVER)
        if isinstance(value, Appended):
            put_varint(out, value.done)
        for number in (refused.needed, refused.available, refused.pending):
            put_varint(out, number)
        return bytes(out)
    out.append(DONE)
    if name in NUMBERED:
        put_varint(out, value)
    elif isinstance(value, Hit):
        put_varint(out, value.num_tokens)
    elif isinstance(value, bool):
        out.append(value)
    elif isinstance(value, Batch):
        out += crc32c(value.buffer + value.keys).to_bytes(4, "little")
    return bytes(out)


def write_error(error: BaseException) -> bytes:
    """Encode the outcome of a call that raised."""
    name = type(error).__name__
    if isinstance(error, KvcoreError) and name in ERRORS:
        return bytes([FIRST_ERROR + ERRORS.index(name)])
    return bytes([OTHER])


def put_new_hashes(out: bytearray, before: State, state: State, ids: list[str]) -> None:
    """Write the hashes that kvcore made for requests in a call: how many requests have some; of
    each its place in the call, their count and the hashes.
    """
    grown = []
    for place, request_id in enumerate(ids):
        request, known = state.requests[request_id], before.requests.get(request_id)
        start = 0 if known is None else len(known.block_hashes)
        if not request.own_hashes and len(request.block_hashes) > start:
            grown.append((place, request.block_hashes[start:]))
    put_varint(out, len(grown))
    for place, hashes in grown:
        put_varint(out, place)
        put_varint(out, len(hashes))
        out += b"".join(hashes)


def read_outcome(source: Source, name: str) -> Recorded:
    """Read the outcome of a call. Raises NotReadable."""
    code = source.take(1)[0]
    if code in (LATER, NEVER):
        count = 4 if name == "append" else 3
        reason = "refused later" if code == LATER else "refused never"
        return Recorded(reason, tuple(source.varint() for _ in range(count)))
    if code == OTHER:
        return Recorded("another exception")
    if code >= FIRST_ERROR:
        if code - FIRST_ERROR >= len(ERRORS):
            raise NotReadable
        return Recorded(ERRORS[code - FIRST_ERROR])
    if name == BATCH:
        return Recorded("done", (int.from_bytes(source.take(4), "little"),))
    return Recorded("done", (source.varint(),)) if name in WITH_NUMBER else JUST_DONE
