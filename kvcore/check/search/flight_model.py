# SPDX-License-Identifier: Apache-2.0
"""The core as a model with batches in flight: taking and executing are edges of their own.

An edge is one of: a batch that is filled by some moves and taken, or moves that schedule nothing;
the execution of the oldest batch that is not executed; the completion of the oldest one; a cancel
of any unfinished one, executed or not; the end of an operation, done or failed, once its batch is
executed or cancelled. What a forward pass reads is checked when it is executed. In every node, when
all taken batches are executed on a copy, everything that the state counts on must be there; and
what a batch in flight uses must not be free (CMD-INFLIGHT). A cancel drops commands that were not
executed, so nothing is concluded from those that tell the owners of blocks. An external load can
fail when its batch is executed; a request that can reports it at any moment before the batch
completes. Until then, or until no request is left that can, the state may count on what the load
spoilt (LOAD-FAILED).
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
from msgspec.structs import replace

from kvcore.check.names.canonical import canonical, fingerprint
from kvcore.check.names.forgotten import forget_overwritten
from kvcore.check.names.in_flight import (
    OF_OWNERS,
    Node,
    Pending,
    Unreported,
    check_fall,
    live,
    name_of,
    still_loading,
    taken,
    unused_wait,
)
from kvcore.check.properties.checker import note_state
from kvcore.check.properties.outcomes import check_events
from kvcore.check.search.core_model import TAKE_BATCH, CoreModel, Steps, follow
from kvcore.check.world.ghost import Ghost
from kvcore.check.world.model import CheckedCall, Edge
from kvcore.check.world.world import drained
from kvcore.oracle.schedule import Failing, Write, failed
from kvcore.state.state import RequestState, State, make_state
from kvcore.trace.calls import Call, Misuse
from kvcore.types.commands import Command, Load, Store
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Outcome

LEAVING = ("free", "remove_request")
Sampled = tuple[int, ...]
"""The tokens that a pass adds to the text of a request: accepted drafts, and one more."""
Ending = tuple[Failing, tuple[Sampled, ...]]
"""The end of a batch: the load that fails, and what each of its writes samples."""
Texts = Mapping[str, tuple[int, ...]]
NOTHING: Texts = {}


class FlightModel(CoreModel):
    """The nodes of a world with batches in flight."""

    def start(self) -> Any:
        """Return the empty state, with nothing in flight."""
        return Node(make_state(self.world.config))

    def edges(self, node: Any) -> Iterator[Edge]:
        """Yield everything that can happen next."""
        state = node.state
        full = self._is_full(node)
        if node.filled and not full:
            yield from self._guarded("take", (), partial(self._fill, node, (), full))
        if not node.filled:
            for name, steps in self._paths(state):
                yield from self._guarded(name, steps, partial(self._fill, node, steps, full))
        for ending in self._endings(node) if node.waiting else ():
            yield from self._guarded("execute", (), partial(self._execute, node, ending))
        for each in node.unreported:
            for name in reporters(state, *each):
                report = partial(self._report_load, node, each, name)
                yield from self._guarded("report", (), report)
        first = node.pending[0].number if node.pending and node.pending[0].executed else None
        if first is not None and all(number > first for number, _, _ in node.unreported):
            yield from self._guarded("complete", (), partial(self._complete_batch, node))
        for batch in node.pending if self.world.config.max_in_flight else ():
            yield from self._guarded("cancel", (), partial(self._cancel, node, batch.number))
        waiting = {batch.number for batch in node.waiting}
        for number, operation in sorted(state.operations.items()):
            if operation.batch in waiting or operation.batch == state.batch.number:
                continue
            for done in (True, False) if number in node.started else (False,):
                end = partial(self._end_operation, node, number, done)
                yield from self._guarded("done" if done else "failed", (), end)

    def name(self, node: Any) -> bytes:
        """Return the canonical name of a node, or 128 bits of it."""
        more = partial(name_of, node, folds=self.world.forgets_overwritten)
        name = canonical(node.state, self.prefixes, self.symmetry, more)
        return name if self._full_keys else fingerprint(name)

    def check(self, node: Any) -> None:
        """Check a new node: its state, its free blocks, and memory when everything is executed."""
        state = node.state
        self.checker.check(state)
        self.checker.check_runs(state)
        note_state(self.notes, state)
        self.notes["goal", "quarantine"] += state.device.num_quarantined > 0
        if state.config.max_in_flight and self.checker.counts("CMD-INFLIGHT"):
            for detail in unused_wait(node):
                raise InvariantViolation("CMD-INFLIGHT", detail)
        ghost = self._ghost
        node.recall(ghost)
        for batch in node.waiting:
            ghost.epoch = batch.epoch
            ghost.apply(in_flight(batch.commands))
            self._forward(batch.requests, batch.writes, feeds=batch.feeds)
        ghost.epoch = state.epoch
        ghost.apply(in_flight(state.batch.commands))
        self._forward(state.requests, node.writes)
        counted = ghost.counted(state, {})
        ghost.owned, ghost.cached = set(counted.owned), set(counted.cached)
        if not node.unreported:
            ghost.check(state, {}, counted)

    def pack(self, node: Any) -> bytes:
        """Return the node as bytes, with contents named by their prefixes, without the
        configuration, which belongs to the world.
        """
        path = self.prefixes.path
        contents = {
            place: [(path(each[0]), each[1]) if each and each[0] > 0 else each for each in slots]
            for place, slots in node.contents.items()
        }
        packed = attrs.evolve(node, contents={}, state=replace(node.state, config=None))
        return pickle.dumps((contents, packed), pickle.HIGHEST_PROTOCOL)

    def unpack(self, data: bytes) -> Any:
        """Return the node of these bytes."""
        contents, node = pickle.loads(data)
        number = self.prefixes.number
        numbered = {
            place: tuple(
                (number(each[0])[-1], each[1]) if each and isinstance(each[0], tuple) else each
                for each in slots
            )
            for place, slots in contents.items()
        }
        state = replace(node.state, config=self.world.config)
        return attrs.evolve(node, contents=numbered, state=state)

    def _guarded(self, name: str, steps: Steps, make: Any) -> Iterator[Edge]:
        """Yield the edge that `make` returns; none if it breaks a property that is not checked."""
        closing = list(steps)
        after = self.checker.run_guarded(closing, lambda: make(closing))
        if after is not None:
            yield Edge(name, tuple(closing), after)

    def _fill(self, node: Node, steps: Steps, full: bool, closing: list[CheckedCall]) -> Node:
        """Let some moves fill the open batch, and take it if it is not empty and there is room."""
        start = node.state
        opened = steps[-1].outcome.state if steps else start
        schedule = self._schedule_at(node)
        for step in steps:
            follow(schedule, step)
            node = self._without(node, step)
        self.checker.run_check(schedule.check, opened)
        if steps:
            self.checker.run_check(schedule.check_caps, opened)
            self.checker.check_batch(start, opened)
        filled = attrs.evolve(
            node,
            before=schedule.scheduled(),
            writes=schedule.writes(),
            loading=dict(schedule.loading),
            failed=dict(schedule.failed),
            filled=steps == () or fills(start, opened),
            unreported=_reportable(node.unreported, opened),
        )
        if full or not filled.filled:
            return self._closed(filled, opened, start)
        batch = taken(opened, schedule)
        settled = self._call(opened, TAKE_BATCH, closing)
        self.notes["goal", "merge"] += len(settled.batch.commands) > 0
        waiting = attrs.evolve(
            filled, pending=(*filled.pending, batch), before={}, writes=(), filled=False
        )
        return self._closed(waiting, settled, start)

    def _is_full(self, node: Node) -> bool:
        """Return whether no other batch can be taken."""
        return len(node.state.in_flight) >= self.world.config.max_in_flight

    def _endings(self, node: Node) -> Iterator[Ending]:
        """Yield the ways in which the oldest waiting batch can end: the load that fails."""
        yield None, ()
        batch = node.waiting[0]
        for write in batch.writes if self.world.loads_fail else ():
            for first in range(write.start, write.loaded):
                yield (write.request_id, first), ()

    def _forward(
        self,
        requests: Mapping[str, RequestState],
        writes: Sequence[Write],
        sampled: Sequence[Sampled] = (),
        feeds: Texts = NOTHING,
    ) -> None:
        """Play the forward pass of a batch on the ghost. requests: as taken."""
        del sampled, feeds  # all tokens are known
        self.checker.run_check(self._ghost.compute, requests, writes, {})

    def _execute(self, node: Node, ending: Ending, closing: list[CheckedCall]) -> Node:
        """Run the oldest batch that waits: its commands, then its forward pass."""
        (failing, sampled), batch, ghost = ending, node.waiting[0], self._ghost
        closing.append(executed(node.state, batch.number))
        node.recall(ghost)
        ghost.epoch = batch.epoch
        ghost.apply(in_flight(batch.commands))
        writes = [failed(write, failing) for write in batch.writes]
        self._forward(batch.requests, writes, sampled)
        unreported: tuple[Unreported, ...] = ()
        if failing is not None:
            unreported = ((batch.number, batch.requests[failing[0]].row, failing[1]),)
        pending = tuple(
            attrs.evolve(each, executed=True, commands=(), writes=(), requests={})
            if each.number == batch.number
            else each
            for each in node.pending
        )
        started = node.started | {
            command.operation for command in batch.commands if isinstance(command, Load | Store)
        }
        after = attrs.evolve(in_memory(node, ghost), pending=pending, started=started)
        after = attrs.evolve(
            after, unreported=_reportable(node.unreported + unreported, node.state)
        )
        return self._closed(after, node.state)

    def _report_load(
        self, node: Node, failure: Unreported, name: str, closing: list[CheckedCall]
    ) -> Node:
        """Report that an external load failed. Raises InvariantViolation (LOAD-FAILED)."""
        start, schedule = node.state, self._schedule_at(node)
        after = self._call(start, Call("rewind", ([name], failure[2])), closing)
        value = closing[-1].outcome.value
        if isinstance(value, Misuse):
            raise InvariantViolation("LOAD-FAILED", f"the report is refused: {value}")
        self.notes["goal", "reached"] += len(value) > 1
        follow(schedule, closing[-1])
        self.checker.run_check(schedule.check, after)
        reported = attrs.evolve(
            node,
            before=schedule.scheduled(),
            writes=schedule.writes(),
            filled=node.filled or fills(start, after),
            unreported=tuple(each for each in node.unreported if each != failure),
        )
        return self._closed(reported, after, start)

    def _complete_batch(self, node: Node, closing: list[CheckedCall]) -> Node:
        """Complete the oldest batch."""
        start, schedule = node.state, self._schedule_at(node)
        after = self._call(start, Call("complete", (node.pending[0].number,)), closing)
        self.notes["goal", "merge"] += len(after.batch.commands) > len(start.batch.commands)
        self.checker.run_check(schedule.check, after)
        return self._closed(attrs.evolve(node, pending=node.pending[1:]), after, start)

    def _cancel(self, node: Node, number: int, closing: list[CheckedCall]) -> Node:
        """Take back a batch and all later ones; unexecuted ones never run."""
        start = node.state
        after = self._call(start, Call("cancel", (number,)), closing)
        gone = [batch for batch in node.pending if batch.number >= number]
        counts = [*(batch.before for batch in gone), node.before]
        self.checker.run_check(check_fall, counts, after)
        self.notes["goal", "cancel"] += 1
        kept = attrs.evolve(
            node,
            pending=tuple(batch for batch in node.pending if batch.number < number),
            before={},
            writes=(),
            filled=False,
            unreported=tuple(each for each in node.unreported if each[0] < number),
            loading=still_loading(node.loading, after),
            failed=still_loading(node.failed, after),
        )
        return self._closed(kept, after, start)

    def _end_operation(
        self, node: Node, number: int, done: bool, closing: list[CheckedCall]
    ) -> Node:
        """Complete an operation, or let it fail."""
        start, ghost, schedule = node.state, self._ghost, self._schedule_at(node)
        after = self._call(start, Call("complete_operation", (number, done)), closing)
        follow(schedule, closing[-1])
        self.checker.run_check(schedule.check, after)
        node.recall(ghost)
        ghost.complete(number, done)
        settled = attrs.evolve(
            in_memory(node, ghost), loading=dict(schedule.loading), failed=dict(schedule.failed)
        )
        return self._closed(settled, after, start)

    def _schedule_at(self, node: Node) -> Any:
        """Return the schedule as it is known in a node."""
        schedule = self._schedule
        schedule.assume(node.state)
        schedule.loading, schedule.failed = dict(node.loading), dict(node.failed)
        schedule.resume(node.before, node.writes)
        return schedule

    def _closed(self, node: Node, state: State, start: State | None = None) -> Node:
        """Return the node with drained events, without anything that is never read any more."""
        if start is not None and state.config.enable_events:
            self.checker.run_check(check_events, start, state.events, state)
        ghost = self._ghost
        ghost.loading = dict(node.loading)
        reached = attrs.evolve(node, state=drained(state))
        counted = ghost.counted(reached.state, {})
        kept = attrs.evolve(reached, contents=live(reached, counted.contents))
        return forget_overwritten(kept) if self.world.forgets_overwritten else kept

    def _without(self, node: Node, step: CheckedCall) -> Node:
        """Return the node after a step; what is in flight forgets a removed request."""
        if step.call.name not in LEAVING or isinstance(step.outcome.value, Misuse):
            return node
        name = step.call.args[0]
        known = any(name in batch.before for batch in node.pending)
        self.notes["goal", "abort in flight"] += known
        if not known or step.call.name != "remove_request":
            return node
        return attrs.evolve(node, pending=tuple(forgotten(batch, name) for batch in node.pending))


def reporters(state: State, number: int, row: int, first: int) -> list[str]:
    """Return the requests that can report the failed load of a batch, the loading one first."""
    found, loader = [], state.rows[row]
    for load in state.loads:
        reports = loader is None or load.reporters[0].request_id == loader
        if reports and load.batch == number and load.first <= first < load.end:
            found += [each.request_id for each in load.reporters if each.most > first]
    return found


def _reportable(unreported: Iterable[Unreported], state: State) -> tuple[Unreported, ...]:
    """Return the failures that some request can still report; nothing may be left of the others."""
    return tuple(each for each in unreported if reporters(state, *each))


def forgotten(batch: Pending, request_id: str) -> Pending:
    """Return a batch without its records of a request."""
    before = {name: count for name, count in batch.before.items() if name != request_id}
    return attrs.evolve(batch, before=before)


def in_flight(commands: Iterable[Command]) -> list[Command]:
    """Return commands without those that change only the owners of blocks."""
    return [command for command in commands if not isinstance(command, OF_OWNERS)]


def in_memory(node: Node, ghost: Ghost) -> Node:
    """Return the node with the contents that a ghost holds."""
    tables = {place: table for place, table in ghost.tables.items() if table}
    return attrs.evolve(node, contents=dict(ghost.contents), tables=tables, loads=dict(ghost.loads))


def executed(state: State, number: int) -> CheckedCall:
    """Return the step in which the runtime executes a batch; it changes no state."""
    return CheckedCall(state, Call("execute", (number,)), Outcome(state, (), None))


def fills(start: State, opened: State) -> bool:
    """Return whether moves have put anything into the open batch."""
    batch = opened.batch
    more = len(batch.commands) > len(start.batch.commands)
    return more or any(batch.scheduled) or len(batch.merges) > 0 or len(batch.entries) > 0
