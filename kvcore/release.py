# SPDX-License-Identifier: Apache-2.0
"""Giving blocks back: free, and leaving the open batch.

Rules: tail blocks are released first, so that they are evicted first. A request that leaves the
open batch (freed, swapped out or cut in mid-step) will not be computed: the keys that the batch
published for content it would have written are withdrawn, the computed count falls back, the blocks
past it go. If another request counts tokens in such a block, the call is misuse. Source: S000-37,
38; bug catalogue, row 72. Twin: rust/src/release.rs.
"""

from __future__ import annotations

import attrs

from kvcore.commands import CutTable
from kvcore.errors import HitInOpenBatch
from kvcore.state import Draft, RequestState, State, transition
from kvcore.values import Outcome


def free(state: State, request_id: str) -> Outcome[State, None]:
    """Give back a request's blocks, tail first; its tokens and hashes stay, its computed count is
    0.

    A request that holds nothing is left as it is. Raises UnknownRequest, HitInOpenBatch.
    """

    def change(draft: Draft) -> None:
        request = draft.request(request_id)
        check_leaving(draft, [request])
        if request.host_tables:
            release_host(draft, request)
        elif any(request.tables):
            leave_open_batch(draft, request)
            cut_tables(draft, draft.request(request_id), 0)
        else:
            return
        draft.store(attrs.evolve(draft.request(request_id), preempted=True))

    return transition(state, change)


def check_leaving(draft: Draft, leaving: list[RequestState]) -> None:
    """Raise HitInOpenBatch if requests outside count tokens that these would leave unwritten."""
    ids = {request.request_id for request in leaving}
    blocks: set[int] = set()
    others: set[str] = set()
    for request in leaving:
        record = draft.records.get(request.request_id)
        for item in record.published if record is not None else ():
            if draft.device.ref_counts[item.block] < 2:
                continue
            end = (item.position + 1) * draft.config.block_size
            for other_id in draft.records:
                other = draft.requests[other_id]
                table = other.tables[item.group]
                if other_id in ids or other.num_computed < end or len(table) <= item.position:
                    continue
                if table[item.position] == item.block:
                    blocks.add(item.block)
                    others.add(other_id)
    if others:
        raise HitInOpenBatch(blocks=sorted(blocks), requests=sorted(others))


def leave_open_batch(draft: Draft, request: RequestState) -> None:
    """Take a request out of the open batch.

    Its keys are withdrawn, its count falls back, its blocks past that are released.
    """
    record = draft.records.get(request.request_id)
    if record is None:
        return
    for item in record.published:
        if draft.device.keys[item.block] == item.key:
            draft.device.unpublish(item.block)
    draft.records = draft.records.delete(request.request_id)
    cut_tables(draft, request, record.num_computed_before)


def cut_tables(draft: Draft, request: RequestState, num_tokens: int) -> None:
    """Keep the blocks of so many tokens, release the rest tail first, and store the request.

    The computed count falls to num_tokens where it is above.
    """
    size = draft.config.block_size
    keep = -(-num_tokens // size)
    tables = []
    for group, table in enumerate(request.tables):
        if len(table) > keep:
            draft.device.release(table[keep:][::-1])
            draft.effects.emit(CutTable(request.row, group, keep))
            table = table[:keep]
        tables.append(table)
    num_computed = min(request.num_computed, num_tokens)
    num_cached = tuple(min(cached, num_computed // size) for cached in request.num_cached)
    draft.store(
        attrs.evolve(
            request, tables=tuple(tables), num_computed=num_computed, num_cached=num_cached
        )
    )


def release_host(draft: Draft, request: RequestState) -> None:
    """Give back a request's host blocks, tail first; it waits again."""
    host = draft.host_tier()
    for table in request.host_tables:
        host.release(table[::-1])
    draft.store(attrs.evolve(request, host_tables=(), num_computed=0))
