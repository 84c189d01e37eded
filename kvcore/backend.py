# SPDX-License-Identifier: Apache-2.0
"""The Python backend: one state, with the transitions and queries as methods.

It has the methods of the compiled twin, `kvcore._rust.Manager`, whose stub has their types. This
module also makes the backend that a manager requests.
"""

from __future__ import annotations

import struct
import warnings
from _thread import allocate_lock, get_ident
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from msgspec.structs import replace

from kvcore import _twin
from kvcore.codec import decode as decoding
from kvcore.codec import encode as encoding
from kvcore.invariants import pool_and_state
from kvcore.state.state import State, make_state
from kvcore.transitions import QUERIES, TRANSITIONS, arguments, queries
from kvcore.types.arguments import check_kind, check_retention
from kvcore.types.commands import Evict, Free
from kvcore.types.config import Config
from kvcore.types.errors import (
    BackendMissing,
    ConcurrentCall,
    DamagedState,
    InvalidConfig,
    InvariantViolation,
)
from kvcore.types.keys import ONE_WAY, fold_key
from kvcore.types.policy import EvictionPolicy
from kvcore.types.values import Hit, Outcome

if TYPE_CHECKING:
    from kvcore.record.recorder import Recorder
    from kvcore.record.tape import Files, Tape
    from kvcore.types.retention import KvCacheRetentionConfig

T = TypeVar("T")
READ_FIRST = {"request", "hashes", "hit", "request_ids", "block_ids", "done", "key", "retention"}
"""Arguments that a manager reads before it calls either backend."""
HANDED_ON = [name for name in (*TRANSITIONS, *QUERIES) if READ_FIRST.isdisjoint(arguments(name))]
"""Methods that a manager takes directly from the twin, with equal names and arguments."""


class _Marked(Protocol):
    """Knows the mark of each removed key."""

    def mark(self, key: int) -> int: ...


class PythonBackend:
    """Holds the newest state, and runs one pure function on it at a time.

    Reading an argument may query the manager, on the thread that made the call.
    """

    def __init__(self, config: Config) -> None:
        self._state = make_state(config)
        self._running = allocate_lock()
        self._thread = 0
        self._tape: Tape | None = None

    def state(self) -> State:
        """Return the current state. Raises ConcurrentCall."""
        if self._running.locked() and self._thread != get_ident():
            raise ConcurrentCall
        return self._state

    @property
    def epoch(self) -> int:
        return self.state().epoch

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(each.number for each in self.state().in_flight)

    @property
    def num_free_blocks(self) -> int:
        return self.state().device.num_free

    @property
    def quarantined_blocks(self) -> tuple[int, ...]:
        return tuple(self.state().device.quarantine or ())

    @property
    def num_cached_blocks(self) -> int:
        device = self.state().device
        return sum(map(device.has_key, device.queue))

    @property
    def num_due_blocks(self) -> int:
        policy = self.state().device.policy
        return 0 if policy is None else policy.num_due

    @property
    def num_free_host_blocks(self) -> int:
        host = self.state().host
        return 0 if host is None else host.num_free

    def open_changes(self, start: int) -> tuple[int, list[int], list[tuple[int, int]]]:
        commands, freed, removed = self.state().batch.commands, [], []
        for each in commands[start:]:
            if isinstance(each, Free):
                freed.append(each.block)
            elif isinstance(each, Evict):
                removed.append((each.block, fold_key(each.key)))
        return len(commands), freed, removed

    def key_marks(self, request_id: str, removed: _Marked, end: int) -> list[bytes]:
        state = self.state()
        request, config = queries.find_request(state, request_id), state.config
        marks = []
        for g, group in enumerate(config.groups):
            is_fine = config.has_tails or group.is_state
            size = config.hash_block_size if is_fine else group.block_size
            last = min(end, len(request.block_hashes) * config.hash_block_size)
            keys = [request.key_at(config, g, at) for at in range(size, last + 1, size)]
            found = [queries.get_cached_block(state, key) is not None for key in keys]
            known = zip(found, keys, strict=True)
            each = [1 if here else removed.mark(fold_key(key)) for here, key in known]
            marks.append(struct.pack(f"={len(each)}I", *each))
        return marks

    def block_keys(self, block: int) -> list[int]:
        return [fold_key(key) for key in queries.get_own_keys(self.state(), block)]

    def encode(self) -> bytes:
        return encoding.encode(self.state())

    def restore(self, data: bytes) -> None:
        state = decoding.decode(data)
        self._change(lambda _: Outcome(state, (), None))
        if self._tape is not None:
            self._tape.rotate(state, continues=False)

    @property
    def is_recording(self) -> bool:
        return self._tape is not None and self._tape.buffer is not None

    def start_recording(self, files: Files) -> None:
        from kvcore.record.tape import LOOK_UP, Tape, recorded  # few managers are recorded

        self._tape = tape = Tape(files, self.state())
        for name in TRANSITIONS:
            self.__dict__[name] = partial(self._change, recorded(tape, name))
        look_up = recorded(tape, LOOK_UP)
        self.__dict__[LOOK_UP] = lambda request_id: look_up(self.state(), request_id).value

    def stop_recording(self) -> None:
        if self._tape is not None:
            self._tape.close()
            self.leave_recording()

    def leave_recording(self) -> None:
        if self._tape is not None:
            for name in (*TRANSITIONS, "get_computed_blocks"):
                del self.__dict__[name]
            self._tape = None

    def give_hashes(self, request_id: str, first: int, hashes: Sequence[bytes]) -> None:
        def change(state: State) -> Outcome[State, None]:
            request = state.requests[request_id]
            if len(request.block_hashes) < first:
                return Outcome(state, (), None)
            known = request.block_hashes[:first].extend(hashes)
            longer = replace(request, block_hashes=known)
            return Outcome(
                replace(state, requests=state.requests.set(request_id, longer)), (), None
            )

        self._change(change)

    def rotate_recording(self) -> None:
        if self._tape is not None:
            self._tape.rotate(self.state())

    def _change(
        self, transition: Callable[..., Outcome[State, T]], *args: Any, **options: Any
    ) -> T:
        """Run a transition. Raises ConcurrentCall."""
        if not self._running.acquire(blocking=False):
            raise ConcurrentCall
        self._thread = get_ident()
        try:
            outcome = transition(self._state, *args, **options)
            self._state = outcome.state
        finally:
            self._running.release()
        return outcome.value


class Timed:
    """Methods of a manager that control what stays cached: time, levels, pins, epochs, states."""

    _core: _twin.Backend

    @property
    def epoch(self) -> int:
        """The number of the current weights. Changes nothing."""
        return self._core.epoch

    def checkpoint_stop(
        self, request_id: str, num_new_tokens: int, hit: Hit | None = None
    ) -> tuple[int, bool]:
        """Return how many of these tokens to schedule so that the states after them are worth
        keeping, and whether to pass `checkpoint=True`. Advice only. Changes nothing.
        """
        return self._core.checkpoint_stop(request_id, num_new_tokens, hit)

    def tick(self, now_ms: int) -> None:
        """Set the time in ms: levels end whose duration is over. Raises TimeWentBack."""
        self._core.tick(now_ms)

    def extend_retention(self, request_id: str, retention: KvCacheRetentionConfig) -> None:
        """Join more wishes to those of a request, for blocks that it releases from now on. A range
        without an end ends with the request's current tokens.
        """
        check_retention(retention)
        self._core.extend_retention(request_id, retention)

    def pin_prefix(self, name: str, request_id: str, num_tokens: int) -> int:
        """Hold what a hit on a request's first tokens needs until `unpin_prefix`, whatever becomes
        of the request; returns the tokens that are covered: whole blocks, computed by batches that
        are finished, at most num_tokens.

        In all pins hold at most `max_pinned_blocks`. Raises EmptyPinName, RepeatedPin,
        StaleRequest, NothingToPin, LoadUnconfirmed, TooManyPinned.
        """
        return self._core.pin_prefix(name, request_id, num_tokens)

    def unpin_prefix(self, name: str) -> None:
        """Release what a pin holds; it stays cached as long as other content. Raises UnknownPin."""
        self._core.unpin_prefix(name)


class Recordable:
    """A manager with a state, whose calls can be recorded.

    A manager that is not recorded keeps its plain methods.
    """

    config: Config
    backend: Literal["rust", "python"]
    _core: _twin.Backend
    _live: Any = None  # set by `kvcore.explain`, a later room

    def state(self) -> State:
        """Return the state as an immutable value. O(pool) on the rust backend. Changes nothing."""
        core: Any = self._core
        return core.state() if isinstance(core, PythonBackend) else decoding.decode(core.encode())

    def encode(self) -> bytes:
        """Return the canonical bytes of the state. O(pool). Changes nothing."""
        return self._core.encode()

    def restore(self, data: bytes | bytearray | memoryview) -> None:
        """Replace the state by canonical bytes. O(pool). Raises DamagedState, PoolTooLarge."""
        data = bytes(data) if isinstance(data, bytearray | memoryview) else data
        check_kind("data", data, bytes)
        config = decode_valid(data, self.backend).config
        self._core.restore(data)
        self.config = config
        if self._live is not None:
            self._live.forget()

    def check(self) -> None:
        """Raise InvariantViolation unless every invariant holds. O(pool). Changes nothing."""
        if self.backend == "python" or _twin.check_state(self._core.encode()):
            pool_and_state.check(
                self.state()
            )  # the twin names the broken properties, without numbers

    def start_recording(self, recorder: Recorder) -> None:
        """Record the state, and every call from now on: docs/recorder.md. Raises AlreadyRecording.

        A later failure of the files ends the record with a warning: `recorder.error`.
        """
        from kvcore.record.errors import AlreadyRecording
        from kvcore.record.recorder import Recorder  # few managers are recorded

        check_kind("recorder", recorder, Recorder)
        if self._core.is_recording:
            raise AlreadyRecording(what="the manager", reason="stop_recording ends that")
        recorder.start(self, self._core, one_way=self.config.hashing in ONE_WAY)
        self._core.start_recording(recorder)

    def stop_recording(self) -> None:
        """End the record, if any."""
        self._core.stop_recording()


def default_backend() -> Literal["rust", "python"]:
    """Return the twin if it is compiled, otherwise Python with a warning."""
    if _twin.available():
        return "rust"
    warnings.warn(
        "the compiled twin kvcore._rust is missing: the slow Python core is used",
        RuntimeWarning,
        stacklevel=3,
    )
    return "python"


def decode_valid(data: bytes, backend: str = "python") -> State:
    """Decode canonical bytes. Raises DamagedState, also if an invariant does not hold."""
    state = decoding.decode(data)
    try:
        if backend == "python" or _twin.check_state(data):  # fast, but its error has no numbers
            pool_and_state.check(state)
    except InvariantViolation as broken:
        raise DamagedState(reason=str(broken), offset=len(data)) from None
    return state


def make_backend(config: Config, name: str) -> _twin.Backend:
    """Make the backend of this name. Raises BackendMissing, InvalidConfig, PoolTooLarge."""
    if name == "python":
        return cast("_twin.Backend", PythonBackend(config))
    if name == "rust" and isinstance(config.eviction, EvictionPolicy):
        reason = "a policy of your own runs only on the backend 'python'"
        raise InvalidConfig(field="eviction", value=config.eviction, reason=reason)
    if name == "rust":
        return _twin.make_backend(config)
    raise BackendMissing(backend=name, reason='the backends are "rust" and "python"')


def _transition(name: str) -> Callable[..., Any]:
    def call(self: PythonBackend, *args: Any, **options: Any) -> Any:
        return self._change(TRANSITIONS[name], *args, **options)

    return call


def _query(name: str) -> Callable[..., Any]:
    def call(self: PythonBackend, *args: Any, **options: Any) -> Any:
        return QUERIES[name](self.state(), *args, **options)

    return call


for _name in TRANSITIONS:
    setattr(PythonBackend, _name, _transition(_name))
for _name in QUERIES:
    setattr(PythonBackend, _name, _query(_name))
