# SPDX-License-Identifier: Apache-2.0
"""One run over the Python core, its ghost and the compiled twin, which must agree at every call.

With batches in flight the ghost runs late: a taken batch when it is completed, when a transfer of
it ends, or at `catch_up`. A batch that is cancelled before has not happened. Owners are not
followed then: a cancel drops commands that told of them.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore import KVCacheManager, _twin
from kvcore.check.names.in_flight import OF_OWNERS
from kvcore.check.properties.outcomes import check_events, check_hit, check_outcome
from kvcore.check.search.parity import Parts, whole
from kvcore.check.world.ghost import Ghost, owners
from kvcore.codec.encode import encode
from kvcore.invariants import pool_and_state
from kvcore.oracle.schedule import Encoder, Schedule, Write, failed
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, Misuse, perform, perform_on
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.commands import Batch, Command
from kvcore.types.config import Config
from kvcore.types.events import Event
from kvcore.types.values import Hit


@attrs.frozen
class Taken:
    """A batch that the device has not run: the state it was taken from, its writes, and what the
    encoders' tokens of its requests were then, and the epochs in which they began.
    """

    batch: Batch
    before: State
    writes: list[Write]
    encoders: dict[str, Encoder]
    epochs: dict[str, int]


class Lockstep:
    """A state that takes calls; each is checked by everything there is.

    twin: compare every call with the compiled twin, if it is built.
    """

    def __init__(self, config: Config, *, twin: bool = True) -> None:
        self.state, self.parts = make_state(config), Parts()
        self.twin = KVCacheManager(config, "rust") if twin and _twin.available() else None
        self.ghost = Ghost(config)
        self.schedule = Schedule()
        self.calls: list[Call] = []
        self.fails: list[tuple[str, int] | None] = []
        self.events: list[Event] = []
        self.executed: list[Command] = []
        self.failing: tuple[str, int] | None = None
        self.waiting: list[Taken] = []

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call everywhere; returns its value, or a `Misuse`."""
        call = Call(name, args, options)
        self.calls.append(call)
        self.fails.append(self.failing)
        before = self.state
        self._run_what_ends(call)
        outcome = perform(before, call)
        self.state = outcome.state
        check_outcome(before, call, outcome)
        if self.twin is not None:
            self._compare(self.twin, call, outcome.value)
        pool_and_state.check(self.state)
        self.ghost.prefixes.learn(self.state)
        if isinstance(outcome.value, Misuse):
            return outcome.value
        self.schedule.follow(before, name, args, options, outcome.value)
        if name == "cancel":
            self._forget(args[0])
        self.schedule.check(self.state)
        self.schedule.check_caps(self.state)
        self.ghost.loading = self.schedule.loading
        if name == "complete_operation":
            self.ghost.complete(*args)
        if name == "take_batch":
            self._take(before, outcome.value)
        if name == "take_events":
            self.events.extend(outcome.value)
        if self.state.config.enable_events:
            check_events(None, [*self.events, *self.state.events], self.state)
        return outcome.value

    def take_and_fail(self, failing: tuple[str, int]) -> None:
        """Take the batch, the only one; fail a request's load from one token on, so that the engine
        takes back the count of all requests beyond it; it frees the requests that still load.
        """
        while self.state.in_flight:
            self.call("complete", self.state.in_flight[0].number)
        self.failing = failing
        self.call("take_batch")
        self.catch_up()
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
        """Return the cached prefix of a request; the look-up changes nothing."""
        hit = get_computed_blocks(self.state, request_id)
        if self.twin is not None:
            assert self.twin.get_computed_blocks(request_id) == hit
            assert self.twin.encode() == encode(self.state, self.parts)
        check_hit(self.state, self.state.requests[request_id], hit)
        return hit

    def _compare(self, twin: KVCacheManager, call: Call, value: Any) -> None:
        given = perform_on(twin, call)
        if call.name == "take_events":
            given = tuple(given)
        assert whole(given) == whole(value), f"{call} gives {given!r} in Rust, {value!r} in Python"
        assert twin.encode() == encode(self.state, self.parts), f"the states differ after {call}"

    def catch_up(self) -> None:
        """Let the device run all taken batches; if none is open, what the state counts on is
        there.
        """
        self._run_to(self.state.batch.number)
        untouched = not len(self.state.batch.commands) and not self.schedule.scheduled()
        if self.state.config.max_in_flight and self.failing is None and untouched:
            self.ghost.owned, self.ghost.cached = owners(self.state)
            self.ghost.check(self.state, self.schedule.encoders)

    def _take(self, before: State, batch: Batch) -> None:
        commands = list(batch)
        assert commands == list(before.batch.commands)
        writes = [failed(write, self.failing) for write in self.schedule.take()]
        encoders, epochs = dict(self.schedule.encoders), dict(self.schedule.epochs)
        self.waiting.append(Taken(batch, before, writes, encoders, epochs))
        if not before.config.max_in_flight:
            self.catch_up()

    def _run_what_ends(self, call: Call) -> None:
        """Execute a batch before it is completed, or before a transfer of it ends."""
        if call.name == "complete" and call.args[0] in self._numbers():
            self._run_to(call.args[0])
        if call.name == "complete_operation" and call.args[0] in self.state.operations:
            self._run_to(self.state.operations[call.args[0]].batch)

    def _numbers(self) -> list[int]:
        return [batch.number for batch in self.state.in_flight]

    def _run_to(self, number: int) -> None:
        while self.waiting and self.waiting[0].batch.number <= number:
            self._execute(self.waiting.pop(0))

    def _execute(self, taken: Taken) -> None:
        commands, late = list(taken.batch), self.state.config.max_in_flight
        self.executed = commands
        if late:
            commands = [each for each in commands if not isinstance(each, OF_OWNERS)]
        self.ghost.epoch = taken.batch.epoch
        self.ghost.apply(commands)
        self.ghost.compute(taken.before.requests, taken.writes, taken.encoders, taken.epochs)
        if self.failing is None and not late:
            self.ghost.check(taken.before, taken.encoders)

    def _forget(self, first: int) -> None:
        """Take back the batches from a number on, and the open one: what is late never runs."""
        self.waiting = [each for each in self.waiting if each.batch.number < first]
        encoders = self.schedule.encoders
        self.schedule.assume(self.state)
        known = self.state.requests
        self.schedule.encoders = {
            name: each
            for name, each in encoders.items()
            if name in known and known[name].num_computed
        }
        for name in list(self.schedule.loading):
            if name not in known or not known[name].num_loading:
                del self.schedule.loading[name]
                self.schedule.failed.pop(name, None)


def story(run: Lockstep) -> str:
    """Return the calls of a run, one per line, to make it again."""
    return "\n".join(str(call) for call in run.calls)
