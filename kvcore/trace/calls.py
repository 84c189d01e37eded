# SPDX-License-Identifier: Apache-2.0
"""Calls as data, so that the same call can be made on a state and on a manager.

A call that misuses the core returns a `Misuse`, which compares by the error's type and fields.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.manager import KVCacheManager
from kvcore.state.state import State
from kvcore.transitions import TRANSITIONS
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Outcome


@attrs.frozen
class Misuse:
    """The typed error that a call raised."""

    error: str
    fields: dict[str, object]


@attrs.frozen
class Call:
    """A transition by name, with its arguments."""

    name: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = attrs.field(factory=dict)

    def __str__(self) -> str:
        words = [repr(value) for value in self.args]
        words += [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{self.name}({', '.join(words)})"


def perform(state: State, call: Call) -> Outcome[State, Any]:
    """Make a call on a state; misuse returns the same state, no commands and a `Misuse`."""
    try:
        return TRANSITIONS[call.name](state, *call.args, **call.options)
    except KvcoreError as error:
        return Outcome(state, (), Misuse(type(error).__name__, error.fields))


def perform_on(manager: KVCacheManager, call: Call) -> Any:
    """Make a call on a manager; return its value, or a `Misuse`."""
    try:
        return getattr(manager, call.name)(*call.args, **call.options)
    except KvcoreError as error:
        return Misuse(type(error).__name__, error.fields)
