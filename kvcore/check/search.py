# SPDX-License-Identifier: Apache-2.0
"""Every reachable state of a small world, breadth first, over the production transitions.

Rules: the calls are the core's own, there is no second model. An edge is one step of an engine: one
call, or as many as `calls_per_batch`, then `take_batch` until nothing is left to run. States are
folded by `canonical.py`; the first one met stands for its class. On every edge the invariants are
checked at each call, and the contents: from blocks that hold just what a state counts on, the
edge's commands and writes must give all that the next one counts on. So the ghost adds no states.
Where loads fail, an edge that loads ends in every way it can: the engine then takes back, in one
call, what all requests count past the failure. A violation is told with the shortest calls that
lead to it. Twin: none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import attrs

from kvcore import invariants
from kvcore.calls import Call, Misuse, perform
from kvcore.check.actions import World, actions
from kvcore.check.canonical import canonical
from kvcore.check.ghost import Ghost, Write
from kvcore.check.outcomes import OUTCOME_PROPERTIES, check_events, check_hit, check_outcome
from kvcore.check.prefixes import PREFIX_PROPERTIES
from kvcore.check.schedule import Schedule
from kvcore.commands import CopyOnWrite, Evict, SetTable, SwapIn, SwapOut, Touch
from kvcore.drain import take_events, take_stats
from kvcore.errors import InvariantViolation
from kvcore.queries import get_computed_blocks
from kvcore.state import OpenBatch, State, make_state
from kvcore.values import Outcome, Refused

T = TypeVar("T")
Watch = Callable[[State, Call, Outcome[State, Any]], None]
Failing = tuple[str, int] | None
"""A request whose load fails, and the first token that it does not bring."""


EDGE_PROPERTIES = {
    "KV-READ": "what a query sees is read from slots that hold its own prefix, in every group",
    "CACHE-KV": "a block under a key holds exactly the prefix that the key stands for",
    "TABLE-MIRROR": "block tables made from the commands alone are the state's",
    "OWNER-MIRROR": "owners, and which ownerless blocks are cached, follow from the commands alone",
    "COMPUTED-RULE": "computed counts are those that the sentences of the design give",
    "ZEROED": "a new block of a group that asks for it is zeroed or filled before it is read",
    "CAP": "a request that one step extends holds no more of a windowed group than its cap",
    "NOCRASH": "no call fails in another way than by a typed error",
    **PREFIX_PROPERTIES,
    **OUTCOME_PROPERTIES,
}


@attrs.frozen
class Step:
    """A call that was made: on which state, with which outcome."""

    before: State
    call: Call
    outcome: Outcome[State, Any]


@attrs.define
class Report:
    """What an exploration found. goals: how often each thing that must happen somewhere did."""

    num_states: int = 0
    num_edges: int = 0
    depth: int = 0
    goals: Counter[str] = attrs.field(factory=Counter)


class Broken(AssertionError):
    """A violation, with the shortest calls that lead to it."""

    def __init__(self, name: str, detail: str, story: tuple[Call, ...]) -> None:
        self.name = name
        self.story = story
        super().__init__(f"{name}: {detail}" + "".join(f"\n  {call}" for call in story))


class Explorer:
    """One exploration of a world.

    watch: sees each call, to compare another implementation. judges: properties that count, all
    unless given; a step that breaks another one is left out.
    """

    def __init__(
        self, world: World, watch: Watch | None = None, judges: frozenset[str] | None = None
    ) -> None:
        self.world = world
        self.report = Report()
        self._watch = watch
        self._judges = judges
        self._ghost = Ghost(world.config)
        self.prefixes = self._ghost.prefixes
        self._schedule = Schedule()
        self._ending: tuple[Call, ...] = ()
        self._parents: dict[bytes, tuple[bytes, tuple[Call, ...]] | None] = {}

    def run(self, *, max_states: int | None = None) -> Report:
        """Explore everything, or until so many states are known. Raises Broken."""
        start = make_state(self.world.config)
        first = canonical(start, self.prefixes)
        self._parents = {first: None}
        waiting = deque([(first, start, 0)])
        while waiting and (max_states is None or len(self._parents) < max_states):
            name, state, depth = waiting.popleft()
            self.report.depth = depth
            for steps, failing in self._edges(name, state):
                closed = self._judged(name, steps, partial(self._close, steps, failing))
                if closed is None:
                    continue
                reached, calls = closed
                self.report.num_edges += 1
                target = canonical(reached, self.prefixes)
                if target not in self._parents:
                    self._judged(name, steps, partial(self._check, reached))
                    self._parents[target] = (name, calls)
                    waiting.append((target, reached, depth + 1))
        self.report.num_states = len(self._parents)
        return self.report

    def _edges(self, name: bytes, state: State) -> Iterator[tuple[tuple[Step, ...], Failing]]:
        """Every path, with every way in which its loads can end."""
        for steps in self._paths(name, state, self.world.calls_per_batch):
            yield steps, None
            if self.world.loads_fail:
                yield from ((steps, failing) for failing in failures(steps))

    def _paths(self, name: bytes, state: State, most: int) -> Iterator[tuple[Step, ...]]:
        """Every way to make one to so many calls, the shorter ones first."""
        paths: list[tuple[Step, ...]] = [()]
        for _ in range(most):
            longer = []
            for path in paths:
                before = path[-1].outcome.state if path else state
                possible = partial(self._possible, before)
                for call in self._judged(name, path, possible) or ():
                    opened = (*path, Step(before, call, Outcome(before, (), None)))
                    outcome = self._judged(name, opened, partial(self._perform, before, call))
                    if outcome is not None:
                        longer.append((*path, Step(before, call, outcome)))
                        yield longer[-1]
            paths = longer

    def _possible(self, state: State) -> list[Call]:
        return list(actions(self.world, state, self.prefixes))

    def _judged(self, name: bytes, steps: tuple[Step, ...], make: Callable[[], T]) -> T | None:
        """What `make` gives. Raises Broken, with the story, where a judged property breaks."""
        try:
            return make()
        except Exception as error:
            wrong = error.name if isinstance(error, InvariantViolation) else "NOCRASH"
            if self._judges is not None and wrong not in self._judges:
                return None
            story = (*self._story(name), *(step.call for step in steps), *self._ending)
            raise Broken(wrong, repr(error), story) from error

    def _ask(self, judge: Callable[..., None], *args: Any) -> None:
        """Hear a judge; what counts is raised."""
        try:
            judge(*args)
        except InvariantViolation as error:
            if self._judges is None or error.name in self._judges:
                raise

    def _check(self, state: State) -> None:
        for name, holds in invariants.PROPERTIES.items():
            if self._judges is None or name in self._judges:
                for detail in holds(state):
                    raise InvariantViolation(name, detail)

    def _perform(self, state: State, call: Call) -> Outcome[State, Any]:
        if call.name == "allocate_slots":
            hit = get_computed_blocks(state, call.args[0])
            self._ask(check_hit, state, state.requests[call.args[0]], hit)
        outcome = perform(state, call)
        if self._watch is not None:
            self._watch(state, call, outcome)
        self._ask(check_outcome, state, call, outcome)
        if call.name != "take_batch":
            self._check(outcome.state)
            self.prefixes.learn(outcome.state)
        note(self.report.goals, call, outcome)
        return outcome

    def _close(self, steps: tuple[Step, ...], failing: Failing) -> tuple[State, tuple[Call, ...]]:
        """Take the batch that the calls filled, judge it, and settle what it leaves; the state
        after, and the calls that lead there.
        """
        start, opened = steps[0].before, steps[-1].outcome.state
        self._ending = ()
        calls = tuple(step.call for step in steps)
        if opened is start:
            return start, calls
        self._schedule.assume(start)
        self._ghost.assume(start, self._schedule.encoders)
        self._ghost.loading = self._schedule.loading
        for step in steps:
            follow(self._schedule, step)
        self._ask(self._schedule.check, opened)
        self._ask(self._schedule.check_caps, opened)
        self.prefixes.learn(opened)
        self._ghost.execute(opened.batch.commands)
        writes = [failed(write, failing) for write in self._schedule.take()]
        self._ask(self._ghost.forward, opened, writes, self._schedule.encoders)
        if opened.config.enable_events:
            self._ask(check_events, start.device.index, opened.events, opened)
        settled: State = self._perform(opened, Call("take_batch")).state
        if failing is None or failing[0] in self._schedule.loading:
            self._ghost.check(opened, self._schedule.encoders)
            settled = self._complete(settled, failing)
        else:
            settled = self._rewind(settled, failing)
        if len(settled.batch.commands):
            self.report.goals["merge"] += len(opened.batch.merges) > 0
            self._ghost.execute(settled.batch.commands)
            self._ghost.check(settled, self._schedule.encoders)
            settled = self._perform(settled, Call("take_batch")).state
        drained = take_stats(take_events(settled).state).state
        return attrs.evolve(drained, batch=OpenBatch(0)), (*calls, *self._ending)

    def _complete(self, state: State, failing: Failing) -> State:
        """Finish every operation, in the order of their numbers."""
        for number, operation in sorted(state.operations.items()):
            done = failing is None or operation.first_token < failing[1]
            call = Call("complete_operation", (number, done))
            outcome = self._perform(state, call)
            self._ending = (*(self._ending or (Call("take_batch"),)), call)
            follow(self._schedule, Step(state, call, outcome))
            self._ghost.complete(number, done)
            state = outcome.state
            self._ask(self._schedule.check, state)
        return state

    def _rewind(self, state: State, failing: tuple[str, int]) -> State:
        """Take back what a failed load left, of all requests that count it."""
        names, count = [failing[0]], failing[1]
        self._ending = (Call("take_batch"),)
        while True:
            call = Call("rewind", (list(names), count))
            outcome = self._perform(state, call)
            self._ending = (*self._ending, call)
            if not isinstance(outcome.value, Misuse):
                schedule = Schedule()
                schedule.assume(state)
                follow(schedule, Step(state, call, outcome))
                schedule.check(outcome.state)
                return outcome.state
            assert outcome.value.error == "HeldByOthers", outcome.value
            names += outcome.value.fields["requests"]  # type: ignore[arg-type] # an object

    def _story(self, name: bytes) -> tuple[Call, ...]:
        """The calls that lead to a state; a batch is taken after each edge."""
        calls: tuple[Call, ...] = ()
        parent = self._parents[name]
        while parent is not None:
            calls = (*parent[1], *calls)
            parent = self._parents[parent[0]]
        return calls


def failures(steps: tuple[Step, ...]) -> Iterator[tuple[str, int]]:
    """Each request whose external tokens a path loads, with each token that may be the first to be
    missing: of the call itself, or of a block that an operation loads.
    """
    schedule = Schedule()
    schedule.assume(steps[0].before)
    for step in steps:
        follow(schedule, step)
    for operation in steps[-1].outcome.state.operations.values():
        if operation.request_id is not None:
            yield operation.request_id, operation.first_token
    for write in schedule.loads():
        yield from ((write.request_id, first) for first in range(write.start, write.loaded))


def follow(schedule: Schedule, step: Step) -> None:
    """Tell a schedule of a call, unless it was misuse."""
    call, value = step.call, step.outcome.value
    if not isinstance(value, Misuse):
        schedule.follow(step.before, call.name, call.args, call.options, value)


def failed(write: Write, failing: Failing) -> Write:
    """The write with its load failing, where it is the one that fails."""
    if failing is None or write.request_id != failing[0]:
        return write
    return attrs.evolve(write, failed=failing[1])


def note(goals: Counter[str], call: Call, outcome: Outcome[State, Any]) -> None:
    """Count what must not be missing from an exploration that is to show anything."""
    if isinstance(outcome.value, Misuse):
        goals[outcome.value.error] += 1
    elif isinstance(outcome.value, Refused):
        goals[f"refused {outcome.value.reason.value}"] += 1
    else:
        goals[call.name] += 1
    for kind in {type(command) for command in outcome.commands}:
        if kind in (Evict, Touch, CopyOnWrite, SwapOut, SwapIn):
            goals[kind.__name__] += 1
    goals["trim"] += any(
        isinstance(command, SetTable) and command.block < outcome.state.device.first_block
        for command in outcome.commands
    )
    device = outcome.state.device
    goals["sharing"] += any(count > 1 for count in device.ref_counts)
    goals["duplicates"] += any(len(blocks) > 1 for blocks in device.index.values())
