# SPDX-License-Identifier: Apache-2.0
"""The section of canonical bytes for checkpoints that have no key yet.

Twin: rust/src/codec/states_section.rs.
"""

from __future__ import annotations

import attrs
from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.state.batch_records import OwedCheckpoint
from kvcore.state.state import State
from kvcore.types.event_log import read_event, write_event
from kvcore.types.events import BlockStored
from kvcore.types.keys import HASH_SIZE
from kvcore.types.wire import Reader, Writer


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
    if not names and not any(batch.owed for batch in in_flight):
        raise source.damaged("a section is empty")
    return read


def write_marks(out: Writer, state: State) -> None:
    """Write the rows whose state calls marked in the open batch, and the blocks whose keys no event
    names, ascending.
    """
    out.numbers(sorted(state.requests[request_id].row for request_id in state.batch.marked))
    out.numbers(sorted(state.device.silent))


def read_marks(source: Reader, state: State) -> State:
    """Read marks, at least one; return the state with them. Raises DamagedState."""
    rows, silent = source.ids(len(state.rows)), source.ids(state.config.num_blocks)
    names = [state.rows[row] for row in rows]
    ends = [name for name in names if name is not None and name in state.batch.ends]
    keys = [state.device.keys[block] for block in silent if state.config.enable_events]
    of_states = [key for key in keys if key is not None and _is_of_state(state, key)]
    ordered = rows == sorted(set(rows)) and silent == sorted(set(silent)) and (rows or silent)
    if not ordered or len(ends) < len(rows) or len(of_states) < len(silent):
        raise source.damaged("a mark belongs to no checkpoint")
    device = attrs.evolve(state.device, silent=frozenset(silent))
    return replace(state, device=device, batch=replace(state.batch, marked=frozenset(ends)))


def _is_of_state(state: State, key: bytes) -> bool:
    group_id = int.from_bytes(key[HASH_SIZE:], "big")
    return any(group.is_state for group in state.config.groups[group_id : group_id + 1])


def _read_owed(source: Reader, state: State) -> OwedCheckpoint:
    block, key, has_event = source.u32(), source.key(), source.flag()
    event = read_event(source) if has_event else None
    is_possible = block < state.config.num_blocks and _is_of_state(state, key)
    if not is_possible or not isinstance(event, BlockStored | None):
        raise source.damaged("a batch owes an impossible checkpoint")
    return OwedCheckpoint(block, key, event)
