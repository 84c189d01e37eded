# SPDX-License-Identifier: Apache-2.0
"""Giving blocks back: free, and leaving the open batch.

Rules: tail blocks are released first, so that they are evicted first. A request that leaves the
open batch (freed, swapped out or cut in mid-step) will not be computed: the keys that the batch
published for content it would have written are withdrawn, the computed count falls back, the blocks
past it go. A cut to a count whose window was given back starts the request anew. If another request
counts tokens in such a block, the call is misuse. Source: S000-37, 38; bug catalogue, row 72. Twin:
rust/src/transitions/free.rs.
"""

from __future__ import annotations

from msgspec.structs import replace as evolve
from pyrsistent import pvector

from kvcore.state.draft import Draft, transition
from kvcore.state.open_batch import BatchRecord, Merge
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State
from kvcore.transitions.in_flight import leave, let_go, shorten
from kvcore.transitions.unconfirmed_loads import fall_to
from kvcore.types.commands import CutTable
from kvcore.types.errors import HitInOpenBatch
from kvcore.types.values import Outcome


def free(state: State, request_id: str) -> Outcome[State, None]:
    """Give back a request's blocks, tail first; its tokens and hashes stay, its computed count is
    0.

    A request that holds nothing is left as it is. Raises UnknownRequest, HitInOpenBatch.
    """

    def change(draft: Draft) -> None:
        request = draft.request(request_id)
        check_leaving(draft, [request])
        if request.host_tables:
            drop_host(draft, request)
        elif any(request.tables):
            draft.store(abandon_loads(draft, request))
            leave_open_batch(draft, draft.request(request_id))
            cut_tables(draft, draft.request(request_id), 0)
            draft.store(evolve(draft.request(request_id), preempted=True))

    return transition(state, change)


def abandon_loads(draft: Draft, request: RequestState) -> RequestState:
    """The request without its unfinished loads, which go on without it."""
    if not request.num_loading:
        return request
    for number, operation in sorted(draft.operations.items()):
        if operation.request_id == request.request_id:
            left = evolve(operation, request_id=None)
            draft.operations = draft.operations.set(number, left)
    return evolve(request, num_loading=0, load_end=0)


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
            end = (item.position + 1) * draft.config.groups[item.group].block_size
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

    Its keys and merges are withdrawn, its count falls back, its blocks past that are released.
    """
    record = draft.records.get(request.request_id)
    if record is None:
        return
    for item in record.published:
        if draft.device.keys[item.block] == item.key:
            draft.device.unpublish(item.block)
    draft.records = draft.records.delete(request.request_id)
    leave(draft, request.request_id)
    merges = pvector(
        each for each in draft.batch.merges if not is_unwritten(draft, each, record, request)
    )
    draft.batch = evolve(draft.batch, merges=merges)
    cut_tables(draft, request, record.num_computed_before)


def is_unwritten(draft: Draft, merge: Merge, record: BatchRecord, request: RequestState) -> bool:
    """Whether a merge waits for a block that the open batch would have written for a request."""
    end = (merge.position + 1) * draft.config.groups[merge.group].block_size
    return merge.request_id == request.request_id and end > record.num_computed_before


def cut_tables(draft: Draft, request: RequestState, num_tokens: int) -> None:
    """Keep the blocks of so many tokens, release the rest tail first, and store the request.

    Drafts go. The computed count falls to num_tokens where it is above, and to 0, with all blocks,
    where the window that it needs was given back.
    """
    num_computed = min(request.num_accepted, num_tokens)
    if draft.resumable(request, num_computed) < num_computed:
        num_computed = num_tokens = 0
    if draft.loads:
        fall_to(draft, request.request_id, num_computed)
    tables, num_cached = [], []
    for index, group in enumerate(draft.config.groups):
        table = request.tables[index]
        keep = draft.num_kept(index, table, num_tokens)
        if len(table) > keep:
            let_go(draft, request, index, range(keep, len(table)))
            shorten(draft, request.request_id, index, keep)
            held = (block for block in table[keep:][::-1] if not draft.is_null(block))
            draft.device.release(list(held))
            draft.effects.emit(CutTable(request.row, index, keep))
            table = table[:keep]
        tables.append(table)
        num_cached.append(min(request.num_cached[index], num_computed // group.block_size))
    draft.store(
        evolve(
            request,
            drafts=pvector(),
            tables=tuple(tables),
            num_computed=num_computed,
            num_cached=tuple(num_cached),
        )
    )


def release_host(draft: Draft, request: RequestState) -> None:
    """Give back a request's host blocks, tail first; it waits again."""
    host = draft.host_tier()
    for table in request.host_tables:
        host.release([block for block in table[::-1] if block != NO_HOST_BLOCK])
    draft.store(evolve(request, host_tables=(), num_computed=0))


def drop_host(draft: Draft, request: RequestState) -> None:
    """Give back a swapped request's host blocks; it waits, as after a preemption."""
    release_host(draft, request)
    if draft.loads:
        fall_to(draft, request.request_id, 0)
    draft.store(evolve(draft.request(request.request_id), preempted=True))
