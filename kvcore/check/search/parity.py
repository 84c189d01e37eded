# SPDX-License-Identifier: Apache-2.0
"""The comparison with the compiled twin (REFINE): each call, from the same bytes, must give the
same bytes.

The bytes contain the open batch with its commands, the events and the statistics. If a call starts
from the state that the last one reached, nothing is restored.
"""

from __future__ import annotations

from typing import Any

from kvcore import _twin
from kvcore.check.names.digest import PARTS_KEPT
from kvcore.codec.encode import Write, encode
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse
from kvcore.transitions.transfers import load
from kvcore.types.commands import COLUMNS, Batch
from kvcore.types.config import Config
from kvcore.types.errors import InvariantViolation, KvcoreError
from kvcore.types.slot_request import DEFAULTS
from kvcore.types.values import Appended, Outcome
from kvcore.types.wire import Writer

OPTIONS = {"load": load.__kwdefaults__ or {}, "allocate_slots": DEFAULTS}
"""The options that the twin's methods require, with their default values."""


def whole(value: Any) -> Any:
    """Return a call's value with what its comparison or text leaves out: columns, as lists."""
    if isinstance(value, Appended):
        return value, [column.tolist() for column in value.grown]
    if isinstance(value, Batch):
        columns = {name: value.column(name).tolist() for name in COLUMNS}
        return value.number, columns, value.keys
    return value


class Parts:
    """A cache of the bytes of configs, pools and requests, most of which a call leaves
    unchanged.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, bytes]] = {}

    def __call__(self, write: Write, value: Any) -> bytes:
        known = self._known.get(id(value))
        if known is None:
            if len(self._known) > PARTS_KEPT:
                self._known.clear()
            out = Writer()
            write(out, value)
            known = self._known[id(value)] = (value, bytes(out.data))
        return known[1]


class Parity:
    """Compares each call that it sees. Raises BackendMissing, and InvariantViolation (REFINE)."""

    def __init__(self, config: Config) -> None:
        self.num_calls = 0
        self._twin = _twin.make_backend(config)
        self._part = Parts()
        self._start: tuple[State, bytes] | None = None
        self._reached: State | None = None

    def __call__(self, state: State, call: Call, outcome: Outcome[State, Any]) -> None:
        self.num_calls += 1
        if self._reached is not state:
            self._twin.restore(self._bytes(state))
        self._reached = None
        rust, python = whole(self._make(call)), whole(outcome.value)
        if rust != python:
            detail = f"{call}: Rust gives {rust!r}, Python {python!r}"
            raise InvariantViolation("REFINE", detail)
        if self._twin.encode() != encode(outcome.state, self._part):
            raise InvariantViolation("REFINE", f"{call}: the states differ")
        self._reached = outcome.state

    def _bytes(self, state: State) -> bytes:
        if self._start is None or self._start[0] is not state:
            self._start = (state, encode(state, self._part))
        return self._start[1]

    def _make(self, call: Call) -> Any:
        args, options = call.args, call.options
        if call.name in OPTIONS:
            args = (*args, None)[:3]
            options = OPTIONS[call.name] | options
        try:
            return getattr(self._twin, call.name)(*args, **options)
        except KvcoreError as error:
            return Misuse(type(error).__name__, error.fields)
