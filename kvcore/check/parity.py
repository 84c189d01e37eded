# SPDX-License-Identifier: Apache-2.0
"""The same call on the compiled twin: from the same bytes to the same everything (REFINE).

Rules: the bytes of a state hold its open batch with the commands, the events and the statistics, so
equal bytes and values are equal outcomes. Twin: none.
"""

from __future__ import annotations

from typing import Any

from kvcore import _twin
from kvcore.backend import Backend
from kvcore.calls import Call, Misuse
from kvcore.check.world import World
from kvcore.config import Config
from kvcore.decode import decode
from kvcore.encode import encode
from kvcore.errors import InvariantViolation, KvcoreError
from kvcore.state import State
from kvcore.values import Outcome

_LOAD: dict[str, Any] = {"full_sequence_must_fit": False, "reserved_blocks": 0}
_OPTIONS: dict[str, dict[str, Any]] = {
    "load": _LOAD,
    "allocate_slots": {
        "num_lookahead_tokens": 0,
        "num_external_computed_tokens": 0,
        "delay_cache_blocks": False,
        "num_encoder_tokens": 0,
        **_LOAD,
    },
}


class Parity:
    """Makes each call of an exploration on the compiled twin, too.

    Raises InvariantViolation (REFINE) where value, error or bytes differ.
    """

    def __init__(self, world: World) -> None:
        self.num_calls = 0
        self._twin = _twin.make_backend(world.config)
        self._start: tuple[State, bytes] | None = None
        self._reached: State | None = None

    def __call__(self, state: State, call: Call, outcome: Outcome[State, Any]) -> None:
        self.num_calls += 1
        if self._reached is not state:
            self._twin.restore(self._bytes(state))
        value = perform_on_twin(self._twin, call)
        if value != outcome.value:
            raise InvariantViolation("REFINE", f"{call}: Rust {value!r}, Python {outcome.value!r}")
        if self._twin.encode() != encode(outcome.state):
            raise InvariantViolation("REFINE", f"{call}: the states differ")
        self._reached = outcome.state

    def _bytes(self, state: State) -> bytes:
        if self._start is None or self._start[0] is not state:
            self._start = (state, encode(state))
        return self._start[1]


class TwinRun:
    """A run of calls on the twin, whose states are read back."""

    def __init__(self, config: Config) -> None:
        self._twin = _twin.make_backend(config)
        self.state = decode(self._twin.encode())

    def perform(self, call: Call) -> Outcome[State, Any]:
        """Make a call; the state after, what it emitted, its value or a `Misuse`."""
        before = self.state
        value = perform_on_twin(self._twin, call)
        self.state = decode(self._twin.encode())
        same = before.batch.number == self.state.batch.number
        first = len(before.batch.commands) if same else 0
        return Outcome(self.state, tuple(self.state.batch.commands[first:]), value)

    def put(self, state: State) -> None:
        """Go on from a state."""
        self._twin.restore(encode(state))
        self.state = state


def perform_on_twin(twin: Backend, call: Call) -> Any:
    """Make a call on a backend; its value, or a `Misuse`."""
    args, options = call.args, call.options
    if call.name in _OPTIONS:
        args = (*args, None)[:3]
        options = _OPTIONS[call.name] | options
    try:
        return getattr(twin, call.name)(*args, **options)
    except KvcoreError as error:
        return Misuse(type(error).__name__, error.fields)
