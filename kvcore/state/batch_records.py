# SPDX-License-Identifier: Apache-2.0
"""The records of batches in flight, and of loads that may still fail.

External tokens are believed when they are scheduled, so their blocks are findable at once. Until a
load is confirmed, the state remembers the requests that count or counted its tokens, and the blocks
with a key that were loaded or computed from them. `transitions/in_flight.py` and
`transitions/unconfirmed_loads.py` update these records. Twin: rust/src/state/batch_records.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

from immutables import Map
from msgspec import Struct
from pyrsistent import PVector, pvector

from kvcore.types.events import BlockStored

PublishedKey = tuple[int, bytes]
"""A block, and the key under which a batch published it."""


Sampler = tuple[int, int]
"""A batch that samples tokens of a request, and the number of tokens that it computes up to."""


class RequestEntry(Struct, frozen=True, gc=False):
    """A batch's record of a request.

    order: place among the entries of the batch. before: the request's count before its first slots
    in the batch, and before its hits; 0 if it was swapped. restore: the count that a cancel
    restores. publishes: whether completing the batch may publish its blocks. held: number of
    leading blocks of each table that the forward pass uses, as far as they are still in the table.
    replaced: places (group, position) below held that have a different block now.
    """

    order: int
    before: int
    restore: int
    publishes: bool = False
    held: tuple[int, ...] = ()
    replaced: frozenset[tuple[int, int]] = frozenset()

    def uses(self, group_id: int, position: int) -> bool:
        """Return whether the forward pass uses the block that is in this place of a table."""
        return position < self.held[group_id] and (group_id, position) not in self.replaced


class OwedCheckpoint(Struct, frozen=True, gc=False):
    """A state that a batch in flight writes and that is findable once the batch is completed.

    The batch owns the block until then. key: of the state. event: what is then announced, if that
    is asked for; the request may be gone by then.
    """

    block: int
    key: bytes
    event: BlockStored | None = None


class BatchInFlight(Struct, frozen=True, gc=False):
    """A taken batch.

    published_keys: what it published, in order, if a cancel can undo it. rows: rows that its
    commands name, and rows of requests that it remembered until they were removed, ascending.
    starts_epoch: whether an epoch began in it. owed: the states that it publishes when it is
    completed, in the order of the calls.
    """

    number: int
    entries: Map[str, RequestEntry]
    published_keys: PVector[PublishedKey] = pvector()
    rows: tuple[int, ...] = ()
    starts_epoch: bool = False
    owed: tuple[OwedCheckpoint, ...] = ()


class Reporter(Struct, frozen=True, gc=False):
    """A request that can report that a load failed.

    counted: end of the loaded tokens that it counts; 0 if it does not rest on the load. most: the
    greatest end that it ever counted.
    """

    request_id: str
    counted: int
    most: int


class UnconfirmedLoad(Struct, frozen=True, gc=False):
    """Tokens [first, end) that a batch loads from outside.

    reporters: the request that started the load, and each other one that ever rested on it, in the
    order in which they first did, until removed. blocks: each block with a key that rests on the
    load, with the position after its last token.
    """

    batch: int
    first: int
    end: int
    reporters: tuple[Reporter, ...]
    blocks: tuple[tuple[int, int], ...] = ()

    def reporter(self, request_id: str) -> Reporter:
        """Return a request's counts of the load, now and before."""
        found = (each for each in self.reporters if each.request_id == request_id)
        return next(found, Reporter(request_id, 0, 0))

    def is_reported(self, request_ids: Sequence[str], num_tokens: int) -> bool:
        """Return whether rewinding these requests to num_tokens reports that the load failed."""
        return any(self.reporter(name).most > num_tokens for name in request_ids)


def next_order(entries: Map[str, RequestEntry]) -> int:
    """Return the order of the next entry."""
    return len(entries)


def in_order(entries: Map[str, RequestEntry]) -> list[tuple[str, RequestEntry]]:
    """Return the entries of a batch in the order in which they were made."""
    return sorted(entries.items(), key=lambda item: item[1].order)
