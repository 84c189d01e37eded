# SPDX-License-Identifier: Apache-2.0
"""The doors by which bytes come in, each with real bytes and the property that must hold.

`read` takes any bytes. It returns whether they were refused, and raises if the property does not
hold: a refusal is a typed error; accepted bytes are encoded as the same bytes again, and both
languages agree on which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import attrs

from kvcore import _twin
from kvcore.codec import decode, encode
from kvcore.codec.event_msgpack import encode_events
from kvcore.invariants import pool_and_state
from kvcore.manager import KVCacheManager
from kvcore.state.state import State
from kvcore.trace.runner import Runner
from kvcore.trace.trace_file import read_trace
from kvcore.types.commands import Batch, close
from kvcore.types.config import Config
from kvcore.types.errors import DamagedBatch, DamagedState, KvcoreError
from kvcore.types.event_log import Events, read_event, write_event
from kvcore.types.wire import Reader, Writer
from tests.bytes.damage import Damager, Sample, split_at

TRACES = sorted((Path(__file__).parents[1] / "traces").rglob("*.trace"))
STATE_BYTES_MAX = 3000
STATES_A_TRACE = 4


@attrs.frozen(kw_only=True)
class Door:
    """A decoder. make: what makes damaged bytes for it. read: takes them; whether it refused."""

    name: str
    make: Callable[[], Damager]
    read: Callable[[bytes], bool]


@cache
def states() -> tuple[bytes, ...]:
    """Return the canonical bytes of states in the middle of the project's traces."""
    found: dict[bytes, None] = {}
    for path in TRACES:
        trace = read_trace(path)
        runner = Runner(trace.config, "python")
        met: list[bytes] = []
        for call in trace.calls:
            runner.call(call.verb, call.words)
            met.append(runner.manager.encode())
        small = [each for each in dict.fromkeys(met) if len(each) <= STATE_BYTES_MAX]
        step = max(1, len(small) // STATES_A_TRACE)
        found |= dict.fromkeys(small[step - 1 :: step])
    return tuple(found)


class Watching(Reader):
    """A reader that notes where fields start."""

    starts: list[int]

    def take(self, size: int) -> bytes:
        self.starts.append(self.offset)
        return super().take(size)


def split_state(data: bytes) -> Sample:
    """Return the fields of an encoded state."""
    watching = Watching(data)
    watching.starts = []
    with patch.object(decode, "Reader", lambda _: watching):
        decode.decode(data)
    return split_at(data, watching.starts)


def raised(read: Callable[[], object], *kinds: type[Exception]) -> Exception | None:
    """Return the error with which some bytes are refused, if it is of these kinds."""
    try:
        read()
    except kinds as error:
        return error
    return None


def refuses(read: Callable[[], object], size: int) -> bool:
    """Tell whether some bytes are refused, and name the place."""
    error = raised(read, DamagedState)
    if isinstance(error, DamagedState):
        place = error.fields["offset"]
        assert isinstance(place, int)
        assert 0 <= place <= size
    return error is not None


def read_state(data: bytes) -> bool:
    """Decode in both languages, and check the result."""
    taken: list[State] = []
    refused = refuses(lambda: taken.append(decode.decode(data)), len(data))
    if _twin.available():
        twin = _twin.make_backend(Config(2))
        assert refuses(lambda: twin.restore(data), len(data)) == refused
    if refused:
        return True
    assert encode.encode(taken[0]) == data
    broken = [
        name
        for name, holds in pool_and_state.PROPERTIES.items()
        if any(True for _ in holds(taken[0]))
    ]
    if _twin.available():
        assert twin.encode() == data
        assert _twin.check_state(data) == broken
    return bool(broken) or go_on(data)


def go_on(data: bytes) -> bool:
    """Check that a state for which every property holds can go on: its requests can leave."""
    for backend in ("python", "rust") if _twin.available() else ("python",):
        manager = KVCacheManager(Config(2), backend)
        manager.restore(data)
        raised(partial(leave, manager), KvcoreError)
        manager.check()
    return False


def leave(manager: KVCacheManager) -> None:
    """End what is unfinished, and free every request."""
    manager.take_batch()
    state = manager.state()
    for number in manager.in_flight:
        manager.complete(number)
    for operation in state.operations:
        manager.complete_operation(operation, True)
    for request_id in state.requests:
        manager.free(request_id)


@cache
def event_places() -> tuple[bytes, int, int]:
    """Return a state with events, where they start, and where they end."""
    data = max(states(), key=lambda each: len(decode.decode(each).events))
    state = decode.decode(data)
    joined = Writer()
    for event in state.events:
        write_event(joined, event)
    start = data.index(bytes(joined.data))
    return data, start, start + len(joined.data)


def event_samples() -> list[Sample]:
    """Return the events of each state that has any."""
    samples = []
    for data in states():
        out = Writer()
        for event in decode.decode(data).events:
            write_event(out, event)
        events = bytes(out.data)
        if events:
            watching = Watching(events)
            watching.starts = []
            while watching.offset < len(events):
                read_event(watching)
            samples.append(split_at(events, watching.starts))
    return samples


def read_events(data: bytes) -> bool:
    """Read events one after the other, alone and inside a state; lay them out for the wire."""
    source, count = Reader(data), 0

    def read() -> None:
        nonlocal count
        while source.offset < len(data):
            read_event(source)
            count += 1

    refused = refuses(read, len(data))
    whole, start, end = event_places()
    number = (count + int(refused)).to_bytes(4, "little")
    state = whole[: start - 4] + number + data + whole[end:]
    if _twin.available():
        twin = _twin.make_backend(Config(2))
        taken = refuses(lambda: decode.decode(state), len(state))
        assert refuses(lambda: twin.restore(state), len(state)) == taken
        if not refused:
            assert twin.encode() == state
            assert tuple(twin.take_events()) == tuple(Events(data, count))
    assert refuses(lambda: tuple(Events(data, count + int(refused))), len(data)) == refused
    if not refused:
        events = Events(data, count)
        assert Events.of(tuple(events)).to_bytes() == data
        encode_events(events, 0.0, form="array")
        encode_events(events, 0.0, whole_hashes=True)
    return refused


def batch_samples() -> list[Sample]:
    """Return the open batches of the states, as number of bytes, columns and keys."""
    samples = []
    for data in states():
        batch = decode.decode(data).batch
        closed = close(batch.number, batch.commands)
        if closed.buffer:
            size = len(closed.buffer).to_bytes(4, "little")
            columns = size + bytes(closed.buffer) + closed.keys
            keys = range(4 + len(closed.buffer), len(columns), 36)
            samples.append(split_at(columns, [*range(0, 4 + len(closed.buffer), 4), *keys]))
    return samples


def read_batch(data: bytes) -> bool:
    """Read a batch that arrived as columns and keys."""
    size = int.from_bytes(data[:4], "little")
    batch = Batch(7, bytearray(data[4 : 4 + size]), data[4 + size :])
    if raised(lambda: list(batch), DamagedBatch) is not None:
        return True
    commands = list(batch)
    assert len(commands) == len(batch)
    assert list(close(7, commands)) == commands
    return False


DOORS = [
    Door(name="states", make=lambda: Damager([*map(split_state, states())]), read=read_state),
    Door(name="events", make=lambda: Damager(event_samples()), read=read_events),
    Door(name="batches", make=lambda: Damager(batch_samples()), read=read_batch),
]
