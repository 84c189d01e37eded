# SPDX-License-Identifier: Apache-2.0
"""The core as a model: every edge of a world in which a taken batch counts as executed.

Rules: the calls are the core's own, there is no second model. An edge is one step of an engine: one
move, or as many as `calls_per_batch`, then `take_batch` until nothing is left to run. On every edge
the invariants are checked at each call, and the contents: from blocks that hold just what a state
counts on, the edge's commands and writes must give all that the next one counts on. So the ghost
adds no states. Where loads fail, an edge that loads ends in every way it can: the engine then takes
back, in one call, what all requests count past the failure. Twin: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from msgspec.structs import replace as evolve
from pyrsistent import pvector

from kvcore.calls import Call, Misuse
from kvcore.check import packed
from kvcore.check.canonical import Names
from kvcore.check.digest import Lately
from kvcore.check.ghost import Counted, Ghost, Write
from kvcore.check.judge import Judge, Watch, note_state
from kvcore.check.model import Edge, Step
from kvcore.check.moves import moves
from kvcore.check.prefixes import Prefixes
from kvcore.check.properties import Property
from kvcore.check.schedule import Schedule
from kvcore.check.world import Move, Symmetry, World
from kvcore.state import OpenBatch, State, make_state
from kvcore.values import PrefixCacheStats

COUNTED_KEPT = 1_500
TAKE_BATCH = Call("take_batch")
Failing = tuple[str, int] | None
"""A request whose load fails, and the first token that it does not bring."""
Steps = tuple[Step, ...]
Path = tuple[str, Steps]
"""The names of some moves, and the steps that they took."""


class CoreModel:
    """The states of a world without batches in flight.

    properties: those that count, all unless given; a step that breaks another one is left out.
    watch: sees each call, to compare another implementation.
    """

    def __init__(
        self,
        world: World,
        *,
        symmetry: Symmetry | None = None,
        properties: Iterable[str | Property] | None = None,
        watch: Watch | None = None,
        full_keys: bool = False,
    ) -> None:
        self.world = world
        self.symmetry = symmetry or Symmetry()
        self.prefixes = Prefixes(world.config)
        names = Names(self.prefixes, self.symmetry, full=full_keys)
        self.judge = Judge(world, self.prefixes, names, properties, watch)
        self.notes = self.judge.notes
        self._ghost = Ghost(world.config, self.judge.counts, self.prefixes)
        self._schedule = Schedule()
        self._full_keys = full_keys
        self._start: tuple[State | None, Counted | None] = (None, None)
        self._counted: Lately[Counted] = Lately(COUNTED_KEPT)
        self._encodes = any(group.is_cross for group in world.config.groups)

    def start(self) -> State:
        """The empty state."""
        return make_state(self.world.config)

    def edges(self, node: State) -> Iterator[Edge]:
        """Every path, with every way in which its loads can end."""
        for name, steps in self._paths(node):
            for failing in (None, *(failures(steps) if self.world.loads_fail else ())):
                edge = self._close(name, steps, failing)
                if edge is not None:
                    yield edge

    def name(self, node: State) -> bytes:
        """The canonical name of a state, or 128 bits of it."""
        return self.judge.name(node)

    def check(self, node: State) -> None:
        """Judge a state that is new, and note what it shows."""
        self.judge.check(node)
        self.judge.check_runs(node)
        note_state(self.notes, node)

    def pack(self, node: State) -> bytes:
        """A state as bytes."""
        return packed.pack(node)

    def unpack(self, data: bytes) -> State:
        """The state of these bytes."""
        return packed.unpack(self.world.config, data)

    def _paths(self, state: State) -> Iterator[Path]:
        """Every way to make one to so many moves, the shorter ones first."""
        paths: list[Path] = [("", ())]
        for _ in range(self.world.calls_per_batch):
            longer: list[Path] = []
            for names, path in paths:
                before = path[-1].outcome.state if path else state
                for name, steps in self._moves(before, path):
                    longer.append((f"{names}, {name}" if names else name, steps))
                    yield longer[-1]
            paths = longer

    def _moves(self, state: State, path: Steps) -> Iterator[Path]:
        """Every move in a state that was reached by a path: its name, the path with it."""
        judge, letters = self.judge, not self.symmetry.tokens
        possible = judge.heard(
            path, lambda: list(moves(self.world, state, self.prefixes, every_letter=letters))
        )
        for move in possible or ():
            if isinstance(move, Call):
                step = judge.step(path, state, move)
                if step is not None:
                    yield move.name, (*path, step)
                continue
            steps = self._scripted(move, state, path)
            if steps is not None:
                yield move.name, steps

    def _scripted(self, move: Move, state: State, path: Steps) -> Steps | None:
        """The path with the calls of a move; None where a step breaks what is not judged."""
        script = move.script()
        call = self.judge.heard(path, lambda: next(script, None))
        while call is not None:
            step = self.judge.step(path, state, call)
            if step is None:
                return None
            path, state = (*path, step), step.outcome.state
            call = self.judge.heard(path, partial(proceed, script, step))
        return path

    def _close(self, name: str, steps: Steps, failing: Failing) -> Edge | None:
        """Take the batch that the calls filled, judge it, and settle what it leaves."""
        start, opened = steps[0].before, steps[-1].outcome.state
        if opened is start:
            return Edge(name, steps, start)
        closing = list(steps)
        settled = self.judge.heard(closing, lambda: self._settle(start, opened, closing, failing))
        return None if settled is None else Edge(name, tuple(closing), settled)

    def _settle(self, start: State, opened: State, closing: list[Step], failing: Failing) -> State:
        judge, schedule, ghost = self.judge, self._schedule, self._ghost
        schedule.assume(start)
        ghost.assume(self._counted_at(start))
        ghost.loading = schedule.loading
        for step in closing:
            follow(schedule, step)
        judge.ask(schedule.check, opened)
        judge.ask(schedule.check_caps, opened)
        ghost.execute(opened.batch.commands)
        writes = [failed(write, failing) for write in schedule.take()]
        judge.ask(ghost.forward, opened.requests, writes, schedule.encoders)
        judge.check_batch(start, opened)
        loaded = failing is None or failing[0] in schedule.loading
        if loaded:
            ghost.check(opened, schedule.encoders, self._what_counts(opened, schedule))
        settled = self._call(opened, TAKE_BATCH, closing)
        if failing is None or loaded:
            settled = self._complete(settled, failing, closing)
        else:
            settled = self._rewind(settled, failing, closing)
        if len(settled.batch.commands):
            self.notes["goal", "merge"] += len(opened.batch.merges) > 0
            ghost.execute(settled.batch.commands)
            ghost.check(settled, schedule.encoders, self._what_counts(settled, schedule))
            settled = self._call(settled, TAKE_BATCH, closing)
        return closed(settled)

    def _counted_at(self, start: State) -> Counted:
        """What the state counts on whose edges are tried."""
        known, counted = self._start
        if known is not start or counted is None:
            self._schedule.assume(start)
            counted = self._what_counts(start, self._schedule)
            self._start = (start, counted)
        return counted

    def _what_counts(self, state: State, schedule: Schedule) -> Counted:
        """What a state counts on; found out once where it depends on nothing else."""
        ghost = self._ghost
        if self._encodes or schedule.loading:
            return ghost.counted(state, schedule.encoders)
        met = self.judge.digest(state).whole
        counted = self._counted.get(met)
        if counted is None:
            counted = ghost.counted(state, schedule.encoders)
            self._counted.put(met, counted)
        return counted

    def _call(self, state: State, call: Call, closing: list[Step]) -> State:
        """Make a call that closes an edge; the state after it."""
        step = self.judge.perform(state, call)
        closing.append(step)
        after: State = step.outcome.state
        return after

    def _complete(self, state: State, failing: Failing, closing: list[Step]) -> State:
        """Finish every operation, in the order of their numbers."""
        for number, operation in sorted(state.operations.items()):
            done = failing is None or operation.first_token < failing[1]
            state = self._call(state, Call("complete_operation", (number, done)), closing)
            follow(self._schedule, closing[-1])
            self._ghost.complete(number, done)
            self.judge.ask(self._schedule.check, state)
        return state

    def _rewind(self, state: State, failing: tuple[str, int], closing: list[Step]) -> State:
        """Take back what a failed load left, of all requests that count it."""
        names, count = [failing[0]], failing[1]
        while True:
            reached = self._call(state, Call("rewind", (list(names), count)), closing)
            value = closing[-1].outcome.value
            if not isinstance(value, Misuse):
                schedule = Schedule()
                schedule.assume(state)
                follow(schedule, closing[-1])
                schedule.check(reached)
                return reached
            assert value.error == "HeldByOthers", value
            names += value.fields["requests"]  # type: ignore[arg-type] # an object


def closed(state: State) -> State:
    """A state whose batch is taken and empty, its events and statistics drained."""
    return State(
        state.config,
        state.device,
        state.host,
        state.requests,
        state.rows,
        state.free_rows,
        OpenBatch(0),
        pvector(),
        PrefixCacheStats(),
        (pvector(),) * len(state.new_blocks),
        state.operations,
        state.next_operation,
        state.unfinished,
    )


def proceed(script: object, step: Step) -> Call | None:
    """The next call of a script that hears of the last one; None at its end."""
    try:
        call: Call = script.send(step.outcome)  # type: ignore[attr-defined] # a generator
    except StopIteration:
        return None
    return call


def failures(steps: Steps) -> Iterator[tuple[str, int]]:
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
    return evolve(write, failed=failing[1])
