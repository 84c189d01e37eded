# SPDX-License-Identifier: Apache-2.0
"""Every reachable state of a small world, breadth first, over the production transitions.

Rules: the calls are the core's own, there is no second model. An edge is one step of an engine: one
call, or as many as `calls_per_batch`, then `take_batch` until nothing is left to run. States are
folded by `canonical.py`; the first one met stands for its class. On every edge the invariants are
checked at each call, and the contents: from blocks that hold just what a state counts on, the
edge's commands and writes must give all that the next one counts on. So the ghost adds no states. A
violation is told with the shortest calls that lead to it. Twin: none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import attrs

from kvcore import invariants
from kvcore.actions import World, actions
from kvcore.calls import Call, Misuse, perform
from kvcore.canonical import Chains, canonical
from kvcore.commands import CopyOnWrite, Evict, SwapIn, SwapOut, Touch
from kvcore.drain import take_events, take_stats
from kvcore.encode import encode
from kvcore.errors import InvariantViolation
from kvcore.events import BlockStored, replay
from kvcore.ghost import Ghost
from kvcore.hashing import HASH_SIZE
from kvcore.schedule import Schedule
from kvcore.state import OpenBatch, State, make_state
from kvcore.values import Outcome, Refused

T = TypeVar("T")
Watch = Callable[[State, Call, Outcome[State, Any]], None]


EDGE_PROPERTIES = {
    "KV-READ": "each computed token of a request is read from a slot that holds its own prefix",
    "CACHE-KV": "a block under a key holds exactly the prefix that the key stands for",
    "HASH-INJ": "a block hash stands for one prefix",
    "TABLE-MIRROR": "block tables made from the commands alone are the state's",
    "OWNER-MIRROR": "owners, and which ownerless blocks are cached, follow from the commands alone",
    "EVT-COPY": "events replayed from nothing give the keys of the index",
    "COMPUTED-RULE": "computed counts are those that the sentences of the design give",
    "ATOMIC-FAIL": "a refusal or misuse leaves the state as it was, without commands",
    "RESET": "a reset happens exactly if nothing is held, and then no key is left",
    "NOCRASH": "no call fails in another way than by a typed error",
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
        self.chains = Chains(world.config.block_size)
        self._watch = watch
        self._judges = judges
        self._ghost = Ghost(world.config)
        self._schedule = Schedule()
        self._parents: dict[bytes, tuple[bytes, tuple[Call, ...]] | None] = {}

    def run(self, *, max_states: int | None = None) -> Report:
        """Explore everything, or until so many states are known. Raises Broken."""
        start = make_state(self.world.config)
        first = canonical(start, self.chains)
        self._parents = {first: None}
        waiting = deque([(first, start, 0)])
        while waiting and (max_states is None or len(self._parents) < max_states):
            name, state, depth = waiting.popleft()
            self.report.depth = depth
            for steps in self._paths(name, state, self.world.calls_per_batch):
                reached = self._judged(name, steps, partial(self._close, steps))
                if reached is None:
                    continue
                self.report.num_edges += 1
                target = canonical(reached, self.chains)
                if target not in self._parents:
                    self._judged(name, steps, partial(self._check, reached))
                    self._parents[target] = (name, tuple(step.call for step in steps))
                    waiting.append((target, reached, depth + 1))
        self.report.num_states = len(self._parents)
        return self.report

    def _paths(self, name: bytes, state: State, most: int) -> Iterator[tuple[Step, ...]]:
        """Every way to make one to so many calls, the shorter ones first."""
        paths: list[tuple[Step, ...]] = [()]
        for _ in range(most):
            longer = []
            for path in paths:
                before = path[-1].outcome.state if path else state
                for call in actions(self.world, before, self.chains):
                    opened = (*path, Step(before, call, Outcome(before, (), None)))
                    outcome = self._judged(name, opened, partial(self._perform, before, call))
                    if outcome is not None:
                        longer.append((*path, Step(before, call, outcome)))
            yield from longer
            paths = longer

    def _judged(self, name: bytes, steps: tuple[Step, ...], make: Callable[[], T]) -> T | None:
        """What `make` gives. Raises Broken, with the story, where a judged property breaks."""
        try:
            return make()
        except Exception as error:
            wrong = error.name if isinstance(error, InvariantViolation) else "NOCRASH"
            if self._judges is not None and wrong not in self._judges:
                return None
            story = (*self._story(name), *(step.call for step in steps))
            raise Broken(wrong, repr(error), story) from error

    def _check(self, state: State) -> None:
        for name, holds in invariants.PROPERTIES.items():
            if self._judges is None or name in self._judges:
                for detail in holds(state):
                    raise InvariantViolation(name, detail)

    def _perform(self, state: State, call: Call) -> Outcome[State, Any]:
        outcome = perform(state, call)
        if self._watch is not None:
            self._watch(state, call, outcome)
        check_outcome(state, call, outcome)
        if call.name != "take_batch":
            self._check(outcome.state)
            self.chains.learn(outcome.state)
        note(self.report.goals, call, outcome)
        return outcome

    def _close(self, steps: tuple[Step, ...]) -> State:
        """Take the batch that the calls filled, judge it, and settle what it leaves."""
        start, opened = steps[0].before, steps[-1].outcome.state
        if opened is start:
            return start
        self._ghost.assume(start)
        self._schedule.assume(start)
        for step in steps:
            if not isinstance(step.outcome.value, Misuse):
                call = step.call
                self._schedule.follow(
                    step.before, call.name, call.args, call.options, step.outcome.value
                )
        self._schedule.check(opened)
        self._ghost.prefixes.learn(opened)
        self._ghost.execute(opened.batch.commands)
        self._ghost.forward(opened, self._schedule.take())
        self._ghost.check(opened)
        if opened.config.enable_events:
            check_events(start, opened)
        settled: State = self._perform(opened, Call("take_batch")).state
        if len(settled.batch.commands):
            self.report.goals["merge"] += 1
            self._ghost.execute(settled.batch.commands)
            self._ghost.check(settled)
            settled = self._perform(settled, Call("take_batch")).state
        drained = take_stats(take_events(settled).state).state
        return attrs.evolve(drained, batch=OpenBatch(0))

    def _story(self, name: bytes) -> tuple[Call, ...]:
        """The calls that lead to a state; a batch is taken after each edge."""
        calls: tuple[Call, ...] = ()
        parent = self._parents[name]
        while parent is not None:
            calls = (*parent[1], *calls)
            parent = self._parents[parent[0]]
        return calls


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
    device = outcome.state.device
    goals["sharing"] += any(count > 1 for count in device.ref_counts)
    goals["duplicates"] += any(len(blocks) > 1 for blocks in device.index.values())


def check_outcome(before: State, call: Call, outcome: Outcome[State, Any]) -> None:
    """Raise InvariantViolation (ATOMIC-FAIL, RESET) for what a call must not give."""
    after = outcome.state
    if isinstance(outcome.value, Misuse | Refused) and (
        outcome.commands or encode(before) != encode(after)
    ):
        raise InvariantViolation("ATOMIC-FAIL", f"{call} changed the state and gave bad news")
    if call.name == "reset_prefix_cache":
        tiers = [pool for pool in (before.device, before.host) if pool is not None]
        unused = all(pool.num_free == pool.num_usable for pool in tiers)
        if outcome.value is not unused or (unused and len(after.device.index)):
            raise InvariantViolation("RESET", f"gives {outcome.value} with {len(tiers)} tiers")


def check_events(start: State, opened: State) -> None:
    """Raise InvariantViolation (EVT-COPY) unless index and events give the index after."""
    size = start.config.block_size
    held = [
        BlockStored((key[:HASH_SIZE],), None, (), size, int.from_bytes(key[HASH_SIZE:], "big"))
        for key in start.device.index
    ]
    keys = replay([*held, *opened.events])
    if keys != set(opened.device.index):
        raise InvariantViolation("EVT-COPY", f"{len(keys)} keys by the events")
