# SPDX-License-Identifier: Apache-2.0
"""The backend over the pure functions: one state, and the table of transitions as methods.

It has the methods of the compiled twin, `kvcore._rust.Manager`, whose stub has their types. Here a
manager also gets the backend that it names.
"""

from __future__ import annotations

import warnings
from _thread import allocate_lock, get_ident
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from kvcore import _twin
from kvcore.codec import decode as decoding
from kvcore.codec import encode as encoding
from kvcore.invariants import pool_and_state
from kvcore.state.state import State, make_state
from kvcore.transitions import QUERIES, TRANSITIONS, arguments
from kvcore.types.config import Config
from kvcore.types.errors import BackendMissing, ConcurrentCall, DamagedState, InvariantViolation
from kvcore.types.values import Outcome

T = TypeVar("T")
READ_FIRST = {"request", "hashes", "hit", "request_ids", "block_ids", "done", "key", "retention"}
"""Arguments that a manager reads before either language sees them."""
HANDED_ON = [name for name in (*TRANSITIONS, *QUERIES) if READ_FIRST.isdisjoint(arguments(name))]
"""Methods that are the twin's own, with the same arguments by the same names."""


class PythonBackend:
    """The newest state, and the pure functions on it, one at a time.

    An argument may ask the manager while it is read, on the thread that made the call.
    """

    def __init__(self, config: Config) -> None:
        self._state = make_state(config)
        self._running = allocate_lock()
        self._thread = 0

    def state(self) -> State:
        """The state as it is. Raises ConcurrentCall."""
        if self._running.locked() and self._thread != get_ident():
            raise ConcurrentCall
        return self._state

    @property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(each.number for each in self.state().in_flight)

    @property
    def num_free_blocks(self) -> int:
        return self.state().device.num_free

    @property
    def num_free_host_blocks(self) -> int:
        host = self.state().host
        return 0 if host is None else host.num_free

    def encode(self) -> bytes:
        return encoding.encode(self.state())

    def restore(self, data: bytes) -> None:
        state = decoding.decode(data)
        self._change(lambda _: Outcome(state, (), None))

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


def default_backend() -> Literal["rust", "python"]:
    """The twin if it is compiled, otherwise Python with a warning."""
    if _twin.available():
        return "rust"
    warnings.warn(
        "the compiled twin kvcore._rust is missing: the slow Python core is used",
        RuntimeWarning,
        stacklevel=3,
    )
    return "python"


def decode_valid(data: bytes) -> State:
    """The state of canonical bytes. Raises DamagedState, also if an invariant does not hold."""
    state = decoding.decode(data)
    try:
        pool_and_state.check(state)
    except InvariantViolation as broken:
        raise DamagedState(reason=str(broken), offset=len(data)) from None
    return state


def make_backend(config: Config, name: str) -> _twin.Backend:
    """The backend of this name. Raises BackendMissing, PoolTooLarge."""
    if name == "python":
        return cast("_twin.Backend", PythonBackend(config))
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
