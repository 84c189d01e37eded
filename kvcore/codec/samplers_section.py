# SPDX-License-Identifier: Apache-2.0
"""The section of canonical bytes for the batches whose output is to come, which is rare.

Twin: rust/src/codec/samplers_section.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from kvcore.state.state import RequestState, State
from kvcore.types.wire import Reader, Writer


def write_samplers(out: Writer, state: State) -> None:
    """Write the batches whose output is to come, with their ends, by request in row order."""
    requests = list(_with_samplers(state))
    out.u32(len(requests))
    for request in requests:
        out.u32(request.row)
        out.u32(len(request.samplers))
        for batch, end in request.samplers:
            out.u64(batch)
            out.u32(end)


def read_samplers(source: Reader, state: State) -> State:
    """Read the batches whose output is to come; return the state with them. Raises DamagedState."""
    requests, last = state.requests, -1
    for _ in range(source.u32()):
        row = source.u32()
        name = state.rows[row] if last < row < len(state.rows) else None
        samplers = tuple((source.u64(), source.u32()) for _ in range(source.u32()))
        if name is None or not samplers:
            raise source.damaged("batches sample for no request, or none for one")
        last, request = row, replace(requests[name], samplers=samplers)
        numbers = [number for number, _ in samplers] + [state.batch.number + 1]
        fits = request.awaiting(samplers) == request and numbers == sorted(set(numbers))
        if not fits or samplers[-1][1] < request.num_computed >= len(request.tokens):
            raise source.damaged("whose output is to come is not in canonical form")
        requests = requests.set(name, request)
    if last < 0:
        raise source.damaged("a section is empty")
    return replace(state, requests=requests)


def _with_samplers(state: State) -> Iterator[RequestState]:
    """Yield the requests whose output to come is recorded, in row order."""
    for name in state.rows:
        if name is not None and state.requests[name].samplers:
            yield state.requests[name]
