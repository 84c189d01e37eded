# SPDX-License-Identifier: Apache-2.0
"""Swap: the blocks of a set of requests move between the device and the host tier.

Rules: each distinct block of the set is copied once and shared again on the other side; a block
that others hold is copied and stays for them. Swapped out, a request leaves the open batch first;
what is left of it is copied, and with nothing left it waits. On the way in, a block whose content
is findable on the device is a hit, not a copy, unless the open batch published it. Source: design,
7.6; S003-25 to 28. Twin: rust/src/transitions/swap.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace as evolve
from pyrsistent import pvector

from kvcore.pool.block_pool import PoolDraft
from kvcore.state.draft import Draft, transition
from kvcore.state.state import NO_HOST_BLOCK, NULL_BLOCK, RequestState, State
from kvcore.transitions.drain import forget_new
from kvcore.transitions.free import check_leaving, cut_tables, leave_open_batch, release_host
from kvcore.transitions.in_flight import mark
from kvcore.transitions.unconfirmed_loads import rest
from kvcore.types.commands import SetTable, SwapIn, SwapOut
from kvcore.types.errors import NotRunning, NotSwapped
from kvcore.types.values import Outcome, Reason, Refused, Status


def swap_out(state: State, request_ids: Iterable[str]) -> Outcome[State, Refused | None]:
    """Move what the open batch leaves of the requests' blocks to the host tier.

    Refused where the host tier has too few free blocks. Raises NoHostTier, UnknownRequest,
    RepeatedRequest, NotRunning, LoadUnfinished, HitInOpenBatch.
    """
    ids = list(request_ids)

    def change(draft: Draft) -> Refused | None:
        host = draft.host_tier()
        requests = draft.distinct(ids)
        for request in requests:
            if request.status is not Status.RUNNING:
                raise NotRunning(request=repr(request.request_id))
            draft.idle(request.request_id)
        check_leaving(draft, requests)
        blocks = list(dict.fromkeys(block for each in requests for block in kept(draft, each)))
        if len(blocks) > host.num_free:
            return refuse(host, len(blocks), pending=host.num_quarantined)
        for request in requests:
            leave_open_batch(draft, request)
        targets = dict(zip(blocks, host.take(len(blocks)), strict=True))
        for block, target in targets.items():
            draft.effects.emit(SwapOut(block, target))
            draft.device.use(block, draft.batch.number)
            host.use(target, draft.batch.number)
        move_out(draft, ids, targets)
        return None

    return transition(state, change)


def swap_in(state: State, request_ids: Iterable[str]) -> Outcome[State, Refused | None]:
    """Move swapped requests back to the device.

    Refused where the device has too few free blocks for those that it needs. Raises NoHostTier,
    UnknownRequest, RepeatedRequest, NotSwapped.
    """
    ids = list(request_ids)

    def change(draft: Draft) -> Refused | None:
        draft.host_tier()
        requests = draft.distinct(ids)
        for request in requests:
            if request.status is not Status.SWAPPED:
                raise NotSwapped(request=repr(request.request_id))
        hits = find_hits(draft, requests)
        found = set(hits.values()) - {None}
        in_queue = sum(draft.device.is_queued(block) for block in found if block is not None)
        num_copied = sum(block is None for block in hits.values())
        needed, watermark = num_copied + in_queue, draft.config.watermark_blocks
        if needed and needed + watermark > draft.device.num_free:
            return refuse(draft.device, needed, watermark, draft.num_pending())
        move_in(draft, requests, hits)
        return None

    return transition(state, change)


def refuse(pool: PoolDraft, needed: int, watermark: int = 0, pending: int = 0) -> Refused:
    """The refusal of so many blocks of a pool that keeps so many free."""
    never = needed + watermark > pool.num_usable
    available = max(0, pool.num_free - watermark)
    return Refused(Reason.NEVER if never else Reason.LATER, needed, available, pending)


def kept(draft: Draft, request: RequestState) -> Iterator[int]:
    """The blocks of a request that hold tokens computed before the open batch, in table order."""
    num_tokens = draft.num_settled(request)
    for group, table in enumerate(request.tables):
        held = table[: draft.num_kept(group, table, num_tokens)]
        yield from (block for block in held if not draft.is_null(block))


def move_out(draft: Draft, request_ids: list[str], targets: dict[int, int]) -> None:
    """Put the requests' tables on the host side and give back their device blocks, tail first."""
    host = draft.host_tier()
    owned: set[int] = set()
    for request_id in request_ids:
        request = draft.request(request_id)
        num_computed = draft.num_settled(request)
        tables = []
        for group, table in enumerate(request.tables):
            held = table[: draft.num_kept(group, table, num_computed)]
            ids = [NO_HOST_BLOCK if draft.is_null(block) else targets[block] for block in held]
            for block in ids:
                if block in owned:
                    host.touch(block)
                if block != NO_HOST_BLOCK:
                    owned.add(block)
            tables.append(pvector(ids))
        loads = draft.loads
        cut_tables(draft, request, 0)
        mark(draft, request_id, 0, 0)
        moved = draft.request(request_id)
        if num_computed:
            draft.loads = loads
            moved = evolve(moved, num_computed=num_computed, host_tables=tuple(tables))
        else:
            moved = evolve(moved, preempted=True)
        draft.store(moved)


def find_hits(draft: Draft, requests: list[RequestState]) -> dict[int, int | None]:
    """Host block to the device block that has its content, None where it must be copied."""
    unwritten = {item.block for record in draft.records.values() for item in record.published}
    hits: dict[int, int | None] = {}
    for request in requests:
        for index, group in enumerate(draft.config.groups):
            num_full = request.num_computed // group.block_size
            num_full = min(num_full, request.num_hashed(draft.config, index))
            for position, host_block in enumerate(request.host_tables[index]):
                if host_block == NO_HOST_BLOCK:
                    continue
                hits.setdefault(host_block, None)
                if not draft.config.enable_caching or position >= num_full:
                    continue
                key = request.key(draft.config, index, position)
                block = draft.device.index.first(key)
                if block is not None and block not in unwritten:
                    hits[host_block] = block
    return hits


def move_in(draft: Draft, requests: list[RequestState], hits: dict[int, int | None]) -> None:
    """Put the requests' tables on the device side and give back their host blocks, tail first."""
    for block in dict.fromkeys(hits.values()):
        if block is not None:
            draft.device.touch(block)
    sources = [host_block for host_block, block in hits.items() if block is None]
    taken = draft.device.take(len(sources))
    forget_new(draft, taken)
    copies = dict(zip(sources, taken, strict=True))
    for host_block, block in copies.items():
        draft.effects.emit(SwapIn(host_block, block))
        draft.device.use(block, draft.batch.number)
        draft.host_tier().use(host_block, draft.batch.number)
    owned: set[int] = set()
    for request in requests:
        tables, num_cached = [], []
        for group, table in enumerate(request.host_tables):
            ids = []
            for position, host_block in enumerate(table):
                block = place(host_block, hits, copies)
                if block in owned:
                    draft.device.touch(block)
                if not draft.is_null(block):
                    owned.add(block)
                ids.append(block)
                draft.effects.emit(SetTable(request.row, group, position, block))
            tables.append(pvector(ids))
            if draft.loads:
                rest(draft, request.request_id, ids)
            num_cached.append(num_published(draft, request, group, ids))
        release_host(draft, request)
        mark(draft, request.request_id, 0, 0)
        back = evolve(
            draft.request(request.request_id),
            num_computed=request.num_computed,
            tables=tuple(tables),
            num_cached=tuple(num_cached),
        )
        draft.store(back)


def place(host_block: int, hits: dict[int, int | None], copies: dict[int, int]) -> int:
    """The device block that a host block's content is found in."""
    if host_block == NO_HOST_BLOCK:
        return NULL_BLOCK
    block = hits[host_block]
    return copies[host_block] if block is None else block


def num_published(draft: Draft, request: RequestState, group: int, blocks: list[int]) -> int:
    """Leading full blocks that are findable already, or no longer needed."""
    num_full = request.num_computed // draft.config.groups[group].block_size
    for position in range(min(num_full, len(blocks))):
        block = blocks[position]
        if not draft.is_null(block) and draft.device.keys[block] is None:
            return position
    return min(num_full, len(blocks))
