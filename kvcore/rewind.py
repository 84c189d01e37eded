# SPDX-License-Identifier: Apache-2.0
"""Rewind: what requests count was not written, since a load failed or came in part.

Rules: the tokens stay and are computed anew. The keys of the requests' blocks past the count are
withdrawn, so nobody else hits them; who counts tokens in such a block is named in the same call.
Twin: rust/src/rewind.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvcore.arguments import read_count
from kvcore.errors import BeyondComputed, HeldByOthers
from kvcore.release import check_leaving, cut_tables, leave_open_batch
from kvcore.state import Draft, RequestState, State, transition
from kvcore.values import Outcome


def rewind(
    state: State, request_ids: Iterable[str], num_computed_tokens: int
) -> Outcome[State, None]:
    """Take back what requests count past so many tokens: keys withdrawn, blocks released.

    They leave the open batch. Raises UnknownRequest, RepeatedRequest, SwappedOut, LoadUnfinished,
    InvalidCount, BeyondComputed, HitInOpenBatch, HeldByOthers.
    """
    ids = list(request_ids)

    def change(draft: Draft) -> None:
        requests = draft.distinct(ids)
        count = read_count("num_computed_tokens", num_computed_tokens)
        for request in requests:
            draft.idle(request.request_id)
            if count > request.num_computed:
                raise BeyondComputed(
                    request=repr(request.request_id),
                    num_computed=request.num_computed,
                    asked=count,
                )
        check_leaving(draft, requests)
        check_held(draft, requests, count)
        for request in requests:
            for block in unwritten(draft, request, count):
                draft.device.unpublish(block)
            leave_open_batch(draft, request)
            cut_tables(draft, draft.request(request.request_id), count)

    return transition(state, change)


def unwritten(draft: Draft, request: RequestState, num_tokens: int) -> Iterator[int]:
    """The blocks of a request that hold, or would hold, tokens past so many."""
    for group, table in zip(draft.config.groups, request.tables, strict=True):
        if not group.is_cross:
            first = num_tokens // group.block_size
            yield from (block for block in table[first:] if not draft.is_null(block))


def check_held(draft: Draft, rewound: list[RequestState], num_tokens: int) -> None:
    """Raise HeldByOthers if requests outside count tokens that these would leave unwritten."""
    ids = {request.request_id for request in rewound}
    shared: set[int] = set()
    for request in rewound:
        shared.update(
            block
            for block in unwritten(draft, request, num_tokens)
            if draft.device.ref_counts[block] > 1
        )
    if not shared:
        return
    blocks: set[int] = set()
    others: set[str] = set()
    for other_id in draft.rows:
        if other_id is None or other_id in ids:
            continue
        other = draft.requests[other_id]
        if other.num_computed <= num_tokens:
            continue
        for group, table in zip(draft.config.groups, other.tables, strict=True):
            counted = -(-other.num_computed // group.block_size)
            first = num_tokens // group.block_size
            found = shared.intersection(table[first:counted])
            if found and not group.is_cross:
                blocks |= found
                others.add(other.request_id)
    if others:
        raise HeldByOthers(blocks=sorted(blocks), requests=sorted(others))
