# SPDX-License-Identifier: Apache-2.0
"""The properties of state groups: who holds states, and who will publish them.

Twin: rust/src/invariants/states.rs.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from kvcore.state.state import NO_HOST_BLOCK, State


def wrong_tables(state: State) -> Iterator[str]:
    """Yield the requests without the state at their count, or with other states than the one that
    their last step began with.
    """
    for request in state.requests.values():
        for index, group in enumerate(state.config.groups):
            if not group.is_state:
                continue
            name, blocks = f"request {request.request_id!r}", request.tables[index]
            nulls: Container[int] = range(state.device.first_block)
            if request.host_tables:
                blocks, nulls = request.host_tables[index], (NO_HOST_BLOCK,)
            live = [at for at, block in enumerate(blocks) if block not in nulls]
            last = -(-request.state_count // group.block_size) - 1 + request.num_scheduled_drafts
            if len(blocks) != last + 1 or (live or [-1])[-1] != last:
                yield f"{name} has states at {live} of group {index}, not at {last}"
            first = 0 if request.host_tables else request.num_cached[index]
            is_run = live[1:] == [*range(last - len(live) + 2, last + 1)]
            if not is_run or (live and not request.host_tables and live[0] != first):
                yield f"{name} has states at {live} of group {index}, the first one at {first}"


def wrong_checkpoints(state: State) -> Iterator[str]:
    """Yield the checkpoints that nobody can publish."""
    sizes = [group.block_size for group in state.config.groups if group.is_state]
    for request_id in state.batch.ends:
        request = state.requests.get(request_id)
        count = 0 if request is None else request.state_count
        whole = [count % size == 0 for size in sizes]
        marked = request_id in state.batch.marked
        is_scheduled = request is not None and state.batch.scheduled[request.row] is not None
        if not is_scheduled or not (any(whole) or marked):
            yield f"the state of request {request_id!r} at {count} is to become findable"
        if marked and (all(whole) or count % state.config.hash_block_size):
            yield f"the state of request {request_id!r} at {count} is marked"
    if not state.batch.marked <= set(state.batch.ends):
        yield f"requests {sorted(state.batch.marked)} are marked"
    if len(set(state.batch.ends)) < len(state.batch.ends):
        yield f"the open batch writes a checkpoint twice: {list(state.batch.ends)}"
    for batch in state.in_flight:
        for owed in batch.owed:
            if state.device.keys[owed.block] is not None:
                yield f"batch {batch.number} owes block {owed.block}, which has a key"
