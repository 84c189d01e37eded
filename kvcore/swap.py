# SPDX-License-Identifier: Apache-2.0
"""Swap: the blocks of a set of requests move between the device and the host tier.

Rules: each distinct block of the set is copied once and shared again on the other side; a block
that others hold is copied and stays for them. Swapped out, a request leaves the open batch first;
what is left of it is copied, and with nothing left it waits. On the way in, a block whose content
is findable on the device is a hit, not a copy, unless the open batch published it. Source: design,
7.6; S003-25 to 28. Twin: rust/src/swap.rs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
from pyrsistent import pvector

from kvcore.block_pool import PoolDraft
from kvcore.commands import SetTable, SwapIn, SwapOut
from kvcore.errors import NotRunning, NotSwapped
from kvcore.release import check_leaving, cut_tables, leave_open_batch, release_host
from kvcore.state import Draft, RequestState, State, transition
from kvcore.values import Outcome, Reason, Refused, Status


def swap_out(state: State, request_ids: Iterable[str]) -> Outcome[State, Refused | None]:
    """Move what the open batch leaves of the requests' blocks to the host tier.

    Refused where the host tier has too few free blocks. Raises NoHostTier, UnknownRequest,
    RepeatedRequest, NotRunning, HitInOpenBatch.
    """
    ids = list(request_ids)

    def change(draft: Draft) -> Refused | None:
        host = draft.host_tier()
        requests = draft.distinct(ids)
        for request in requests:
            if request.status is not Status.RUNNING:
                raise NotRunning(request=repr(request.request_id))
        check_leaving(draft, requests)
        blocks = list(dict.fromkeys(block for each in requests for block in kept(draft, each)))
        if len(blocks) > host.num_free:
            return refuse(host, len(blocks))
        for request in requests:
            leave_open_batch(draft, request)
        targets = dict(zip(blocks, host.take(len(blocks)), strict=True))
        for block, target in targets.items():
            draft.effects.emit(SwapOut(block, target))
        move_out(draft, ids, targets)
        return None

    return transition(state, change)


def swap_in(state: State, request_ids: Iterable[str]) -> Outcome[State, Refused | None]:
    """Move swapped requests back to the device.

    Refused where the device has too few free blocks. Raises NoHostTier, UnknownRequest,
    RepeatedRequest, NotSwapped.
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
        in_queue = sum(draft.device.ref_counts[block] == 0 for block in found if block is not None)
        num_copied = sum(block is None for block in hits.values())
        if num_copied + in_queue > draft.device.num_free:
            return refuse(draft.device, num_copied + in_queue)
        move_in(draft, requests, hits)
        return None

    return transition(state, change)


def refuse(pool: PoolDraft, needed: int) -> Refused:
    """The refusal of so many blocks of a pool."""
    never = needed > pool.num_usable
    return Refused(Reason.NEVER if never else Reason.LATER, needed, pool.num_free)


def kept(draft: Draft, request: RequestState) -> Iterator[int]:
    """The blocks of a request that hold tokens computed before the open batch, in table order."""
    record = draft.records.get(request.request_id)
    num_tokens = request.num_computed if record is None else record.num_computed_before
    num_blocks = -(-num_tokens // draft.config.block_size)
    for table in request.tables:
        yield from table[:num_blocks]


def move_out(draft: Draft, request_ids: list[str], targets: dict[int, int]) -> None:
    """Put the requests' tables on the host side and give back their device blocks, tail first."""
    host = draft.host_tier()
    owned: set[int] = set()
    for request_id in request_ids:
        request = draft.request(request_id)
        num_blocks = -(-request.num_computed // draft.config.block_size)
        tables = []
        for table in request.tables:
            ids = [targets[block] for block in table[:num_blocks]]
            for block in ids:
                if block in owned:
                    host.touch(block)
                owned.add(block)
            tables.append(pvector(ids))
        cut_tables(draft, request, 0)
        moved = draft.request(request_id)
        if request.num_computed:
            moved = attrs.evolve(
                moved, num_computed=request.num_computed, host_tables=tuple(tables)
            )
        else:
            moved = attrs.evolve(moved, preempted=True)
        draft.store(moved)


def find_hits(draft: Draft, requests: list[RequestState]) -> dict[int, int | None]:
    """Host block to the device block that has its content, None where it must be copied."""
    unwritten = {item.block for record in draft.records.values() for item in record.published}
    hits: dict[int, int | None] = {}
    for request in requests:
        num_full = request.num_computed // draft.config.block_size
        for group, table in enumerate(request.host_tables):
            for position, host_block in enumerate(table):
                hits.setdefault(host_block, None)
                if not draft.config.enable_caching or position >= num_full:
                    continue
                block = draft.device.index.first(request.key(position, group))
                if block is not None and block not in unwritten:
                    hits[host_block] = block
    return hits


def move_in(draft: Draft, requests: list[RequestState], hits: dict[int, int | None]) -> None:
    """Put the requests' tables on the device side and give back their host blocks, tail first."""
    for block in dict.fromkeys(hits.values()):
        if block is not None:
            draft.device.touch(block)
    sources = [host_block for host_block, block in hits.items() if block is None]
    copies = dict(zip(sources, draft.device.take(len(sources)), strict=True))
    for host_block, block in copies.items():
        draft.effects.emit(SwapIn(host_block, block))
    owned: set[int] = set()
    for request in requests:
        tables, num_cached = [], []
        for group, table in enumerate(request.host_tables):
            ids = []
            for position, host_block in enumerate(table):
                block = hits[host_block]
                block = copies[host_block] if block is None else block
                if block in owned:
                    draft.device.touch(block)
                owned.add(block)
                ids.append(block)
                draft.effects.emit(SetTable(request.row, group, position, block))
            tables.append(pvector(ids))
            num_cached.append(num_published(draft, request, ids))
        release_host(draft, request)
        back = attrs.evolve(
            draft.request(request.request_id),
            num_computed=request.num_computed,
            tables=tuple(tables),
            num_cached=tuple(num_cached),
        )
        draft.store(back)


def num_published(draft: Draft, request: RequestState, blocks: list[int]) -> int:
    """Leading full blocks that are findable already."""
    num_full = request.num_computed // draft.config.block_size
    for position in range(num_full):
        if draft.device.keys[blocks[position]] is None:
            return position
    return num_full
