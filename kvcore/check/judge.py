# SPDX-License-Identifier: Apache-2.0
"""Making calls under judgement: what each must be, and what is noted of it.

Rules: a property that does not hold raises `Broken` with the steps so far. Where only some
properties count, a step that breaks another one is left out, and an error that is no property's
name is NOCRASH. Twin: none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvcore import invariants
from kvcore.calls import Call, Misuse, perform
from kvcore.check.model import Broken, Step
from kvcore.check.outcomes import check_events, check_hit, check_outcome
from kvcore.check.prefixes import Prefixes
from kvcore.commands import SetTable
from kvcore.errors import InvariantViolation
from kvcore.queries import get_computed_blocks
from kvcore.state import State
from kvcore.values import Appended, Outcome, Refused

T = TypeVar("T")
Watch = Callable[[State, Call, Outcome[State, Any]], None]


class Judge:
    """Hears all properties that count, and keeps the notes.

    judges: those that count, all unless given. watch: sees each call, to compare another
    implementation.
    """

    def __init__(self, judges: frozenset[str] | None = None, watch: Watch | None = None) -> None:
        self.judges = judges
        self.notes: Counter[tuple[str, str]] = Counter()
        self._watch = watch

    def heard(self, steps: Sequence[Step], make: Callable[[], T]) -> T | None:
        """What `make` gives; None where it breaks a property that does not count. Raises Broken."""
        try:
            return make()
        except Broken:
            raise
        except Exception as error:
            name = error.name if isinstance(error, InvariantViolation) else "NOCRASH"
            if self.judges is not None and name not in self.judges:
                return None
            raise Broken(name, repr(error), tuple(steps)) from error

    def ask(self, judge: Callable[..., None], *args: Any) -> None:
        """Hear a judge; what counts is raised."""
        try:
            judge(*args)
        except InvariantViolation as error:
            if self.judges is None or error.name in self.judges:
                raise

    def check(self, state: State) -> None:
        """Hear the structural properties of a state."""
        for name, holds in invariants.PROPERTIES.items():
            if self.judges is None or name in self.judges:
                for detail in holds(state):
                    raise InvariantViolation(name, detail)

    def check_batch(self, start: State, opened: State) -> None:
        """Hear what a batch must be, from the state in which it was empty to that before it is
        taken.
        """
        if opened.config.enable_events:
            self.ask(check_events, start.device.index, opened.events, opened)

    def step(self, path: tuple[Step, ...], state: State, call: Call, prefixes: Prefixes) -> Any:
        """A step behind a path; None where it breaks a property that does not count."""
        opened = (*path, Step(state, call, Outcome(state, (), None)))
        return self.heard(opened, lambda: self.perform(state, call, prefixes))

    def perform(self, state: State, call: Call, prefixes: Prefixes) -> Step:
        """Make a call, judge its outcome and note it. Raises InvariantViolation."""
        if call.name == "allocate_slots":
            hit = get_computed_blocks(state, call.args[0])
            self.ask(check_hit, state, state.requests[call.args[0]], hit)
        outcome = perform(state, call)
        if self._watch is not None:
            self._watch(state, call, outcome)
        self.ask(check_outcome, state, call, outcome)
        if call.name != "take_batch":
            self.check(outcome.state)
            prefixes.learn(outcome.state)
        note(self.notes, call, outcome)
        return Step(state, call, outcome)


def note(notes: Counter[tuple[str, str]], call: Call, outcome: Outcome[State, Any]) -> None:
    """Count what must not be missing from an exploration that is to show anything."""
    notes["call", f"{call.name}: {said(outcome.value)}"] += 1
    for kind in {type(command) for command in outcome.commands}:
        notes["command", kind.__name__] += 1
    first = outcome.state.device.first_block
    for command in outcome.commands:
        if isinstance(command, SetTable) and command.block < first:
            notes["goal", "trim"] += 1
            break


def said(value: object) -> str:
    """What a call gave, in a word or two: done, refused and why, or the error's name."""
    if isinstance(value, Misuse):
        return value.error
    refused = value.refused if isinstance(value, Appended) else value
    if isinstance(refused, Refused):
        return f"refused {refused.reason.value}"
    return "done"


def note_state(notes: Counter[tuple[str, str]], state: State) -> None:
    """Count what a new state shows."""
    device = state.device
    notes["goal", "sharing"] += any(count > 1 for count in device.ref_counts)
    notes["goal", "duplicates"] += len(device.index.following) > 0
