# SPDX-License-Identifier: Apache-2.0
"""Named properties of every reachable state; `check` asserts them all.

Rules: each property is one function that yields what is wrong, in words with numbers; its name is
that of the list in docs/invariants.md. Nothing here is called by a transition: these are the second
opinion. Cost: O(pool + tokens). Twin: none, the twin's state is checked through its canonical
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kvcore.block_pool import BlockPool
from kvcore.errors import InvariantViolation
from kvcore.hashing import hash_blocks, root_hash
from kvcore.state import RequestState, State
from kvcore.values import Status

Property = Callable[[State], Iterator[str]]


def check(state: State) -> None:
    """Raise InvariantViolation with the first property that does not hold."""
    for name, holds in PROPERTIES.items():
        for detail in holds(state):
            raise InvariantViolation(name, detail)


def pools(state: State) -> Iterator[tuple[str, BlockPool, Counter[int]]]:
    """Each tier with its blocks' holdings by requests."""
    requests = state.requests.values()
    yield "device", state.device, Counter(b for r in requests for t in r.tables for b in t)
    if state.host is not None:
        yield "host", state.host, Counter(b for r in requests for t in r.host_tables for b in t)


def ref(state: State) -> Iterator[str]:
    """REF: a block's count is the number of tables that hold it, and its pins."""
    for tier, pool, held in pools(state):
        for block, count in enumerate(pool.ref_counts):
            expected = held[block] + pool.pins.get(block, 0)
            if count != expected:
                yield f"{tier} block {block} counts {count} owners, {expected} hold it"


def partition(state: State) -> Iterator[str]:
    """PARTITION: a usable block is in the free queue exactly if it has no owner."""
    for tier, pool, _ in pools(state):
        free = set(pool.queue)
        for block in range(pool.first_block, pool.num_blocks):
            if (pool.ref_counts[block] == 0) != (block in free):
                owners = pool.ref_counts[block]
                yield f"{tier} block {block} has {owners} owners, in the queue: {block in free}"


def queue_unique(state: State) -> Iterator[str]:
    """FQ-UNIQ: the free queue has no block twice, its links agree, its length is its counter."""
    for tier, pool, _ in pools(state):
        order: list[int] = []
        queue = pool.queue
        block = queue.following[queue.sentinel]
        while block != queue.sentinel and len(order) <= pool.num_blocks:
            order.append(block)
            if queue.following[queue.preceding[block]] != block:
                yield f"{tier} links around block {block} disagree"
            block = queue.following[block]
        if len(order) != len(set(order)) or len(order) != queue.length:
            yield f"{tier} free queue {order} counts {queue.length}"


def null_block(state: State) -> Iterator[str]:
    """NULL: the null block is not free, has no key, no owner and no pin, and is in no table."""
    pool = state.device
    for block in range(pool.first_block):
        if block in set(pool.queue):
            yield "the null block is in the free queue"
        if pool.keys[block] is not None:
            yield "the null block has a key"
        if pool.ref_counts[block] or block in pool.pins:
            yield "the null block has an owner"


def index_sound(state: State) -> Iterator[str]:
    """IDX-SOUND: a block in the index has the key it is found under; no entry is empty."""
    for tier, pool, _ in pools(state):
        for key, blocks in pool.index.items():
            if not blocks:
                yield f"{tier} index has an empty entry {key.hex()}"
            for block in blocks:
                if pool.keys[block] != key:
                    yield f"{tier} block {block} is found under {key.hex()}, which it does not have"


def index_complete(state: State) -> Iterator[str]:
    """IDX-COMPLETE: a block with a key is found under it, once."""
    for tier, pool, _ in pools(state):
        for block, key in enumerate(pool.keys):
            if key is not None and pool.index.get(key, ()).count(block) != 1:
                yield f"{tier} block {block} is not found under its key {key.hex()}"


def table_length(state: State) -> Iterator[str]:
    """TABLEN: a request's tables, of one tier at a time, hold its computed tokens."""
    for request in state.requests.values():
        size = state.config.block_size
        tables = request.host_tables or request.tables
        needed = -(-request.num_computed // size)
        for table in tables:
            if len(table) < needed:
                yield f"{_name(request)} has {len(table)} blocks for {request.num_computed} tokens"
        if request.host_tables and any(request.tables):
            yield f"{_name(request)} holds blocks of both tiers"


def wait_empty(state: State) -> Iterator[str]:
    """WAIT-EMPTY: a waiting request has computed nothing."""
    for request in state.requests.values():
        if request.status is Status.WAITING and (request.num_computed or any(request.num_cached)):
            yield f"{_name(request)} waits with {request.num_computed} computed tokens"


def no_alias(state: State) -> Iterator[str]:
    """NO-ALIAS: a block is held at one position, once a table, by requests with the same tokens up
    to what they count of it.
    """
    size = state.config.block_size
    for tier in ("tables", "host_tables"):
        owner: dict[int, tuple[int, int, RequestState]] = {}
        for request in state.requests.values():
            for group, table in enumerate(getattr(request, tier)):
                for position, block in enumerate(table):
                    first = owner.setdefault(block, (group, position, request))
                    if first[:2] != (group, position):
                        yield f"block {block} is held at positions {first[1]} and {position}"
                        continue
                    other = first[2]
                    shared = min((position + 1) * size, other.num_computed, request.num_computed)
                    if other.tokens[:shared] != request.tokens[:shared]:
                        yield f"block {block} is shared by {_name(other)} and {_name(request)}"


def leak(state: State) -> Iterator[str]:
    """LEAK: without requests and pins every usable block is free."""
    if len(state.requests):
        return
    for tier, pool, _ in pools(state):
        if not pool.pins and pool.num_free != pool.num_usable:
            yield f"{tier} tier has {pool.num_free} of {pool.num_usable} blocks free"


def cached_count(state: State) -> Iterator[str]:
    """CACHED-COUNT: blocks that need no publication are full and computed."""
    for request in state.requests.values():
        for cached in request.num_cached:
            if cached > request.num_computed // state.config.block_size:
                yield f"{_name(request)}: {cached} cached blocks, {request.num_computed} computed"


def request_hashes(state: State) -> Iterator[str]:
    """REQ-HASH: a request's hashes are those of its full blocks."""
    if not state.config.enable_caching:
        return
    root = root_hash(state.config.hash_seed)
    for request in state.requests.values():
        expected = list(hash_blocks(root, list(request.tokens), state.config.block_size))
        if list(request.block_hashes) != expected:
            yield f"{_name(request)}: {len(request.block_hashes)} hashes are not its tokens'"


def published_content(state: State) -> Iterator[str]:
    """CACHE-KEY: a full, computed block of a request has no key, or that of its position."""
    for request in state.requests.values():
        num_full = request.num_computed // state.config.block_size
        if not state.config.enable_caching:
            continue
        for group, table in enumerate(request.tables):
            for position in range(min(num_full, len(table))):
                key = state.device.keys[table[position]]
                if key is not None and key != request.key(state.config, group, position):
                    yield f"{_name(request)}: block {table[position]} has another content's key"


def computed_bound(state: State) -> Iterator[str]:
    """COMPUTED: no request has computed more tokens than it has, or than the model takes."""
    for request in state.requests.values():
        most = min(len(request.tokens), state.config.length_limit)
        if request.num_computed > most:
            yield f"{_name(request)} computed {request.num_computed} of {most} tokens"


def rows(state: State) -> Iterator[str]:
    """ROWS: each request has a row of its own; free rows are those without a request."""
    taken = {row: name for row, name in enumerate(state.rows) if name is not None}
    if taken != {request.row: request_id for request_id, request in state.requests.items()}:
        yield f"rows {taken} are not those of the requests"
    if sorted(state.free_rows) != [row for row, name in enumerate(state.rows) if name is None]:
        yield f"free rows {list(state.free_rows)} are not those without a request"


def records(state: State) -> Iterator[str]:
    """OPEN-BATCH: what the open batch remembers is of requests that run, at or past their base."""
    size = state.config.block_size
    for request_id, record in state.batch.records.items():
        request = state.requests.get(request_id)
        if request is None or request.status is not Status.RUNNING:
            yield f"request {request_id!r} is in the open batch and does not run"
            continue
        if record.num_computed_before > request.num_computed:
            yield f"{_name(request)} counts less than before the open batch"
        for item in record.published:
            if (item.position + 1) * size <= record.num_computed_before:
                yield f"block {item.block} was written before the open batch"
            tables = request.tables[item.group : item.group + 1]
            if item.block not in (t[item.position] for t in tables if len(t) > item.position):
                yield f"{_name(request)} published block {item.block}, which it does not hold"
    for merge in state.batch.merges:
        if merge.group >= len(state.config.groups):
            yield f"a merge names group {merge.group} of {len(state.config.groups)}"


def _name(request: RequestState) -> str:
    return f"request {request.request_id!r}"


PROPERTIES: dict[str, Property] = {
    "REF": ref,
    "PARTITION": partition,
    "FQ-UNIQ": queue_unique,
    "NULL": null_block,
    "IDX-SOUND": index_sound,
    "IDX-COMPLETE": index_complete,
    "TABLEN": table_length,
    "WAIT-EMPTY": wait_empty,
    "NO-ALIAS": no_alias,
    "LEAK": leak,
    "CACHED-COUNT": cached_count,
    "REQ-HASH": request_hashes,
    "CACHE-KEY": published_content,
    "COMPUTED": computed_bound,
    "ROWS": rows,
    "OPEN-BATCH": records,
}
