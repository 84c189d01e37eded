# SPDX-License-Identifier: Apache-2.0
"""The section of canonical bytes for checkpoints that have no key yet.

Twin: rust/src/codec/states_section.rs.
"""

from __future__ import annotations

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.state.batch_records import OwedCheckpoint
from kvcore.state.state import State
from kvcore.types.event_log import read_event, write_event
from kvcore.types.events import BlockStored
from kvcore.types.keys import HASH_SIZE
from kvcore.types.wire import Reader, Writer


def has_checkpoints(state: State) -> bool:
    """Whether the open batch writes a checkpoint, or a batch in flight owes one."""
    return len(state.batch.ends) > 0 or any(batch.owed for batch in state.in_flight)


def write_checkpoints(out: Writer, state: State) -> None:
    """Write the rows whose state the open batch leaves as a checkpoint, and what each batch in
    flight owes, in order.
    """
    out.numbers(state.requests[request_id].row for request_id in state.batch.ends)
    for batch in state.in_flight:
        out.u32(len(batch.owed))
        for owed in batch.owed:
            out.u32(owed.block)
            out.sized(owed.key)
            out.u8(owed.event is not None)
            if owed.event is not None:
                write_event(out, owed.event)


def read_checkpoints(source: Reader, state: State) -> State:
    """Read checkpoints, at least one; return the state with them. Raises DamagedState."""
    names = [state.rows[row] for row in source.ids(len(state.rows))]
    if None in names or len(set(names)) < len(names) or not state.config.has_states:
        raise source.damaged("a checkpoint of the open batch does not belong to a request")
    in_flight = []
    for batch in state.in_flight:
        owed = tuple(_read_owed(source, state) for _ in range(source.u32()))
        in_flight.append(replace(batch, owed=owed))
    read = replace(
        state, batch=replace(state.batch, ends=pvector(names)), in_flight=tuple(in_flight)
    )
    if not has_checkpoints(read):
        raise source.damaged("a section is empty")
    return read


def _read_owed(source: Reader, state: State) -> OwedCheckpoint:
    block, key, has_event = source.u32(), source.key(), source.flag()
    event = read_event(source) if has_event else None
    group_id = int.from_bytes(key[HASH_SIZE:], "big")
    of_state = any(group.is_state for group in state.config.groups[group_id : group_id + 1])
    is_possible = block < state.config.num_blocks and of_state
    if not is_possible or not isinstance(event, BlockStored | None):
        raise source.damaged("a batch owes an impossible checkpoint")
    return OwedCheckpoint(block, key, event)
