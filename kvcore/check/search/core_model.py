# SPDX-License-Identifier: Apache-2.0
"""The core as a model: every edge of a world in which a taken batch counts as executed.

The calls are the core's own; there is no second model. An edge is one step of an engine: one move,
or up to `moves_per_batch`, then `take_batch` until nothing is left to run. On every edge the
invariants are checked at each call, and so are the contents: starting from blocks that hold exactly
what a state counts on, the edge's commands and writes must produce everything that the next state
counts on. So the ghost adds no states. If loads fail, an edge that loads ends in every way it can:
the loader reports the failure at once, or after any one move, while the load is unconfirmed. If the
loader is gone, another request that counted its tokens reports it; if none is left, nothing may
depend on the load any more (LOAD-FAILED). An edge ends with its loads confirmed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from kvcore.check.names import packed
from kvcore.check.names.canonical import CanonicalNames
from kvcore.check.names.digest import Lately
from kvcore.check.properties.checker import Checker, Watch, note_state
from kvcore.check.properties.registry import Property
from kvcore.check.search.moves import moves
from kvcore.check.world.ghost import Counted, Ghost
from kvcore.check.world.model import CheckedCall, Edge
from kvcore.check.world.world import Move, Symmetry, World, closed, proceed, script_of
from kvcore.oracle.prefixes import Prefixes
from kvcore.oracle.schedule import Failing, Schedule, failed
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, Misuse
from kvcore.transitions.batches import take_batch
from kvcore.types.errors import InvariantViolation

COUNTED_KEPT = 1_500
TAKE_BATCH = Call("take_batch")
Steps = tuple[CheckedCall, ...]
Path = tuple[str, Steps]
"""The names of some moves, and their steps."""


class CoreModel:
    """The states of a world without batches in flight.

    properties: those that are checked, by default all; a step that breaks another one is left out.
    watch: called with each call, to compare another implementation.
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
        names = CanonicalNames(self.prefixes, self.symmetry, full=full_keys)
        self.checker = Checker(world, self.prefixes, names, properties, watch)
        self.notes = self.checker.notes
        self._ghost = Ghost(world.config, self.checker.counts, self.prefixes)
        self._schedule = Schedule()
        self._full_keys = full_keys
        self._start: tuple[State | None, Counted | None] = (None, None)
        self._counted: Lately[Counted] = Lately(COUNTED_KEPT)
        self._encodes = any(group.is_cross for group in world.config.groups)

    def start(self) -> State:
        """Return the empty state."""
        return make_state(self.world.config)

    def edges(self, node: State) -> Iterator[Edge]:
        """Yield every path, with every way in which its loads can end."""
        for name, steps in self._paths(node):
            for failing in (None, *(failures(steps) if self.world.loads_fail else ())):
                for late in (None, *self._late(steps, failing)):
                    edge = self._close(name, steps, failing, late)
                    if edge is not None:
                        yield edge

    def name(self, node: State) -> bytes:
        """Return the canonical name of a state, or 128 bits of it."""
        return self.checker.name(node)

    def check(self, node: State) -> None:
        """Check a new state, and note what it shows."""
        self.checker.check(node)
        self.checker.check_runs(node)
        note_state(self.notes, node)

    def pack(self, node: State) -> bytes:
        """Return a state as bytes."""
        return packed.pack(node)

    def unpack(self, data: bytes) -> State:
        """Return the state of these bytes."""
        return packed.unpack(self.world.config, data)

    def _paths(self, state: State) -> Iterator[Path]:
        """Yield every way to make one or more moves in a batch, the shorter ones first."""
        paths: list[Path] = [("", ())]
        for _ in range(self.world.moves_per_batch):
            longer: list[Path] = []
            for names, path in paths:
                before = path[-1].outcome.state if path else state
                for name, steps in self._moves(before, path):
                    longer.append((f"{names}, {name}" if names else name, steps))
                    yield longer[-1]
            paths = longer

    def _moves(self, state: State, path: Steps) -> Iterator[Path]:
        """Yield every move in a state that a path reached: its name, and the path with it."""
        for move in self._possible(state, path):
            if isinstance(move, Call):
                step = self.checker.step(path, state, move)
                if step is not None:
                    yield move.name, (*path, step)
                continue
            steps = self._scripted(move, state, path)
            if steps is not None:
                yield move.name, steps

    def _possible(self, state: State, path: Steps) -> list[Call | Move]:
        """Return the moves of a state after a path."""
        letters = not self.symmetry.tokens
        found = self.checker.run_guarded(
            path, lambda: list(moves(self.world, state, self.prefixes, every_letter=letters))
        )
        return found or []

    def _scripted(self, move: Move, state: State, path: Steps) -> Steps | None:
        """Return the path with the calls of a move; None if a step breaks what is not checked."""
        script = move.script()
        call = self.checker.run_guarded(path, lambda: next(script, None))
        while call is not None:
            step = self.checker.step(path, state, call)
            if step is None:
                return None
            path, state = (*path, step), step.outcome.state
            call = self.checker.run_guarded(path, partial(proceed, script, step.outcome))
        return path

    def _late(self, steps: Steps, failing: Failing) -> list[Call | Move]:
        """Return the moves that an engine can make before external tokens are reported as failed.

        Left out are a rewind, which may be the report, and loads and stores by key, which would not
        end in it.
        """
        opened = steps[-1].outcome.state
        if failing is None or opened.requests[failing[0]].num_loading:
            return []
        found = self._possible(take_batch(opened).state, steps)
        return [move for move in found if move.name not in ("rewind", "load", "store")]

    def _close(
        self, name: str, steps: Steps, failing: Failing, late: Call | Move | None
    ) -> Edge | None:
        """Take the batch that the calls filled, check it, and finish what it leaves."""
        start, opened = steps[0].before, steps[-1].outcome.state
        if opened is start:
            return Edge(name, steps, start)
        closing = list(steps)
        settled = self.checker.run_guarded(
            closing, lambda: self._settle(start, opened, closing, failing, late)
        )
        return None if settled is None else Edge(name, tuple(closing), settled)

    def _settle(
        self,
        start: State,
        opened: State,
        closing: list[CheckedCall],
        failing: Failing,
        late: Call | Move | None,
    ) -> State | None:
        checker, schedule, ghost = self.checker, self._schedule, self._ghost
        schedule.assume(start)
        ghost.assume(self._counted_at(start))
        ghost.loading, ghost.epoch = schedule.loading, opened.epoch
        for step in closing:
            follow(schedule, step)
        checker.run_check(schedule.check, opened)
        checker.run_check(schedule.check_caps, opened)
        ghost.apply(opened.batch.commands)
        writes = [failed(write, failing) for write in schedule.take()]
        more = (schedule.encoders, schedule.epochs)
        checker.run_check(ghost.compute, opened.requests, writes, *more)
        checker.check_batch(start, opened)
        loaded = failing is None or failing[0] in schedule.loading
        if loaded:
            ghost.check(opened, schedule.encoders, self._what_counts(opened, schedule))
        settled = self._call(opened, TAKE_BATCH, closing)
        keyed = len(opened.batch.ends) > 0 or self.world.config.has_tails
        if loaded and keyed and not len(settled.batch.commands):
            ghost.check(settled, schedule.encoders, self._what_counts(settled, schedule))
        merged = len(opened.batch.merges) > 0 and len(settled.batch.commands) > 0
        self.notes["goal", "merge"] += merged
        if failing is None or loaded:
            return self._drain(self._complete(settled, failing, closing), closing)
        reported = self._report(self._make(late, settled, closing), failing, closing)
        return self._drain(self._complete(reported, None, closing), closing, failed=True)

    def _drain(self, state: State, closing: list[CheckedCall], *, failed: bool = False) -> State:
        """Take batches until nothing is left to run and no load is unconfirmed.

        failed: whether a load failed; then what the state counts on is checked at least once.
        """
        ghost, schedule = self._ghost, self._schedule
        while failed or len(state.batch.commands) or any(state.batch.scheduled) or state.loads:
            failed = False
            ghost.apply(state.batch.commands)
            ghost.epoch, writes = state.epoch, schedule.take()
            more = (schedule.encoders, schedule.epochs)
            self.checker.run_check(ghost.compute, state.requests, writes, *more)
            ghost.check(state, schedule.encoders, self._what_counts(state, schedule))
            state = self._call(state, TAKE_BATCH, closing)
            if self.world.config.has_tails and not len(state.batch.commands):
                ghost.check(state, schedule.encoders, self._what_counts(state, schedule))
        return closed(state)

    def _counted_at(self, start: State) -> Counted:
        """Return the contents that the state whose edges are tried counts on."""
        known, counted = self._start
        if known is not start or counted is None:
            self._schedule.assume(start)
            counted = self._what_counts(start, self._schedule)
            self._start = (start, counted)
        return counted

    def _what_counts(self, state: State, schedule: Schedule) -> Counted:
        """Return what a state counts on, computed once if it depends on nothing else."""
        ghost = self._ghost
        if self._encodes or schedule.loading:
            return ghost.counted(state, schedule.encoders)
        digest = self.checker.digest(state).whole
        counted = self._counted.get(digest)
        if counted is None:
            counted = ghost.counted(state, schedule.encoders)
            self._counted.put(digest, counted)
        return counted

    def _call(self, state: State, call: Call, closing: list[CheckedCall]) -> State:
        """Make a call that closes an edge; return the state after it."""
        step = self.checker.perform(state, call)
        closing.append(step)
        after: State = step.outcome.state
        return after

    def _complete(self, state: State, failing: Failing, closing: list[CheckedCall]) -> State:
        """Finish every operation, in the order of their numbers."""
        for number, operation in sorted(state.operations.items()):
            done = failing is None or operation.first_token < failing[1]
            state = self._call(state, Call("complete_operation", (number, done)), closing)
            follow(self._schedule, closing[-1])
            self._ghost.complete(number, done)
            self.checker.run_check(self._schedule.check, state)
        return state

    def _make(self, late: Call | Move | None, state: State, closing: list[CheckedCall]) -> State:
        """Make one move in the next batch."""
        if late is None:
            return state
        script = script_of(late)
        call: Call | None = next(script, None)
        while call is not None:
            state = self._call(state, call, closing)
            follow(self._schedule, closing[-1])
            call = proceed(script, closing[-1].outcome)
        return state

    def _report(self, state: State, failing: tuple[str, int], closing: list[CheckedCall]) -> State:
        """Report that a load failed, unless no request is left that can.

        Raises InvariantViolation (LOAD-FAILED) if the report is refused.
        """
        name, count = failing
        reporters = [name] if name in state.requests else []
        for load in state.loads:
            reporters += [each.request_id for each in load.reporters if each.most > count]
        if not reporters:
            return state
        reached = self._call(state, Call("rewind", (reporters[:1], count)), closing)
        value = closing[-1].outcome.value
        if isinstance(value, Misuse):
            raise InvariantViolation("LOAD-FAILED", f"the report is refused: {value}")
        self.notes["goal", "reached"] += len(value) > 1
        follow(self._schedule, closing[-1])
        self.checker.run_check(self._schedule.check, reached)
        return reached


def failures(steps: Steps) -> Iterator[tuple[str, int]]:
    """Yield each request whose external tokens a path loads, with each token that may be the first
    to be missing: of the call itself, or of a block that an operation loads.
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


def follow(schedule: Schedule, step: CheckedCall) -> None:
    """Let a schedule follow a call, unless it was misuse."""
    call, value = step.call, step.outcome.value
    if not isinstance(value, Misuse):
        schedule.follow(step.before, call.name, call.args, call.options, value)
