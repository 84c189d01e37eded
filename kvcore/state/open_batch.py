# SPDX-License-Identifier: Apache-2.0
"""The open batch: the commands and keys of the transitions since the last batch.

Twin: rust/src/state/open_batch.rs.
"""

from __future__ import annotations

from immutables import Map
from msgspec import Struct
from pyrsistent import PVector, pvector

from kvcore.state.batch_records import PublishedKey, RequestEntry
from kvcore.types.commands import Command


class UnwrittenBlock(Struct, frozen=True, gc=False):
    """A block that the open batch published before the batch itself has written it."""

    group_id: int
    position: int
    block: int
    key: bytes


class ScheduledRequest(Struct, frozen=True, gc=False):
    """The open batch's record of a request that it schedules.

    num_computed_before: the count before the request's first slots in the batch, and before its
    hits. num_kept: the lowest count that it can be shortened to: its hits and external tokens, plus
    its first own position if it holds no others or if the batch brings encoder tokens.
    """

    num_computed_before: int
    num_kept: int
    unwritten: PVector[UnwrittenBlock] = pvector()


class Merge(Struct, frozen=True, gc=False):
    """A full block whose key another block already had when it was filled
    (`duplicates="merge"`).
    """

    request_id: str
    group_id: int
    position: int
    block: int
    key: bytes


class OpenBatch(Struct, frozen=True, gc=False):
    """The batch that is being filled.

    scheduled: its record of the request in each row, None if it schedules none. entries,
    published_keys: its effects on requests and its publications, if batches are remembered.
    starts_epoch: whether an epoch began in it. ends: the requests whose state after it is a
    checkpoint, in the order of the calls. marked: those of them whose state is one in all groups,
    because the call said so. delayed: the scheduled requests whose most recent call delays its
    keys; only noted if blocks may have tail keys.
    """

    number: int
    commands: PVector[Command] = pvector()
    scheduled: PVector[ScheduledRequest | None] = pvector()
    merges: PVector[Merge] = pvector()
    entries: Map[str, RequestEntry] = Map()
    published_keys: PVector[PublishedKey] = pvector()
    starts_epoch: bool = False
    ends: PVector[str] = pvector()
    marked: frozenset[str] = frozenset()
    delayed: frozenset[str] = frozenset()


def make_open_batch(number: int, num_rows: int, *, starts_epoch: bool = False) -> OpenBatch:
    """Make an empty batch."""
    return OpenBatch(number, scheduled=pvector([None] * num_rows), starts_epoch=starts_epoch)
