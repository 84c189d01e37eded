# SPDX-License-Identifier: Apache-2.0
"""A world with a far tier: the core, the client of kvcore/far, and an adversary that answers it.

An edge is a move of the engine (a request is added and asked for, begins, goes on, decodes, gives
way, ends, is aborted; a batch runs; the weights change), or of the tier (a ticket is answered,
rightly or with one fault; is late; an entry is damaged or lost; the tier is killed). The client
hears of it at once. A batch in flight is taken, executed, completed or cancelled as in
`FlightModel`, whose checks all hold here as well. Faults are counted down in the node.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import attrs

from kvcore.check.far.engine import Ended, FarNode, FarRun
from kvcore.check.far.naming import name_of_far
from kvcore.check.far.runs import check_far, check_runs, step_of
from kvcore.check.far.tier import FAULTS, contents_of, encoded, payload_of, place_of
from kvcore.check.names.canonical import canonical, fingerprint
from kvcore.check.names.in_flight import name_of
from kvcore.check.search.actions import fresh_name
from kvcore.check.search.core_model import follow
from kvcore.check.search.flight_model import FlightModel, fills
from kvcore.check.world.ghost import Ghost
from kvcore.check.world.model import CheckedCall, Edge
from kvcore.check.world.world import Far, Symmetry, World, by_row
from kvcore.far import page
from kvcore.oracle.contents import SPOILT, TierBlock
from kvcore.oracle.prefixes import in_epoch
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, perform
from kvcore.transitions import TRANSITIONS, queries
from kvcore.types.commands import Command, Load, Store
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Request, Status

Act = Callable[[FarRun], object]
Tried = tuple[str, tuple[Any, ...], Any]
"""The name of a move, its arguments in a story, and what it does (`Act`)."""


FILLING = ("begin", "resume", "decode")
"""Moves that put something into the open batch; a world says how many of them it may have."""
OF_TIER = ("answer", "late", "damage", "evict", "kill", "weigh")
"""Moves that a story tells, since no call of the core does."""
RUNS = ("NEVER-STUCK", "LEASE", "HEAL", "NOCRASH")
"""Properties of what a node can become."""


class FarGhost(Ghost):
    """A ghost whose stores and loads copy to and from slots while a batch is executed. far: the
    slots' owner then.
    """

    far: FarRun | None = None

    def copy(self, command: Command) -> None:
        """See `SlotStore`."""
        super().copy(command)
        if self.far is None or not isinstance(command, Store | Load):
            return
        if isinstance(command, Store):
            held = self.get(("device", command.block))
            done = self.far.slots.store(command.key, payload_of(self.prefixes, held))
        else:
            payload = self.far.slots.load(command.key)
            done = payload is not None
            size = self.sizes[0]
            held = (
                (SPOILT,) * size if payload is None else contents_of(self.prefixes, payload, size)
            )
            del self.loads[command.operation]
            self.put([("device", command.block)], 0, 0, held)
        self.far.engine.finished.append(Ended(command.operation, done))


class FarModel(FlightModel):
    """The nodes of a world with a far tier. Tokens are not renamed: pages name them."""

    def __init__(self, world: World, *, symmetry: Symmetry | None = None, **options: Any) -> None:
        symmetry = attrs.evolve(symmetry or Symmetry(), tokens=False)
        super().__init__(world, symmetry=symmetry, **options)
        assert world.far is not None
        self.limits: Far = world.far
        self._last: tuple[bytes, Any] = (b"", None)
        self._ghost: FarGhost = FarGhost(world.config, self.checker.counts, self.prefixes)

    def start(self) -> Any:
        """Return the empty state, with the entries that the tier has at first."""
        state = make_state(self.world.config)
        limits = self.limits
        run = FarRun(state, limits.num_slots, limits.num_tickets, self.checker.perform)
        if self.limits.stored:
            tokens = [*self.limits.stored, 0]
            known = perform(state, Call("add_request", (Request("0", tokens),))).state
            self.prefixes.learn(known)
            place = place_of(state.epoch)
            for key in queries.get_block_keys(known, "0")[0][: len(self.limits.stored)]:
                slot = bytearray(run.slots.views[0])
                page.begin_page(slot, place.identity, key)
                slot[page.PAYLOAD_START :] = encoded(self.prefixes.chain(key))
                page.seal_page(slot)
                run.tier.entries[place.name(key)] = bytes(slot)
        return FarNode(state, far=pickle.dumps(run), num_faults=self.limits.num_faults)

    def edges(self, node: Any) -> Iterator[Edge]:
        """Yield everything that can happen next."""
        for name, args, act in (*self._engine_moves(node), *self._answers(node)):
            yield from self._guarded(name, (), partial(self._act, node, name, args, act, 0))
        for name, args, act in self._faults(node) if node.num_faults else ():
            yield from self._guarded(name, (), partial(self._act, node, name, args, act, 1))
        if self.world.config.max_in_flight:
            yield from self._batches(node)
        elif node.filled:
            yield from self._guarded("run", (), partial(self._run, node))

    def name(self, node: Any) -> bytes:
        """Return the canonical name of a node, or 128 bits of it."""
        run = self._seen(node)

        def more(names: Any) -> list[int]:
            return [
                *name_of(node, names),
                node.num_faults,
                node.num_moves,
                *name_of_far(run, names),
            ]

        name = canonical(node.state, self.prefixes, self.symmetry, more)
        return name if self._full_keys else fingerprint(name)

    def check(self, node: Any) -> None:
        """Check a new node, and what its requests and pages can still become."""
        super().check(node)
        run = self._seen(node)
        check_far(run, self.prefixes, self.checker.run_check)
        if any(map(self.checker.counts, RUNS)):
            check_runs(self.prefixes, node, self.checker.run_check)

    def wanted(self, key: bytes, epoch: int) -> bytes:
        """Return the payload of a key's page."""
        return encoded(in_epoch(self.prefixes.chain(key), epoch))

    def _engine_moves(self, node: Any) -> Iterator[Tried]:
        """Yield the moves of the engine."""
        state, world, run = node.state, self.world, self._seen(node)
        if len(state.requests) < world.num_requests:
            fresh = fresh_name(world, state)
            for tokens in product(range(world.num_letters), repeat=world.num_prompt):
                yield "ask", (fresh, tokens), partial(add, name=fresh, tokens=tokens)
        for request in by_row(state):
            name, sequence = request.request_id, run.engine.sequences[request.request_id]
            scheduled = state.batch.scheduled[request.row] is not None
            left = len(request.tokens) - request.num_computed
            may_fill = node.num_moves < world.moves_per_batch
            if request.status is Status.WAITING:
                if may_fill and not run.client.is_fetching(sequence):
                    yield "begin", (name,), partial(begin, self, name=name)
            elif not sequence.is_loading and not scheduled and not self._is_used(node, name):
                if left and may_fill:
                    yield "resume", (name,), partial(FarRun.resume, name=name)
                elif not left:
                    yield "finish", (name,), partial(FarRun.leave, name=name, answered=True)
                    yield "preempt", (name,), lambda run, name=name: run.manager.free(name)
                    if may_fill and len(request.tokens) < world.num_tokens:
                        yield "decode", (name,), partial(decode, name=name)
            yield "abort", (name,), partial(FarRun.leave, name=name, answered=False)
        is_idle = not node.filled and not node.pending
        if is_idle and state.epoch < self.limits.num_epochs:
            yield "advance", (), lambda run: run.manager.advance_epoch()
        if run.client._link.place is None:
            yield "weigh", (), set_weights

    def _answers(self, node: Any) -> Iterator[Tried]:
        """Yield the right answer of each ticket."""
        for at, each in enumerate(self._seen(node).tier.pending):
            yield "answer", (each.operation, at), partial(answer, at=at)

    def _faults(self, node: Any) -> Iterator[Tried]:
        """Yield everything that can go wrong with the tier."""
        run = self._seen(node)
        given_up = {n for n, each in run.client._link._tickets.items() if each.is_given_up}
        for at, each in enumerate(run.tier.pending):
            for place in range(len(each.names)):
                for fault in FAULTS[each.operation]:
                    args = (each.operation, at, fault, place)
                    yield "answer", args, partial(answer, at=at, fault=fault, place=place)
            if each.ticket not in given_up:
                yield "late", (each.operation, at), partial(FarRun.late, number=each.ticket)
        for at, name in enumerate(sorted(run.tier.entries)):
            yield "damage", (at,), lambda run, name=name: run.tier.damage(name)
            yield "evict", (at,), lambda run, name=name: run.tier.remove([name])
        if run.tier.entries or run.tier.pending:
            yield "kill", (), kill

    def _batches(self, node: Any) -> Iterator[Edge]:
        """Yield what happens to batches in flight."""
        if node.filled and not self._is_full(node):
            fresh = attrs.evolve(node, num_moves=0)
            yield from self._guarded("take", (), partial(self._fill, fresh, (), False))
        for batch in node.pending:
            step = self._finish if batch.executed else self._execute_far
            name = "complete" if batch.executed else "execute"
            yield from self._guarded(name, (), partial(step, node))
            yield from self._guarded("cancel", (), partial(self._take_back, node, batch.number))

    def _is_used(self, node: Any, name: str) -> bool:
        """Return whether a batch in flight schedules a request, whose token is then to come."""
        return any(name in batch.before for batch in node.pending)

    def _awake(self, node: Any) -> FarRun:
        """Return the engine of a node, for the caller to change."""
        run: FarRun = pickle.loads(node.far)
        run.wake(node.state, self.checker.perform)
        return run

    def _seen(self, node: Any) -> FarRun:
        """Return the engine of a node, to be read only."""
        if self._last[0] is not node.far:
            self._last = (node.far, self._awake(node))
        run: FarRun = self._last[1]
        run.wake(node.state, self.checker.perform)
        return run

    def _act(
        self,
        node: Any,
        name: str,
        args: tuple[Any, ...],
        act: Act,
        num_faults: int,
        closing: list[CheckedCall],
    ) -> Any:
        """Make a move."""
        run = self._awake(node)
        if name in OF_TIER:
            closing.append(step_of(node.state, name, args))
        try:
            act(run)
        finally:
            closing += run.manager.steps
        left = attrs.evolve(
            node,
            num_faults=node.num_faults - num_faults,
            num_moves=node.num_moves + (name in FILLING),
        )
        return self._followed(left, run)

    def _followed(self, node: Any, run: FarRun) -> Any:
        """Return the node after the calls that a run has made."""
        start, opened = node.state, run.manager.state
        schedule = self._schedule_at(node)
        for step in run.manager.steps:
            if step.call.name in TRANSITIONS:
                follow(schedule, step)
                node = self._without(node, step)
        self.checker.run_check(schedule.check, opened)
        self.checker.run_check(schedule.check_caps, opened)
        after = attrs.evolve(
            node,
            before=schedule.scheduled(),
            writes=schedule.writes(),
            loading=dict(schedule.loading),
            failed=dict(schedule.failed),
            filled=node.filled or fills(start, opened),
            far=pickle.dumps(run, pickle.HIGHEST_PROTOCOL),
        )
        run.manager.steps.clear()
        self._last = (after.far, run)
        return self._closed(after, opened, start)

    def _closed(self, node: Any, state: State, start: State | None = None) -> Any:
        """See `FlightModel`; what a load has brought stays until it has ended, too."""
        after = super()._closed(node, state, start)
        kept = dict(after.contents)
        for number, operation in after.state.operations.items():
            place: TierBlock = ("device", operation.block)
            if number in after.started and place in node.contents:
                kept[place] = node.contents[place]
        return attrs.evolve(after, contents=kept)

    def _run(self, node: Any, closing: list[CheckedCall]) -> Any:
        """Take the open batch, execute it, and let the client hear of it."""
        taken = self._fill(attrs.evolve(node, num_moves=0), (), False, closing)
        run = self._awake(taken)
        executed = self._execute_with(run, taken, [])
        return self._heard(attrs.evolve(executed, pending=()), run, closing)

    def _is_full(self, node: Any) -> bool:
        return bool(self.world.config.max_in_flight) and super()._is_full(node)

    def _execute_far(self, node: Any, closing: list[CheckedCall]) -> Any:
        """Execute the oldest batch, with the slots of the client."""
        run = self._awake(node)
        after = self._execute_with(run, node, closing)
        return attrs.evolve(after, far=pickle.dumps(run))

    def _execute_with(self, run: FarRun, node: Any, closing: list[CheckedCall]) -> Any:
        """Execute the oldest batch, with the slots of a run."""
        self._ghost.far = run
        try:
            return self._execute(node, (None, ()), closing)
        finally:
            self._ghost.far = None

    def _finish(self, node: Any, closing: list[CheckedCall]) -> Any:
        """Complete the oldest batch, and let the client hear of it."""
        after = self._complete_batch(node, closing)
        return self._heard(after, self._awake(after), closing)

    def _heard(self, node: Any, run: FarRun, closing: list[CheckedCall]) -> Any:
        """Return the node after the client of a run has heard what has ended."""
        run.wake(node.state, self.checker.perform)
        try:
            run.poll()
        finally:
            closing += run.manager.steps
        return self._followed(node, run)

    def _take_back(self, node: Any, number: int, closing: list[CheckedCall]) -> Any:
        """Cancel a batch and the open one; the client gives up their stores and loads."""
        node = self._cancel(attrs.evolve(node, num_moves=0), number, closing)
        run = self._awake(node)
        for sequence in run.client.cancelled(number):
            sequence.is_loading = False
        run.poll()
        closing += run.manager.steps
        return self._followed(node, run)


def add(run: FarRun, name: str, tokens: tuple[int, ...]) -> None:
    """Add a request, and ask the tier for its pages."""
    run.manager.add_request(Request(name, list(tokens)))
    run.ask(name)


def begin(model: FarModel, run: FarRun, name: str) -> None:
    """Admit a request. Raises InvariantViolation (FAR-HINT)."""
    ready = run.client._fetches._fetches[name].pages
    held = {page_name: bytes(run.slots.views[slot]) for page_name, slot in ready.items()}
    first = run.manager.get_computed_blocks(name).num_tokens
    keys = run.manager.get_block_keys(name)[0]
    got = run.begin(name)
    place = run.client._link.place
    size = run.manager.config.block_alignment
    for key in keys[first // size : (first + got) // size]:
        holds = None if place is None else held.get(place.name(key))
        wanted = model.wanted(key, run.manager.epoch)
        if holds is None or holds[page.PAYLOAD_START :] != wanted:
            detail = f"request {name!r} loads {got} tokens after {first} without their pages"
            model.checker.run_check(fail, "FAR-HINT", detail)


def fail(name: str, detail: str) -> None:
    """Raise InvariantViolation."""
    raise InvariantViolation(name, detail)


def decode(run: FarRun, name: str) -> None:
    """Append a token, and schedule it."""
    run.manager.append([name], [0])


def answer(run: FarRun, at: int, fault: str = "", place: int = 0) -> None:
    """Answer a ticket; the client hears of it."""
    run.tier.answer(run.tier.pending[at], fault, place)
    run.poll()


def kill(run: FarRun) -> None:
    """Kill the tier and start it again."""
    run.tier.kill()
    run.poll()


def set_weights(run: FarRun) -> None:
    """Name the weights of the epoch."""
    run.client._link.set_place(place_of(run.manager.epoch))
