# SPDX-License-Identifier: Apache-2.0
"""The properties of unfinished operations and of pins of prefixes, which hold blocks.

Twin: rust/src/invariants/claims.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvcore.state.state import Operation, State


def wrong_pins(state: State) -> Iterator[str]:
    """Yield what is wrong with pins of prefixes: their blocks, their epoch, their owners."""
    pool, first, most = state.device, state.config.epoch, state.config.most_pinned
    held = Counter(operation.block for operation in state.operations.values())
    named = {block for pin in state.named_pins.values() for block in pin.blocks}
    for name, pin in sorted(state.named_pins.items()):
        held.update(pin.blocks)
        if not pin.blocks or len(set(pin.blocks)) < len(pin.blocks):
            yield f"pin {name!r} names blocks {list(pin.blocks)}"
        if not first <= pin.epoch <= state.epoch:
            yield f"pin {name!r} is of epoch {pin.epoch}, not {first} to {state.epoch}"
    for block in sorted(named):
        if block < pool.first_block or pool.pins.get(block, 0) < held[block]:
            yield f"block {block} has {pool.pins.get(block, 0)} pins, but {held[block]} hold it"
    if len(named) > most:
        yield f"pins hold {len(named)} blocks, {most} may be pinned"


def wrong_operations(state: State) -> Iterator[str]:
    """Yield what is wrong about operations and the requests that wait for them."""
    pool = state.device
    held = Counter(operation.block for operation in state.operations.values())
    for block, count in held.items():
        if block < pool.first_block or pool.pins.get(block, 0) < count:
            yield f"block {block} has {count} operations, but {pool.pins.get(block, 0)} pins"
    loads = Counter(operation.request_id for operation in state.operations.values())
    for request_id, request in state.requests.items():
        if request.num_loading != loads[request_id]:
            waits, named = request.num_loading, loads[request_id]
            yield f"request {request_id!r} waits for {waits} loads, but {named} name it"
        most = request.num_computed if request.num_loading else 0
        if request.load_end > most:
            yield f"request {request_id!r} has loaded up to token {request.load_end} of {most}"
    for number, operation in state.operations.items():
        if operation.batch > state.batch.number:
            yield f"operation {number} is of batch {operation.batch}, which was not opened yet"
        if operation.request_id is not None and not _is_target(state, operation):
            yield f"operation {number} fills block {operation.block}, which its request lacks"


def _is_target(state: State, operation: Operation) -> bool:
    """Return whether the block that a load fills is at the position of its key."""
    request = state.requests[str(operation.request_id)]
    for index, group in enumerate(state.config.groups):
        position = operation.first_token // group.block_size
        known = position < min(len(request.tables[index]), request.num_hashed(state.config, index))
        if known and request.tables[index][position] == operation.block:
            return request.key(state.config, index, position) == operation.key
    return False
