# SPDX-License-Identifier: Apache-2.0
"""A pool that follows the events of a page, in the plainest way, and the same from a state."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from kvcore.record.reader import read_calls, segment_files
from kvcore.record.segment import read_segment
from kvcore.state.state import State
from kvcore.view import columns
from kvcore.view.columns import MASK
from kvcore.view.history import History
from kvcore.view.recording import Watched
from tests.conftest import Backend

Event = tuple[int, int, int, int]


def read(sections: Sequence[bytes]) -> Iterator[Event]:
    """Yield the events of a page."""
    for packed in sections:
        data = zlib.decompress(packed)
        (count,) = struct.unpack_from("<I", data)
        kinds, at, values = data[4 : 4 + count], 4 + count, []
        for _ in range(3):
            planes = [data[at + place * count : at + (place + 1) * count] for place in range(4)]
            values.append([int.from_bytes(each, "little") for each in zip(*planes, strict=True)])
            at += 4 * count
        last: dict[int, list[int]] = {}
        for kind, *changes in zip(kinds, *values, strict=True):
            before = last.get(kind, [0, 0, 0])
            now = [(b + (c >> 1 ^ -(c & 1))) & MASK for b, c in zip(before, changes, strict=True)]
            last[kind] = now
            yield kind, now[0], now[1], now[2]


@attrs.define
class Pool:
    """A page's view of each block: owners (request, place), whether it is free, and cached."""

    owners: dict[int, Counter[tuple[int, int]]] = attrs.field(factory=dict)
    used: set[int] = attrs.field(factory=set)
    cached: set[int] = attrs.field(factory=set)
    host: dict[int, int] = attrs.field(factory=dict)
    tables: dict[tuple[int, int], int] = attrs.field(factory=dict)

    def follow(self, event: Event) -> None:
        """Take over an event."""
        kind, x, y, z = event
        if kind == columns.RESET:
            for each in (self.owners, self.used, self.cached, self.host, self.tables):
                each.clear()
        elif kind in (columns.TAKE, columns.TAKE_EVICTING, columns.HIT):
            assert (x in self.cached) >= (kind == columns.TAKE_EVICTING)
            assert kind == columns.HIT or not self.owners.get(x)
            self.owners.setdefault(x, Counter())[y, z] += 1
            self.tables[y, z] = x
            self.used.add(x)
            self.cached.discard(x)
        elif kind in (columns.DROP, columns.FREED, columns.FREED_CACHED):
            block = x - 1 if x else self.tables.pop((y, z))
            self.owners[block] -= Counter({(y, z): 1})
            if kind != columns.DROP:
                self._free(block, cached=kind == columns.FREED_CACHED)
        elif kind == columns.FREE:
            self._free(x, cached=bool(z))
        elif kind == columns.HOLD:
            self.used.add(x)
            self.cached.discard(x)
        elif kind == columns.FORGET:
            self.cached.discard(x)
        elif kind == columns.FORGET_ALL:
            self.cached.clear()
        elif kind == columns.HOST:
            self.host[x] = y

    def _free(self, block: int, *, cached: bool) -> None:
        assert not self.owners.get(block)
        self.used.discard(block)
        (self.cached.add if cached else self.cached.discard)(block)

    def shown(self, names: Sequence[str]) -> tuple[object, ...]:
        """Return what is compared."""
        owners = {
            block: Counter((names[y], z) for (y, z) in each.elements())
            for block, each in self.owners.items()
            if each
        }
        host = {block: names[y - 2] if y > 1 else "" for block, y in self.host.items() if y}
        return owners, self.used, self.cached, host


def of_state(state: State) -> tuple[object, ...]:
    """Return the same view of a manager's state."""
    first, groups = state.device.first_block, len(state.config.groups)
    owners: dict[int, Counter[tuple[str, int]]] = {}
    for name, request in state.requests.items():
        for group, table in enumerate(request.tables):
            for position, block in enumerate(table):
                if block >= first:
                    owners.setdefault(block, Counter())[name, position * groups + group] += 1
    counts, keys = state.device.ref_counts, state.device.keys
    blocks = range(first, state.config.num_blocks)
    used = {block for block in blocks if counts[block]}
    cached = {block for block in blocks if not counts[block] and keys[block] is not None}
    host = {}
    if state.host is not None:
        for block, count in enumerate(state.host.ref_counts):
            if count or state.host.keys[block] is not None:
                host[block] = ""
        for name, request in state.requests.items():
            for table in request.host_tables:
                host |= {block: name for block in table if block in host}
    return owners, used, cached, host


def check_steps(folder: Path, backend: Backend) -> int:
    """Assert that the events of a record lead through the states of its manager; how many steps."""
    history, states, player = History(), list[State](), None
    for segment in map(read_segment, segment_files(folder)):
        if player is None:
            player = Watched(segment, backend, history, 0)
            states.append(player.manager.state())
        player.hits.clear()
        for call in read_calls(segment):
            before = player.manager.state()  # what a take merges is in the next batch
            assert player.make(call) == call.outcome
            if call.name == "take_batch" and player.value is not None:
                states.append(before)
    pool, step = Pool(), 0
    for event in read(history.events.sections()):
        pool.follow(event)
        if event[0] == columns.BATCH:
            assert pool.shown(history.names) == of_state(states[step]), f"step {step}"
            assert event[3] == len(states[step].device.queue), f"step {step}"
            step += 1
    assert step == len(states) == history.num_steps
    return step
