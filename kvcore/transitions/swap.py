# SPDX-License-Identifier: Apache-2.0
"""Swap: the blocks of a set of requests move between the device and the host tier.

Invariants: each distinct block of the set is copied once and shared again on the other side; a
block that other requests hold is copied and stays for them. A request that is swapped out leaves
the open batch first; its remaining blocks are copied, and if none remain, it waits. On the way in,
a block whose content is findable on the device is a hit, not a copy, unless the open batch
published it.
Source: S003-25 to 28. Twin: rust/src/transitions/swap.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.pool.block_pool import PoolTransaction
from kvcore.state.state import NO_HOST_BLOCK, NULL_BLOCK, RequestState, State
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.state.waiting import settle_waiting
from kvcore.transitions.batches import settle_own_merges
from kvcore.transitions.drain import forget_new
from kvcore.transitions.free import check_leaving, cut_tables, leave_open_batch, release_host
from kvcore.transitions.in_flight import note_request
from kvcore.transitions.unconfirmed_loads import lower_counted, note_owner
from kvcore.transitions.window import last_state
from kvcore.types.commands import SwapIn, SwapOut
from kvcore.types.errors import NotRunning, NotSwapped
from kvcore.types.values import Outcome, Reason, Refused, Status, Swapped


def swap_out(state: State, request_ids: Iterable[str]) -> Outcome[State, Swapped | Refused]:
    """Move the requests' blocks, without what the open batch would write, to the host tier.

    Value: the moved blocks. Refused if the host tier has too few free blocks. Raises NoHostTier,
    UnknownRequest, RepeatedRequest, NotRunning, LoadUnfinished, HitInOpenBatch.
    """
    ids = list(request_ids)

    def change(tx: Transaction) -> Swapped | Refused:
        host = tx.host_tier()
        requests = tx.distinct(ids)
        for request in requests:
            if request.status is not Status.RUNNING:
                raise NotRunning(request=request.request_id)
            tx.idle(request.request_id)
        check_leaving(tx, requests)
        counts = [num_saved(tx, request) for request in requests]
        held = [kept(tx, *each) for each in zip(requests, counts, strict=True)]
        blocks = list(dict.fromkeys(block for each in held for block in each))
        if len(blocks) > host.num_free:
            return refuse(host, len(blocks), pending=host.num_quarantined)
        for request in requests:
            leave_open_batch(tx, request)
        targets = dict(zip(blocks, host.take(len(blocks)), strict=True))
        for block, target in targets.items():
            tx.effects.commands.append(SwapOut(block, target))
            tx.device.use(block, tx.batch.number)
            host.use(target, tx.batch.number)
        move_out(tx, dict(zip(ids, counts, strict=True)), targets)
        return Swapped(len(blocks), 0)

    return transition(state, change)


def swap_in(state: State, request_ids: Iterable[str]) -> Outcome[State, Swapped | Refused]:
    """Move swapped requests back to the device.

    Value: the moved blocks. Refused if the device has too few free blocks. Raises NoHostTier,
    UnknownRequest, RepeatedRequest, NotSwapped.
    """
    ids = list(request_ids)

    def change(tx: Transaction) -> Swapped | Refused:
        tx.host_tier()
        requests = tx.distinct(ids)
        for request in requests:
            if request.status is not Status.SWAPPED:
                raise NotSwapped(request=request.request_id)
        hits = find_hits(tx, requests)
        found = set(hits.values()) - {None}
        in_queue = sum(tx.device.is_queued(block) for block in found if block is not None)
        num_copied = sum(block is None for block in hits.values())
        needed, watermark = num_copied + in_queue, tx.config.watermark_blocks
        kept = tx.device.num_kept(taker_of(tx, requests), [b for b in found if b is not None])
        if needed and needed + watermark + kept > tx.device.num_free:
            return refuse(tx.device, needed, watermark, tx.num_pending(), kept)
        move_in(tx, requests, hits)
        return Swapped(num_copied, len(hits) - num_copied)

    return transition(state, change)


def taker_of(tx: Transaction, requests: list[RequestState]) -> int:
    """Return the tenant of all these requests, or 0: a call for several leaves what each keeps."""
    tenants = {tx.tenant(request) for request in requests}
    return tenants.pop() if len(tenants) == 1 else 0


def first_tenants(
    tx: Transaction, requests: list[RequestState], host_blocks: list[int]
) -> list[int]:
    """Return for each host block the tenant of the first of these requests that holds it."""
    tenants: dict[int, int] = {}
    for request in requests:
        for host_block in chain.from_iterable(request.host_tables):
            tenants.setdefault(host_block, tx.tenant(request))
    return [tenants[host_block] for host_block in host_blocks]


def refuse(
    pool: PoolTransaction, needed: int, watermark: int = 0, pending: int = 0, kept: int = 0
) -> Refused:
    """Return the refusal of `needed` blocks by a pool that keeps `watermark` blocks free, and
    `kept` blocks for the floors of others.
    """
    never = needed + watermark > pool.num_usable
    available = max(0, pool.num_free - watermark - kept)
    return Refused(Reason.NEVER if never else Reason.LATER, needed, available, pending)


def num_saved(tx: Transaction, request: RequestState) -> int:
    """Return how many tokens a request keeps when it is swapped out: those computed before the open
    batch.

    If tokens are to come, it keeps at most all but one, so that the next one is sampled again.
    """
    record = tx.scheduled[request.row]
    if tx.config.has_states and record is not None:
        from kvcore.transitions.states import num_left  # few models have states

        left = num_left(record)
        ahead = request.num_output_placeholders > 0
        return 0 if ahead and left >= request.tokens.length else left
    if not request.num_output_placeholders:
        return tx.num_settled(request)
    num_tokens = request.tokens.length - 1
    if record is not None:
        num_tokens = min(num_tokens, record.num_computed_before)
    return tx.resumable(request, num_tokens)


def kept(tx: Transaction, request: RequestState, num_tokens: int) -> Iterator[int]:
    """Yield the blocks of a request that hold its first tokens, in table order."""
    for group_id in range(len(request.tables)):
        held = saved_table(tx, request, group_id, num_tokens)
        yield from (block for block in held if not tx.is_null(block))


def saved_table(
    tx: Transaction, request: RequestState, group_id: int, num_tokens: int
) -> Iterable[int]:
    """Return the blocks of a table that hold a request's first tokens; of a state group, the last
    state before those after drafts, alone.
    """
    table = request.tables[group_id]
    num_kept = tx.num_kept(group_id, table, num_tokens)
    if not tx.config.groups[group_id].is_state or not num_kept:
        return table[:num_kept]
    block = table[num_kept - 1]
    if tx.is_null(block):
        block = table[last_state(request, table)]
    return [*[NULL_BLOCK] * (num_kept - 1), block]


def move_out(tx: Transaction, counts: dict[str, int], targets: dict[int, int]) -> None:
    """Move the requests' tables to the host tier and give back their device blocks, tail first.

    counts: the tokens that each keeps.
    """
    host = tx.host_tier()
    owned: set[int] = set()
    for request_id, num_computed in counts.items():
        request = tx.request(request_id)
        tables = []
        for group_id in range(len(request.tables)):
            held = saved_table(tx, request, group_id, num_computed)
            ids = [NO_HOST_BLOCK if tx.is_null(block) else targets[block] for block in held]
            for block in ids:
                if block in owned:
                    host.touch(block)
                if block != NO_HOST_BLOCK:
                    owned.add(block)
            tables.append(pvector(ids))
        settle_own_merges(tx, request_id)
        loads = tx.loads
        cut_tables(tx, tx.request(request_id), 0)
        note_request(tx, request_id, 0, 0)
        moved = tx.request(request_id)
        if num_computed:
            tx.loads = loads
            lower_counted(tx, request_id, num_computed)
            moved = replace(
                moved,
                num_computed=num_computed,
                host_tables=tuple(tables),
                epoch=request.epoch,
            )
        else:
            moved = replace(moved, preempted=True)
        tx.put(moved.awaiting(moved.samplers))
        settle_waiting(tx, request_id)


def find_hits(tx: Transaction, requests: list[RequestState]) -> dict[int, int | None]:
    """Map each host block to the device block with its content, or to None if it must be copied."""
    unwritten = {item.block for record in tx.scheduled if record for item in record.unwritten}
    hits: dict[int, int | None] = {}
    for request in requests:
        may_hit = tx.config.enable_caching and not tx.is_stale(request)
        for index, group in enumerate(tx.config.groups):
            num_full = request.num_computed // group.block_size
            num_full = min(num_full, request.num_hashed(tx.config, index))
            for position, host_block in enumerate(request.host_tables[index]):
                if host_block == NO_HOST_BLOCK:
                    continue
                hits.setdefault(host_block, None)
                if not may_hit or position >= num_full:
                    continue
                if group.is_state and (position + 1) * group.block_size != request.num_computed:
                    continue
                key = request.key(tx.config, index, position)
                block = tx.device.index.first(key)
                if block is not None and block not in unwritten:
                    hits[host_block] = block
    return hits


def move_in(tx: Transaction, requests: list[RequestState], hits: dict[int, int | None]) -> None:
    """Move the requests' tables to the device and give back their host blocks, tail first."""
    for block in dict.fromkeys(hits.values()):
        if block is not None:
            tx.device.touch(block)
    sources = [host_block for host_block, block in hits.items() if block is None]
    taken = tx.device.take(len(sources), taker_of(tx, requests))
    if tx.device.floors is not None:
        tx.device.note_takers(taken, first_tenants(tx, requests, sources))
    forget_new(tx, taken)
    copies = dict(zip(sources, taken, strict=True))
    for host_block, block in copies.items():
        tx.effects.commands.append(SwapIn(host_block, block))
        tx.device.use(block, tx.batch.number)
        tx.host_tier().use(host_block, tx.batch.number)
    owned: set[int] = set()
    for request in requests:
        edit, num_cached = TableEdit(tx, request), []
        for group_id, table in enumerate(request.host_tables):
            ids = [place(host_block, hits, copies) for host_block in table]
            edit.extend(group_id, _owning(tx, ids, owned))
            if tx.loads:
                note_owner(tx, request.request_id, ids, request.num_accepted)
            num_cached.append(num_published(tx, request, group_id, ids))
        release_host(tx, request)
        note_request(tx, request.request_id, 0, 0)
        back = replace(
            tx.request(request.request_id),
            num_computed=request.num_computed,
            tables=tuple(edit.tables),
            num_cached=tuple(num_cached),
            epoch=request.epoch,
        )
        tx.put(back)


def _owning(tx: Transaction, blocks: list[int], owned: set[int]) -> Iterator[int]:
    """Yield the blocks, adding an owner to each unless it occurs for the first time."""
    for block in blocks:
        if block in owned:
            tx.device.touch(block)
        if not tx.is_null(block):
            owned.add(block)
        yield block


def place(host_block: int, hits: dict[int, int | None], copies: dict[int, int]) -> int:
    """Return the device block that has a host block's content."""
    if host_block == NO_HOST_BLOCK:
        return NULL_BLOCK
    block = hits[host_block]
    return copies[host_block] if block is None else block


def num_published(tx: Transaction, request: RequestState, group_id: int, blocks: list[int]) -> int:
    """Count the leading full blocks that are findable already or no longer needed."""
    group = tx.config.groups[group_id]
    if group.is_state:
        return len(blocks) - 1
    num_full = request.num_computed // group.block_size
    for position in range(min(num_full, len(blocks))):
        block = blocks[position]
        if not tx.is_null(block) and tx.device.keys[block] is None:
            return position
    return min(num_full, len(blocks))
