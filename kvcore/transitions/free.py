# SPDX-License-Identifier: Apache-2.0
"""Giving blocks back: free, and leaving the open batch.

Invariants: tail blocks are released first, so they are evicted first. A request that leaves the
open batch (freed, swapped out or cut in mid-step) will not be computed: the keys that the batch
published for content it would have written are withdrawn, the computed count falls back, and the
blocks past it are released. If a cut needs a window that was given back, the request starts again
from 0. If another request counts tokens in such a block, the call is misuse. Merges of blocks that
older batches wrote do not wait for `take_batch`: the blocks behind them stay cached.
Source: S000-37, 38; row 72 of kvcore/check/mutants/catalogue.py.
Twin: rust/src/transitions/free.rs.
"""

from __future__ import annotations

from msgspec.structs import replace
from pyrsistent import PVector, pvector

from kvcore.state.open_batch import Merge, ScheduledRequest, UnwrittenBlock
from kvcore.state.state import NO_HOST_BLOCK, RequestState, State
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.state.waiting import settle_waiting
from kvcore.transitions.batches import settle_own_merges
from kvcore.transitions.in_flight import note_left_batch
from kvcore.transitions.tails.keys import drop_delay
from kvcore.transitions.unconfirmed_loads import lower_counted
from kvcore.types.errors import HitInOpenBatch
from kvcore.types.groups import Group
from kvcore.types.values import Outcome


def free(state: State, request_id: str) -> Outcome[State, None]:
    """Give back a request's blocks, tail first; it keeps its tokens and hashes, and its count
    becomes 0.

    A request that holds nothing is unchanged. Raises UnknownRequest, HitInOpenBatch.
    """

    def change(tx: Transaction) -> None:
        request = tx.request(request_id)
        check_leaving(tx, [request])
        if request.host_tables:
            drop_host(tx, request)
        elif any(request.tables):
            tx.put(abandon_loads(tx, request))
            settle_own_merges(tx, request_id)
            leave_open_batch(tx, tx.request(request_id))
            cut_tables(tx, tx.request(request_id), 0)
            tx.put(replace(tx.request(request_id), preempted=True))

    return transition(state, change)


def abandon_loads(tx: Transaction, request: RequestState) -> RequestState:
    """Return the request without its unfinished loads, which go on without it."""
    if not request.num_loading:
        return request
    for number, operation in sorted(tx.operations.items()):
        if operation.request_id == request.request_id:
            left = replace(operation, request_id=None)
            tx.operations = tx.operations.set(number, left)
    return replace(request, num_loading=0, load_end=0)


def check_leaving(tx: Transaction, leaving: list[RequestState], num_tokens: int = 0) -> None:
    """Raise HitInOpenBatch if other requests count tokens that the leaving ones would not write.

    num_tokens: the tokens that each leaving one keeps.
    """
    ids = {request.request_id for request in leaving}
    blocks: set[int] = set()
    others: set[str] = set()
    for request in leaving:
        record = tx.scheduled[request.row]
        for item in record.unwritten if record is not None else ():
            end = (item.position + 1) * tx.config.groups[item.group_id].block_size
            if end <= num_tokens or tx.device.ref_counts[item.block] < 2:
                continue
            for other_id, made in zip(tx.rows, tx.scheduled, strict=True):
                if other_id is None or made is None:
                    continue
                other = tx.requests[other_id]
                table = other.tables[item.group_id]
                if other_id in ids or other.num_computed < end or len(table) <= item.position:
                    continue
                if table[item.position] == item.block:
                    blocks.add(item.block)
                    others.add(other_id)
    if others:
        raise HitInOpenBatch(blocks=sorted(blocks), requests=sorted(others))


def leave_open_batch(tx: Transaction, request: RequestState) -> None:
    """Take a request out of the open batch.

    Its keys and merges are withdrawn, its count falls back, its blocks past that are released.
    Positions to come of batches before stay.
    """
    record = tx.scheduled[request.row]
    if record is None:
        return
    num_tokens = record.num_computed_before
    withdraw(tx, request, record, num_tokens)
    tx.scheduled = tx.scheduled.set(request.row, None)
    note_left_batch(tx, request.request_id)
    drop_delay(tx, request.request_id)
    if tx.config.has_states:
        from kvcore.transitions.checkpoints import drop_end  # few models have states
        from kvcore.transitions.states import num_left, step_back

        drop_end(tx, request.request_id)
        num_tokens = num_left(record)
        request = step_back(tx, request, num_tokens) if num_tokens else request
    cut_tables(tx, request, num_tokens, request.num_output_placeholders)


def withdraw(
    tx: Transaction, request: RequestState, record: ScheduledRequest, num_tokens: int
) -> PVector[UnwrittenBlock]:
    """Withdraw keys and merges of what the open batch writes for a request past num_tokens; return
    the keys that stay.
    """
    stays = []
    for item in record.unwritten:
        if (item.position + 1) * tx.config.groups[item.group_id].block_size <= num_tokens:
            stays.append(item)
        elif tx.device.keys[item.block] == item.key:
            tx.device.unpublish_full(item.block)
    drop_merges(tx, request, num_tokens)
    return pvector(stays)


def drop_merges(tx: Transaction, request: RequestState, num_tokens: int) -> None:
    """Forget the merges of a request's blocks past num_tokens, which are not written, or leave."""
    if tx.batch.merges:
        left = [x for x in tx.batch.merges if not is_unwritten(tx, x, num_tokens, request)]
        tx.batch = replace(tx.batch, merges=pvector(left))


def is_unwritten(tx: Transaction, merge: Merge, num_tokens: int, request: RequestState) -> bool:
    """Return whether a merge waits for a block that a request will not write, or gives back, if it
    keeps num_tokens tokens.
    """
    end = (merge.position + 1) * tx.config.groups[merge.group_id].block_size
    return merge.request_id == request.request_id and end > num_tokens


def cut_tables(
    tx: Transaction, request: RequestState, num_tokens: int, num_to_come: int = 0
) -> None:
    """Keep the blocks of `num_tokens` tokens, release the rest tail first, and store the request.

    Drafts are dropped, and so are positions to come from num_to_come on. The computed count is
    lowered to num_tokens, or to 0, without any blocks, if the window that it needs was given back.
    """
    if tx.config.has_states and request.num_scheduled_drafts:
        num_tokens = min(num_tokens, request.tokens.length)
    num_computed = min(request.num_accepted + num_to_come, num_tokens)
    if tx.resumable(request, num_computed) < num_computed:
        num_computed = num_tokens = 0
    if tx.loads:
        lower_counted(tx, request.request_id, num_computed)
    drop_merges(tx, request, num_computed)
    edit, num_cached = TableEdit(tx, request), []
    for index, group in enumerate(tx.config.groups):
        table = request.tables[index]
        keep = tx.num_kept(index, table, num_tokens)
        if len(table) > keep:
            edit.cut(index, keep)
        num_cached.append(num_cached_after(request, index, group, num_computed))
    cut = replace(
        request,
        drafts=pvector(),
        tables=tuple(edit.tables),
        num_computed=num_computed,
        num_cached=tuple(num_cached),
    )
    tx.put(cut.awaiting_before(tx.batch.number, request))
    settle_waiting(tx, request.request_id)


def num_cached_after(request: RequestState, group_id: int, group: Group, num_tokens: int) -> int:
    """Return how many leading blocks of a table with num_tokens tokens need no publication, or are
    null blocks in a state group.
    """
    last = num_tokens // group.block_size
    if group.is_state:
        last = max(0, num_tokens - 1) // group.block_size
    return min(request.num_cached[group_id], last)


def release_host(tx: Transaction, request: RequestState) -> None:
    """Give back a request's host blocks, tail first. It waits again."""
    host = tx.host_tier()
    for table in request.host_tables:
        host.release([block for block in table[::-1] if block != NO_HOST_BLOCK])
    tx.put(replace(request, host_tables=(), num_computed=0))


def drop_host(tx: Transaction, request: RequestState) -> None:
    """Give back a swapped request's host blocks; it waits, as after a preemption."""
    release_host(tx, request)
    if tx.loads:
        lower_counted(tx, request.request_id, 0)
    waiting = replace(tx.request(request.request_id), preempted=True)
    tx.put(waiting.awaiting(request.awaited))
    settle_waiting(tx, request.request_id)
