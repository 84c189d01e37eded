# SPDX-License-Identifier: Apache-2.0
"""Named properties of every reachable state; `check` asserts them all.

Invariants: each property is one function that yields its violations as text with numbers; its name
is the one in docs/invariants.md. No transition calls anything here. Properties of requests and
their tables are in requests.py. Cost: O(pool + tokens). The twin's state is checked through its
canonical bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from kvcore.invariants import requests
from kvcore.invariants.requests import Property
from kvcore.pool.block_pool import BlockPool
from kvcore.pool.free_queue import num_older
from kvcore.state.batch_records import UnconfirmedLoad
from kvcore.state.state import NO_HOST_BLOCK, State
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Status


class Pools(Protocol):
    """The pools of one or two tiers: a state, and `kvcore.legacy.blocks.tiers.Tiers`."""

    @property
    def device(self) -> BlockPool:
        """The blocks of the device."""
        ...

    @property
    def host(self) -> BlockPool | None:
        """The pool of the host tier, if any."""
        ...


def check(state: State) -> None:
    """Raise InvariantViolation for the first property that does not hold."""
    for name, holds in PROPERTIES.items():
        for detail in holds(state):
            raise InvariantViolation(name, detail)


def pools(state: Pools) -> list[tuple[str, BlockPool]]:
    """Return each tier with its pool."""
    tiers = [("device", state.device)]
    return tiers if state.host is None else [*tiers, ("host", state.host)]


def ref(state: State) -> Iterator[str]:
    """REF: a block's reference count is the number of tables that hold it, plus its pins and the
    batches in flight that own it.
    """
    for tier, pool in pools(state):
        held = _owners(state, pool, tier)
        for block, (count, expected) in enumerate(zip(pool.ref_counts, held, strict=True)):
            if count != expected:
                yield f"{tier} block {block} counts {count} owners, but {expected} hold it"


def _owners(state: State, pool: BlockPool, tier: str) -> list[int]:
    """Count the tables and pins of each block of a tier."""
    held = [0] * pool.num_blocks
    for block, count in pool.pins.items():
        held[block] = count
    for request in state.requests.values():
        for table in request.tables if tier == "device" else request.host_tables:
            for block in table:
                if block >= pool.first_block and block != NO_HOST_BLOCK:
                    held[block] += 1
    for batch in state.in_flight if tier == "device" else ():
        for owed in batch.owed:
            held[owed.block] += 1
    return held


def partition(state: Pools) -> Iterator[str]:
    """PARTITION: a usable block is free or quarantined if and only if it has no owner."""
    for tier, pool in pools(state):
        free = {*pool.queue, *(pool.quarantine or ())}
        for block in range(pool.first_block, pool.num_blocks):
            if (pool.ref_counts[block] == 0) != (block in free):
                owners = pool.ref_counts[block]
                yield f"{tier} block {block} has {owners} owners, in a queue: {block in free}"


def queue_unique(state: Pools) -> Iterator[str]:
    """FQ-UNIQ: no block is in the free queue or in quarantine twice, links agree in both
    directions, and counters equal lengths.
    """
    for tier, pool in pools(state):
        seen: set[int] = set()
        queues = [pool.queue]
        queues += [] if pool.quarantine is None else [pool.quarantine.queue]
        for queue in queues:
            order: list[int] = []
            for sentinel in range(pool.num_blocks, len(queue.following)):
                block = queue.following[sentinel]
                while block != sentinel and len(order) <= pool.num_blocks:
                    order.append(block)
                    if queue.following[queue.preceding[block]] != block:
                        yield f"{tier} links around block {block} disagree"
                    block = queue.following[block]
            if len(order) != len({*order} - seen) or len(order) != queue.length:
                yield f"{tier} free queue {order} counts {queue.length}"
            seen.update(order)


def null_block(state: Pools) -> Iterator[str]:
    """NULL: the null block is not free, and has no key, no owner and no pin."""
    pool = state.device
    for block in range(pool.first_block):
        if block in {*pool.queue, *(pool.quarantine or ())}:
            yield "the null block is in the free queue"
        if pool.has_key(block):
            yield "the null block has a key"
        if pool.ref_counts[block] or block in pool.pins:
            yield "the null block has an owner"


def index_sound(state: Pools) -> Iterator[str]:
    """IDX-SOUND: a block in the index has the key under which it is found; links agree in both
    directions, and join only blocks with one key.
    """
    for tier, pool in pools(state):
        index, num_linked = pool.index, 0
        for key, blocks in index.items():
            num_linked += len(blocks) if len(blocks) > 1 else 0
            for block in blocks:
                if pool.keys[block] != key:
                    yield f"{tier} block {block} is found under {key.hex()}, which is not its key"
        for block, after in index.following.items():
            if index.preceding.get(after) != block:
                yield f"{tier} index links from block {block} to {after}, but not back"
        if len(index.following) != num_linked or len(index.preceding) != num_linked:
            yield f"{tier} index links {len(index.following)} blocks, but {num_linked} share a key"


def index_complete(state: Pools) -> Iterator[str]:
    """IDX-COMPLETE: a block with a key is found under it exactly once."""
    for tier, pool in pools(state):
        found = Counter((key, block) for key, blocks in pool.index.items() for block in blocks)
        for block, key in enumerate(pool.keys):
            if key is not None and found[key, block] != 1:
                yield f"{tier} block {block} is not found under its key {key.hex()}"


def leak(state: State) -> Iterator[str]:
    """LEAK: if there are no requests, pins and batches in flight, every usable block is free."""
    if len(state.requests):
        return
    for tier, pool in pools(state):
        waits = pool.pins or state.in_flight or _used_by(pool, state.batch.number)
        if not waits and pool.num_free != pool.num_usable:
            yield f"{tier} tier has {pool.num_free} of {pool.num_usable} blocks free"


def _used_by(pool: BlockPool, number: int) -> bool:
    """Return whether a batch uses a quarantined block."""
    waiting = pool.quarantine
    return waiting is not None and any(number in waiting.busy.get(b, ()) for b in waiting)


def quarantine(state: State) -> Iterator[str]:
    """QUARANTINE: an ownerless block is quarantined if and only if a batch in flight uses it."""
    numbers = {batch.number for batch in state.in_flight} | {state.batch.number}
    for tier, pool in pools(state):
        if pool.quarantine is None:
            continue
        waiting, busy = set(pool.quarantine), pool.quarantine.busy
        for block, users in busy.items():
            if not users or users - numbers:
                yield f"{tier} block {block} is used by batches {sorted(users)}, not {numbers}"
            if pool.ref_counts[block] == 0 and block not in waiting:
                yield f"{tier} block {block} is free, but used by batches {sorted(users)}"
        for block in waiting - set(busy):
            yield f"{tier} block {block} is quarantined, but no batch uses it"


def in_flight(state: State) -> Iterator[str]:
    """IN-FLIGHT: the numbers of batches in flight ascend to that of the open batch; a batch has
    entries for known requests alone, each with an order of its own, and notes replaced positions
    only among those that its forward pass uses.
    """
    numbers = [batch.number for batch in state.in_flight] + [state.batch.number]
    if numbers != sorted(set(numbers)) or len(numbers) > state.config.max_in_flight + 1:
        yield f"batches {numbers} are in flight or open, at most {state.config.max_in_flight}"
    for batch in state.in_flight:
        for request_id, entry in batch.entries.items():
            name = f"batch {batch.number} has an entry for request {request_id!r}"
            request = state.requests.get(request_id)
            if request is None:
                yield f"{name}, which is not known"
            elif any(h > len(t) for h, t in zip(entry.held, request.tables, strict=True)):
                yield f"{name} with {entry.held} blocks, but its tables are shorter"
            if entry.restore > entry.before:
                yield f"{name}: restores {entry.restore} of {entry.before} tokens"
            if any(position >= entry.held[group_id] for group_id, position in entry.replaced):
                yield f"{name} with {entry.held} blocks, of which {sorted(entry.replaced)} are lost"
    for entries in (*(batch.entries for batch in state.in_flight), state.batch.entries):
        orders = sorted(entry.order for entry in entries.values())
        if orders != list(range(len(orders))):
            yield f"a batch has entries with orders {orders}"
    for request_id in state.batch.entries:
        if request_id not in state.requests:
            yield f"the open batch has an entry for request {request_id!r}, which is not known"


def unconfirmed(state: State) -> Iterator[str]:
    """UNCONFIRMED: an unconfirmed load belongs to a batch that may still fail; some known request
    can report it; requests that rest on it count its tokens; its blocks have keys, or are owed
    some by batches; and unless duplicates are merged, each request that holds such a block after
    its start, and counts it to its noted end, rests on it.
    """
    numbers = [batch.number for batch in state.in_flight] + [state.batch.number]
    if not state.config.max_in_flight:
        numbers.insert(0, state.batch.number - 1)
    batches = [load.batch for load in state.loads]
    if batches != sorted(batches) or not set(batches) <= set(numbers):
        yield f"loads of batches {batches} are unconfirmed, but only those of {numbers} may be"
    for load in state.loads:
        for detail in _wrong_in_load(state, load):
            yield f"load {load.first}-{load.end} of batch {load.batch}: {detail}"


def _wrong_in_load(state: State, load: UnconfirmedLoad) -> Iterator[str]:
    """Yield the errors of one unconfirmed load."""
    if not load.first < load.end <= state.config.length_limit:
        yield f"a request has at most {state.config.length_limit} tokens"
    if not load.reporters:
        yield "no request can report it"
    resting = {each.request_id for each in load.reporters if each.counted}
    if load.batch == state.batch.number and not resting:
        yield "no request counts it, but its batch is open"
    for each in load.reporters:
        request = state.requests.get(each.request_id)
        if request is None:
            yield f"request {each.request_id!r}, which can report it, is not known"
            continue
        counted = request.num_accepted
        if not load.first < each.most <= load.end:
            yield f"request {each.request_id!r} rested on it up to {each.most}"
        if each.counted and not load.first < each.counted <= min(each.most, counted):
            end = each.counted
            yield f"request {each.request_id!r} rests on it up to {end}, but counts {counted}"
    groups, fine = state.config.groups, state.config.hash_block_size
    has_parts = state.config.has_tails
    sizes = [fine if each.is_state or has_parts else each.block_size for each in groups]
    owed = {owed.block for batch in state.in_flight for owed in batch.owed}
    for block, end in load.blocks:
        if not state.device.has_key(block) and block not in owed:
            yield f"block {block} rests on it, but has no key"
        if end <= load.first or all(end % size for size in sizes):
            yield f"block {block} rests on it, but ends at {end}"
    if state.config.duplicates == "merge":
        return
    ends = dict(load.blocks)
    for request_id, request in state.requests.items():
        for group, table in zip(groups, request.tables, strict=True):
            behind = table[-(-load.first // group.block_size) :]
            held = {x for x in behind if x in ends and ends[x] <= request.num_accepted}
            if held and request_id not in resting:
                yield f"request {request_id!r} holds blocks {sorted(held)} but does not rest on it"


def rows(state: State) -> Iterator[str]:
    """ROWS: each row is exactly one of: taken by a request, free, held for an unfinished batch."""
    if len(state.batch.scheduled) != len(state.rows):
        yield f"the open batch knows {len(state.batch.scheduled)} of {len(state.rows)} rows"
    taken = {row: name for row, name in enumerate(state.rows) if name is not None}
    if taken != {request.row: request_id for request_id, request in state.requests.items()}:
        yield f"rows {taken} are not those of the requests"
    held = [row for row, _ in state.held_rows]
    if sorted([*state.free_rows, *held]) != [
        r for r, name in enumerate(state.rows) if name is None
    ]:
        yield f"free rows {list(state.free_rows)} and {held} are not those without a request"
    batches = [batch for _, batch in state.held_rows]
    numbers = [batch.number for batch in state.in_flight] + [state.batch.number]
    if batches != sorted(batches) or not set(batches) <= set(numbers):
        yield f"rows are held for batches {batches}, but {numbers} are unfinished"


def epochs(state: State) -> Iterator[str]:
    """EPOCHS: blocks of older epochs have no key, and either have owners or leave first; a request
    with computed tokens belongs to an epoch that has begun, any other request to none.
    """
    pool, first = state.device, state.config.epoch
    leaving = [*pool.queue][: num_older(pool.queue)]
    free = pool.older.intersection(pool.queue)
    keyed = [block for block in (*leaving, *pool.older) if pool.has_key(block)]
    if keyed or free:
        yield f"blocks {keyed} of older epochs have keys, {sorted(free)} are free among others"
    if pool.retention is not None:
        leaving = []
    if not first <= state.epoch or (first == state.epoch and (leaving or pool.older)):
        yield f"epoch {state.epoch} follows {first}, but blocks {leaving} are of older ones"
    for request_id, request in state.requests.items():
        least, most = (first, state.epoch) if request.num_computed else (0, 0)
        if not least <= request.epoch <= most:
            yield f"request {request_id!r} is of epoch {request.epoch}, not {least} to {most}"


def records(state: State) -> Iterator[str]:
    """OPEN-BATCH: the open batch has records of running requests alone, none of which counts fewer
    tokens than when the batch was opened.
    """
    for request_id, record in zip(state.rows, state.batch.scheduled, strict=False):
        if record is None:
            continue
        request = None if request_id is None else state.requests[request_id]
        if request is None or request.status is not Status.RUNNING:
            yield f"request {request_id!r} is in the open batch, but does not run"
            continue
        name = f"request {request_id!r}"
        if record.num_computed_before > request.num_computed:
            yield f"{name} counts less than before the open batch"
        if not record.num_computed_before <= record.num_kept <= request.num_computed:
            yield f"{name} counts {request.num_computed}, but keeps at least {record.num_kept}"
        for item in record.unwritten:
            if item.group_id >= len(state.config.groups):
                yield f"{name} published in group {item.group_id} of {len(state.config.groups)}"
                continue
            size = state.config.groups[item.group_id].block_size
            if (item.position + 1) * size <= record.num_computed_before:
                yield f"block {item.block} was written before the open batch"
            if list(request.tables[item.group_id][item.position :])[:1] != [item.block]:
                yield f"{name} published block {item.block}, which it does not hold"
    for merge in state.batch.merges:
        if merge.group_id >= len(state.config.groups):
            yield f"a merge names group {merge.group_id} of {len(state.config.groups)}"


def named_pins(state: State) -> Iterator[str]:
    """NAMED-PINS: a pin of a prefix holds each of its blocks once, in addition to operations, and
    belongs to an epoch that has begun; all pins together hold at most `max_pinned_blocks`.
    """
    if len(state.named_pins):
        from kvcore.invariants.claims import wrong_pins  # few states have any

        yield from wrong_pins(state)


def operations(state: State) -> Iterator[str]:
    """OPERATIONS: each unfinished operation holds its block; a request waits for the operations
    that name it.
    """
    waiting = (each.num_loading or each.load_end for each in state.requests.values())
    if len(state.operations) or any(waiting):
        from kvcore.invariants.claims import wrong_operations  # few states have any

        yield from wrong_operations(state)


OF_POOLS = frozenset({partition, queue_unique, null_block, index_sound, index_complete})
"""Properties that read the pools alone."""


def rank_order(state: State) -> Iterator[str]:
    """RANK-ORDER: each free block is in its level's part of the queue; a block without a key is in
    the first part, and has no retention wish.
    """
    if state.device.retention is not None:
        from kvcore.invariants.retention import misplaced  # few pools have levels

        yield from misplaced(state.device, state.device.retention)


PROPERTIES: dict[str, Property] = {
    "REF": ref,
    "PARTITION": partition,
    "FQ-UNIQ": queue_unique,
    "NULL": null_block,
    "QUARANTINE": quarantine,
    "IN-FLIGHT": in_flight,
    "UNCONFIRMED": unconfirmed,
    "IDX-SOUND": index_sound,
    "IDX-COMPLETE": index_complete,
    "TAIL-SOUND": requests.tail_sound,
    "LEAK": leak,
    "ROWS": rows,
    "EPOCHS": epochs,
    "RANK-ORDER": rank_order,
    "OPEN-BATCH": records,
    "OPERATIONS": operations,
    "NAMED-PINS": named_pins,
    **requests.PROPERTIES,
}
