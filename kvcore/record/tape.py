# SPDX-License-Identifier: Apache-2.0
"""Writes the calls of one manager into the mapped segment: the Python core's side.

Invariants: the arguments of a call are committed before it runs, its outcome after it; a commit is
one store of the open frame's length. A nested call (an argument that queries the manager) is not
recorded. A failure of the files ends the record, never the call.
Twin: rust/src/bindings/tape.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from mmap import mmap
from typing import Any, Protocol

import attrs

from kvcore.codec.encode import encode
from kvcore.record.calls import write_call
from kvcore.record.checksum import crc32c
from kvcore.record.fields import NoForm
from kvcore.record.names import Names, keys_form
from kvcore.record.outcomes import EXTENDS, put_new_hashes, write_error, write_value
from kvcore.record.segment import FRAME_BYTES, FRAME_SIZE, HEADER_SIZE, OPEN, padded
from kvcore.state.state import State
from kvcore.transitions import QUERIES, TRANSITIONS, arguments
from kvcore.types.arguments import read_once
from kvcore.types.keys import ONE_WAY
from kvcore.types.tokens import read_named
from kvcore.types.values import Hit, Outcome, Request


class Files(Protocol):
    """Stores the segments. A method returns None once storing has failed."""

    segment_bytes: int
    rotates: bool
    sync: bool
    by_keys: bool

    def open_segment(
        self, state: bytes, first_call: int, continues: bool, one_way: bool
    ) -> mmap | None:
        """Create a segment with its first frame and zeros after it; return its mapping.

        one_way: whether tokens cannot be found from the hashes.
        """

    def grow(self, size: int) -> mmap | None:
        """Grow the open segment to at least this many bytes; return its mapping."""

    def flush(self, end: int) -> bool | None:
        """Flush the segment to the disk up to `end`."""

    def close_segment(self, end: int) -> None:
        """Close the segment, which ends here."""


LOOK_UP = "get_computed_blocks"


class Tape:
    """The open frame of the open segment."""

    def __init__(self, files: Files, state: State) -> None:
        self.files = files
        self.state = state
        self.num_calls = 0
        self.buffer: mmap | None = None
        self._hits: dict[int, Hit] = {}
        self._busy = False
        self.names: Names | None = None
        self.open_segment(state, continues=False)

    def row(self, request_id: Any) -> int | None:
        """Return the row of a request."""
        request = self.state.requests.get(request_id) if isinstance(request_id, str) else None
        return None if request is None else request.row

    def name(self, request_id: Any) -> Any:
        """Return the id of a request as the record has it."""
        if self.names is None:
            return request_id
        return self.names.request(self.row(request_id), request_id)

    def last_hit(self, request_id: Any) -> Hit | None:
        """Return the hit of the request's last look-up in this segment."""
        row = self.row(request_id)
        return None if row is None else self._hits.get(row)

    def call(
        self,
        state: State,
        name: str,
        given: Mapping[str, Any],
        run: Callable[[], Outcome[State, Any]],
    ) -> Outcome[State, Any]:
        """Run a call, recording its arguments before and its outcome after."""
        self.state, data = state, bytearray()
        try:
            write_call(data, name, given, self)
        except NoForm:
            return run()
        if self._busy or self.buffer is None:
            return run()
        self._busy = True
        self._put(data)
        try:
            outcome = run()
        except BaseException as error:
            self._end(name, write_error(error))
            raise
        finally:
            self._busy = False
        self._note(name, given, outcome.value)
        self.state = outcome.state
        told = bytearray(write_value(name, outcome.value))
        if self.names is not None:
            self.names.note(name, given, outcome.value, self.num_calls)
            if name in EXTENDS:
                put_new_hashes(told, state, outcome.state, _extended(state, name, given))
        self._end(name, told)
        return outcome

    def rotate(self, state: State, *, continues: bool = True) -> None:
        """End the segment; the next one begins with this state."""
        self.close()
        self.open_segment(state, continues=continues)

    def open_segment(self, state: State, *, continues: bool) -> None:
        """Begin a segment."""
        if self.files.by_keys and not continues:
            self.names = Names(state)
        data = encode(state if self.names is None else keys_form(state, self.names))
        self.state = state
        self._hits.clear()
        one_way = state.config.hashing in ONE_WAY
        self.buffer = self.files.open_segment(data, self.num_calls, continues, one_way)
        self._frame = padded(HEADER_SIZE + FRAME_SIZE + len(data))
        self._at = self._frame + FRAME_SIZE
        self._full = self._frame + self.files.segment_bytes

    def close(self) -> None:
        """End the open frame and the segment."""
        self._close_frame()
        if self.buffer is not None:
            self.buffer = None
            self.files.close_segment(self._frame)

    def _note(self, name: str, given: Mapping[str, Any], value: Any) -> None:
        """Remember the result of a look-up until its request leaves."""
        if name in (LOOK_UP, "remove_request"):
            row = self.row(given["request_id"])
            assert row is not None
            if isinstance(value, Hit):
                self._hits[row] = value
            else:
                self._hits.pop(row, None)

    def _put(self, data: bytes | bytearray) -> None:
        """Add bytes to the open frame and commit them."""
        end = self._at + len(data)
        if self.buffer is not None and end + FRAME_SIZE > len(self.buffer):
            self.buffer = self.files.grow(end + FRAME_SIZE)
        if self.buffer is None:
            return
        if self._at == self._frame + FRAME_SIZE:  # bytes before the first commit are not lost ones
            self._set_word(self._frame, OPEN)
        self.buffer[self._at : end] = bytes(data)
        self._at = end
        self._set_word(self._frame, OPEN | end - self._frame - FRAME_SIZE)

    def _set_word(self, at: int, value: int) -> None:
        assert self.buffer is not None
        struct.pack_into("<I", self.buffer, at, value)

    def _end(self, name: str, outcome: bytes | bytearray) -> None:
        """Add the outcome of a call, and close the frame and the segment if they are full."""
        self._put(outcome)
        self.num_calls += 1
        if name != "take_batch" and self._at - self._frame - FRAME_SIZE < FRAME_BYTES:
            return
        self._close_frame()
        if self.buffer is not None and self.files.rotates and self._frame >= self._full:
            self.rotate(self.state)

    def _close_frame(self) -> None:
        size = self._at - self._frame - FRAME_SIZE
        if self.buffer is None or not size:
            return
        start = self._frame + FRAME_SIZE
        self._set_word(self._frame + 4, crc32c(self.buffer[start : self._at]))
        self._set_word(self._frame, size)
        self._frame = padded(self._at)
        self._at = self._frame + FRAME_SIZE
        if self.files.sync and not self.files.flush(self._frame):
            self.buffer = None


def recorded(tape: Tape, name: str) -> Callable[..., Outcome[State, Any]]:
    """Wrap a transition, or the look-up, so that it is recorded."""
    names = arguments(name)

    def run(state: State, *args: Any, **options: Any) -> Outcome[State, Any]:
        if name == LOOK_UP:
            return Outcome(state, (), QUERIES[name](state, *args, **options))
        return TRANSITIONS[name](state, *args, **options)

    def call(state: State, *args: Any, **options: Any) -> Outcome[State, Any]:
        args = tuple(map(_read_once, args))
        given = dict(zip(names, args, strict=False)) | options
        return tape.call(state, name, given, lambda: run(state, *args, **options))

    return call


def _extended(state: State, name: str, given: Mapping[str, Any]) -> list[str]:
    """Return the requests to which a call has added tokens."""
    if name == "append":
        named, rows = read_named(given["requests"])
        return [str(state.rows[row]) for row in rows] if named is None else named
    return [given["request"].request_id if name == "add_request" else given["request_id"]]


def _read_once(value: Any) -> Any:
    """Turn iterators in an argument into lists, since the recorder reads it too."""
    if not isinstance(value, Request):
        return read_once(value)
    tokens, hashes = read_once(value.tokens), read_once(value.block_hashes)
    if tokens is value.tokens and hashes is value.block_hashes:
        return value
    return attrs.evolve(value, tokens=tokens, block_hashes=hashes)
