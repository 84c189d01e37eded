# SPDX-License-Identifier: Apache-2.0
"""One run over the Python core, its ghost and the compiled twin, which must agree at every call."""

from __future__ import annotations

from typing import Any

from kvcore import KVCacheManager, _twin, invariants
from kvcore.calls import Call, Misuse, perform, perform_on
from kvcore.commands import Batch, Command
from kvcore.config import Config
from kvcore.encode import encode
from kvcore.events import Event, replay
from kvcore.ghost import Ghost
from kvcore.queries import get_computed_blocks
from kvcore.schedule import Schedule
from kvcore.state import State, make_state
from kvcore.values import Hit, Refused


class Lockstep:
    """A state that takes calls; each is judged by everything there is.

    twin: compare every call with the compiled twin, where it is built.
    """

    def __init__(self, config: Config, *, twin: bool = True) -> None:
        self.state = make_state(config)
        self.twin = KVCacheManager(config, "rust") if twin and _twin.available() else None
        self.ghost = Ghost(config)
        self.schedule = Schedule()
        self.calls: list[Call] = []
        self.events: list[Event] = []
        self.executed: list[Command] = []

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call everywhere; returns its value, or a `Misuse`."""
        call = Call(name, args, options)
        self.calls.append(call)
        before = self.state
        outcome = perform(before, call)
        self.state = outcome.state
        if isinstance(outcome.value, Misuse | Refused):
            assert encode(self.state) == encode(before), f"{call} was refused and changed the state"
            assert outcome.commands == ()
        if self.twin is not None:
            self._compare(self.twin, call, outcome.value)
        invariants.check(self.state)
        self.ghost.prefixes.learn(self.state)
        if isinstance(outcome.value, Misuse):
            return outcome.value
        self.schedule.follow(before, name, args, options, outcome.value)
        self.schedule.check(self.state)
        if name == "take_batch":
            self._execute(before, outcome.value)
        if name == "take_events":
            self.events.extend(outcome.value)
        self._check_events()
        return outcome.value

    def hit(self, request_id: str) -> Hit:
        """The cached prefix of a request; asking changes nothing."""
        hit = get_computed_blocks(self.state, request_id)
        if self.twin is not None:
            assert self.twin.get_computed_blocks(request_id) == hit
            assert self.twin.encode() == encode(self.state)
        return hit

    def _compare(self, twin: KVCacheManager, call: Call, value: Any) -> None:
        given = perform_on(twin, call)
        if call.name == "take_events":
            given = tuple(given)
        assert given == value, f"{call} gives {given!r} in Rust, {value!r} in Python"
        assert twin.encode() == encode(self.state), f"the states differ after {call}"

    def _execute(self, before: State, batch: Batch) -> None:
        commands = list(batch)
        assert commands == list(before.batch.commands)
        self.executed = commands
        self.ghost.execute(commands)
        self.ghost.forward(before, self.schedule.take())
        self.ghost.check(before)

    def _check_events(self) -> None:
        """EVT-COPY: the events, replayed from nothing, give the index."""
        if self.state.config.enable_events:
            mirrored = replay([*self.events, *self.state.events])
            assert mirrored == set(self.state.device.index), "EVT-COPY"


def story(run: Lockstep) -> str:
    """The calls of a run, one a line, to make it again."""
    return "\n".join(str(call) for call in run.calls)
