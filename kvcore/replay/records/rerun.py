# SPDX-License-Identifier: Apache-2.0
"""Makes a record's calls again, on either backend, and compares every outcome.

The manager starts with the state of a segment and goes on through the next ones; at the start of
each, its state must equal that of the segment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Literal

import attrs

from kvcore.codec.decode import decode
from kvcore.manager import KVCacheManager
from kvcore.record.calls import SHAPES
from kvcore.record.errors import InvalidRecorder
from kvcore.record.fields import LastHit, Source
from kvcore.record.outcomes import read_outcome, write_error, write_value
from kvcore.record.reader import RecordedCall, first_calls, read_calls, segment_files
from kvcore.record.segment import CONTINUES, Segment, read_segment
from kvcore.state.state import State
from kvcore.types.config import Config
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Hit

Backend = Literal["rust", "python"]
BY_CONTENT = {
    *("InvalidToken", "InvalidExtraKey", "UnsortedMedia", "CountMismatch", "WrongBlockHashes")
}
"""Misuse by what a record by keys does not have, so that it is not made again."""
DIFFERENCES_MAX = 8
SHOWN_MAX = 120


@attrs.frozen
class Difference:
    """The first difference between a replay and its record.

    call: its number and text, None at the start of a segment. recorded, found: both outcomes.
    states: how the states differ, field by field, if both are known.
    """

    backend: str
    number: int
    call: str
    recorded: str
    found: str
    states: tuple[str, ...] = ()


@attrs.define
class Rerun:
    """The result of a replay.

    num_compared: the calls from `first` on. has_tail: the last step has no checksum, since it was
    not closed. dropped_bytes: those after damage in a segment. missing_calls: lost between
    segments, by damage or missing files. died_in: the call in which the process died, which is not
    made again.
    """

    num_segments: int = 0
    num_calls: int = 0
    num_compared: int = 0
    has_tail: bool = False
    dropped_bytes: int = 0
    missing_calls: int = 0
    died_in: str | None = None
    difference: Difference | None = None


class Player:
    """A manager that makes recorded calls. value: of the last one, None if it raised."""

    value: Any = None

    def __init__(self, segment: Segment, backend: Backend) -> None:
        self.backend = backend
        self.manager = KVCacheManager(Config(2), backend)
        self.begin(segment)

    def begin(self, segment: Segment) -> None:
        """Start from a segment's state."""
        self.manager.restore(segment.state)
        self.hits: dict[str, Hit] = {}

    def make(self, call: RecordedCall) -> bytes:
        """Make a call, and return its outcome in recorded form."""
        arguments, self.value = call.arguments, None
        if call.hashes is not None and call.result is not None and call.result.what in BY_CONTENT:
            return call.outcome
        for request_id, hashes in (call.hashes or {}).items():
            first = self.manager.num_tokens(request_id) // self.manager.config.hash_block_size
            self.manager._core.give_hashes(request_id, first, hashes)
        if isinstance(arguments.get("hit"), LastHit):
            found = self.hits.get(arguments["request_id"])
            arguments = arguments | {"hit": found}
        try:
            options = dict(arguments)
            given = [options.pop(field) for field in SHAPES[call.name].fields]
            value = self.value = getattr(self.manager, call.name)(*given, **options)
        except KvcoreError as error:
            return write_error(error)
        if isinstance(value, Hit):
            self.hits[arguments["request_id"]] = value
        return write_value(call.name, value)


def rerun(
    path: str | os.PathLike[str],
    backends: Sequence[Backend],
    *,
    first: int | None = None,
    last: int | None = None,
    make_player: Callable[[Segment, Backend], Player] = Player,
) -> Rerun:
    """Make the calls of a record again, up to the first that differs.

    first, last: compare the calls from this number to that one; the calls before `first` are made
    from the start of its segment on. Raises InvalidRecorder for a call that is not in the record,
    NotARecord, NewerRecord, DamagedRecord.
    """
    files = segment_files(path)
    starts = first_calls(files)
    first = starts[0] if first is None else first
    if first < starts[0]:
        reason = f"the record begins with call {starts[0]:,}"
        raise InvalidRecorder(name="first call", value=first, reason=reason)
    begin = max(place for place, start in enumerate(starts) if start <= first)
    done, players, follows = Rerun(), list[Player](), starts[begin]
    for segment in map(read_segment, files[begin:]):
        start = segment.header.first_call
        if last is not None and start > last:
            break
        if not players:
            players += [make_player(segment, backend) for backend in backends]
            difference = None
        else:
            difference = _begin(players, segment, whole=start == follows)
        done = attrs.evolve(
            done,
            num_segments=done.num_segments + 1,
            dropped_bytes=done.dropped_bytes + segment.dropped_bytes,
            missing_calls=done.missing_calls + start - follows,
            has_tail=segment.has_tail,
            difference=difference,
        )
        follows = start
        for call in () if difference else read_calls(segment):
            if last is not None and call.number > last:
                break
            if call.result is None:
                return attrs.evolve(done, died_in=describe(call))
            outcomes = [player.make(call) for player in players]
            done.num_calls, follows = done.num_calls + 1, call.number + 1
            done.num_compared += call.number >= first
            if call.number >= first and any(each != call.outcome for each in outcomes):
                return attrs.evolve(done, difference=_difference(players, call, outcomes))
        if difference:
            break
    return done


def describe(call: RecordedCall) -> str:
    """Return the text of a call, shortened if it is long."""
    shown = []
    for name, value in call.arguments.items():
        value = value.tolist() if isinstance(value, memoryview) else value
        shown.append(f"{name}={_short(value)}")
    return f"{call.name}({', '.join(shown)})"


def differences(mine: State, other: State) -> Iterator[str]:
    """Yield the fields in which two states differ, with requests one by one."""
    for name in State.__struct_fields__:
        left, right = getattr(mine, name), getattr(other, name)
        if name != "requests":
            if left != right:
                yield f"{name}: {_short(left)} / {_short(right)}"
            continue
        for request_id in sorted({*left, *right}):
            one, two = left.get(request_id), right.get(request_id)
            for field in type(one or two).__struct_fields__ if one != two else ():
                a, b = getattr(one, field, None), getattr(two, field, None)
                if a != b:
                    yield f"request {request_id!r}, {field}: {_short(a)} / {_short(b)}"


def _begin(players: list[Player], segment: Segment, *, whole: bool) -> Difference | None:
    """Let the players go on with a segment; return the difference if they are not at its state."""
    for player in players:
        if not segment.header.flags & CONTINUES or not whole:
            player.begin(segment)
        elif player.manager.encode() != segment.state:
            states = _few(decode(segment.state), player.manager.state())
            number, start = segment.header.first_call, f"the start of {segment.path.name}"
            return Difference(player.backend, number, start, "its state", "another one", states)
        player.hits.clear()
    return None


def _difference(
    players: Sequence[Player], call: RecordedCall, outcomes: Sequence[bytes]
) -> Difference:
    """Return the difference of the first player with a different outcome; with two players, also
    between their states.
    """
    place = next(place for place, each in enumerate(outcomes) if each != call.outcome)
    found = read_outcome(Source(outcomes[place], {}), call.name)
    states = _few(*(each.manager.state() for each in players)) if len(players) > 1 else ()
    backend, shown = players[place].backend, describe(call)
    return Difference(backend, call.number, shown, str(call.result), str(found), states)


def _few(mine: State, other: State) -> tuple[str, ...]:
    return tuple(islice(differences(mine, other), DIFFERENCES_MAX))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
