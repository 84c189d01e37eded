# SPDX-License-Identifier: Apache-2.0
"""One run over the Python core, its ghost and the compiled twin, which must agree at every call."""

from __future__ import annotations

from typing import Any

from kvcore import KVCacheManager, _twin, invariants
from kvcore.calls import Call, Misuse, perform, perform_on
from kvcore.check.core_model import failed
from kvcore.check.ghost import Ghost
from kvcore.check.outcomes import check_events, check_hit, check_outcome
from kvcore.check.schedule import Schedule
from kvcore.commands import Batch, Command
from kvcore.config import Config
from kvcore.encode import encode
from kvcore.events import Event
from kvcore.queries import get_computed_blocks
from kvcore.state import State, make_state
from kvcore.values import Hit


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
        self.fails: list[tuple[str, int] | None] = []
        self.events: list[Event] = []
        self.executed: list[Command] = []
        self.failing: tuple[str, int] | None = None

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call everywhere; returns its value, or a `Misuse`."""
        call = Call(name, args, options)
        self.calls.append(call)
        self.fails.append(self.failing)
        before = self.state
        outcome = perform(before, call)
        self.state = outcome.state
        check_outcome(before, call, outcome)
        if self.twin is not None:
            self._compare(self.twin, call, outcome.value)
        invariants.check(self.state)
        self.ghost.prefixes.learn(self.state)
        if isinstance(outcome.value, Misuse):
            return outcome.value
        self.schedule.follow(before, name, args, options, outcome.value)
        self.schedule.check(self.state)
        self.schedule.check_caps(self.state)
        self.ghost.loading = self.schedule.loading
        if name == "complete_operation":
            self.ghost.complete(*args)
        if name == "take_batch":
            self._execute(before, outcome.value)
        if name == "take_events":
            self.events.extend(outcome.value)
        if self.state.config.enable_events:
            check_events((), [*self.events, *self.state.events], self.state)
        return outcome.value

    def take_and_fail(self, failing: tuple[str, int]) -> None:
        """Take the batch; a request's load does not bring its tokens from one on, so the engine
        takes back what all who count them have on top; it frees those who still load.
        """
        self.failing = failing
        self.call("take_batch")
        self.failing = None
        names = [failing[0]]
        value = self.call("rewind", list(names), failing[1])
        while isinstance(value, Misuse):
            assert value.error == "HeldByOthers", value
            for name in value.fields["requests"]:  # type: ignore[attr-defined] # an object
                if self.state.requests[name].num_loading:
                    self.call("free", name)
                else:
                    names.append(name)
            value = self.call("rewind", list(names), failing[1])

    def hit(self, request_id: str) -> Hit:
        """The cached prefix of a request; asking changes nothing."""
        hit = get_computed_blocks(self.state, request_id)
        if self.twin is not None:
            assert self.twin.get_computed_blocks(request_id) == hit
            assert self.twin.encode() == encode(self.state)
        check_hit(self.state, self.state.requests[request_id], hit)
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
        writes = [failed(write, self.failing) for write in self.schedule.take()]
        self.ghost.forward(before.requests, writes, self.schedule.encoders)
        if self.failing is None:
            self.ghost.check(before, self.schedule.encoders)


def story(run: Lockstep) -> str:
    """The calls of a run, one a line, to make it again."""
    return "\n".join(str(call) for call in run.calls)
