# SPDX-License-Identifier: Apache-2.0
"""What must hold of a client and its tier in each node, and what each node must be able to become.

The runs are made on a copy, without any fault but those of the node: first the tier never answers
again, and each request must end; then it answers what is left, and nothing may be held; then a page
that is damaged, or is believed to be there and is not, must become right by being used.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

from kvcore.check.far.engine import Ended, FarNode, FarRun
from kvcore.check.far.naming import epoch_of
from kvcore.check.far.tier import encoded, key_in, place_of, wanted_in
from kvcore.check.world.model import CheckedCall
from kvcore.check.world.world import by_row
from kvcore.far import page
from kvcore.far.pending import PendingTransfer
from kvcore.far.tier import FarStatus, View
from kvcore.oracle.prefixes import Prefixes, in_epoch
from kvcore.state.state import State
from kvcore.trace.calls import Call, perform
from kvcore.types.commands import Command, Load, Store
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Outcome, Request, Status

RunCheck = Callable[..., None]
ROUNDS = 12
"""More steps than all requests of a world need to end."""


def step_of(state: State, name: str, args: tuple[Any, ...] = ()) -> CheckedCall:
    """Return the step of a move that is no call of the core."""
    return CheckedCall(state, Call(name, args), Outcome(state, (), None))


def check_far(run: FarRun, prefixes: Prefixes, run_check: RunCheck) -> None:
    """Check a node. Raises InvariantViolation (STAGING, LEASE, FAR-KV)."""
    run_check(_staging, run)
    run_check(_leases, run)
    run_check(_pages, run, prefixes)


def _staging(run: FarRun) -> None:
    try:
        run.client.check()
    except AssertionError as error:
        raise InvariantViolation("STAGING", str(error)) from None


def _leases(run: FarRun) -> None:
    fetches = run.client._fetches._fetches
    left = [name for name in fetches if name not in run.engine.sequences]
    if left:
        raise InvariantViolation("LEASE", f"the fetch of {left[0]!r} outlives its request")
    pending = {each.ticket for each in run.tier.pending}
    if run.client._link._tickets.keys() != pending:
        raise InvariantViolation("LEASE", "the client knows other tickets than the tier")


def _pages(run: FarRun, prefixes: Prefixes) -> None:
    """Compare every page that is verified or sealed with what its name stands for."""
    fetches, stores = run.client._fetches, run.client._stores
    views = run.slots.views
    held = [
        (n, views[slot]) for each in fetches._fetches.values() for n, slot in each.pages.items()
    ]
    held += [
        (each.name, views[each.slot]) for each in fetches._loads.values() if each.slot is not None
    ]
    held += [(each.name, views[each.slot]) for each in stores._copied]
    held += [pair for each in run.tier.pending if each.operation == "store" for pair in pages(each)]
    held += [
        (name, bytearray(each)) for name, each in run.tier.entries.items() if is_right(name, each)
    ]
    for name, view in held:
        payload = bytes(view[page.PAYLOAD_START :])
        wanted = wanted_in(prefixes, name, epoch_of(name))
        if payload != wanted:
            detail = f"a page holds {payload.hex()}, its name stands for {wanted.hex()}"
            raise InvariantViolation("FAR-KV", detail)


def pages(transfer: PendingTransfer) -> Iterable[tuple[str, View]]:
    """Return the names of a ticket, and their slots."""
    return zip(transfer.names, transfer.views, strict=True)


def is_right(name: str, held: bytes) -> bool:
    """Return whether an entry is one that a fetch accepts."""
    return page.check_page(bytearray(held), name, len(held)) is FarStatus.OK


def check_runs(prefixes: Prefixes, node: FarNode, run_check: RunCheck) -> None:
    """Check what a node can become. Raises InvariantViolation (NEVER-STUCK, LEASE, HEAL)."""
    run: FarRun = pickle.loads(node.far)
    run.wake(node.state, unchecked)
    rest = Rest(prefixes, run)
    rest.finish_batches(node)
    run_check(rest.end_all)
    run_check(rest.give_back_all)
    run_check(rest.heal)


def unchecked(state: State, call: Call) -> CheckedCall:
    """Make a call, without checks."""
    return CheckedCall(state, call, perform(state, call))


class Rest:
    """A run that goes on without faults. answers: whether the tier answers."""

    def __init__(self, prefixes: Prefixes, run: FarRun) -> None:
        self._prefixes = prefixes
        self._run = run
        self._answers = False

    def finish_batches(self, node: FarNode) -> None:
        """Execute and complete what is in flight."""
        for batch in node.pending:
            self._play(batch.commands)
            self._run.manager.complete(batch.number)

    def end_all(self) -> None:
        """Let all requests end while the tier is silent."""
        self._go()
        if self._run.engine.sequences:
            left = sorted(self._run.engine.sequences)
            raise InvariantViolation("NEVER-STUCK", f"requests {left} never end without the tier")

    def give_back_all(self) -> None:
        """Let the tier answer what is left; then nothing may be held."""
        run, self._answers = self._run, True
        self._go()
        held = sorted(run.slots.used)
        if held or run.client._link._tickets or run.manager.state.operations:
            raise InvariantViolation("LEASE", f"slots {held} are held, and nothing uses them")

    def heal(self) -> None:
        """Use each page of these weights that is believed or damaged, until it is right."""
        run, manager = self._run, self._run.manager
        if not run.client.is_up:
            return
        place = place_of(manager.epoch)
        run.client._link.set_place(place)
        names = {*run.client._fetches._known._names, *run.tier.entries}
        prefixes = self._prefixes
        room = manager.config.num_usable_blocks * manager.config.block_alignment
        for name in sorted(names, key=lambda each: len(prefixes.tokens(key_in(each)))):
            tokens = [*prefixes.tokens(key_in(name)), 0]
            if name != place.name(key_in(name)) or len(tokens) > room:
                continue
            for _ in tokens:
                if name in run.tier.entries and is_right(name, run.tier.entries[name]):
                    break
                manager.reset_prefix_cache()
                manager.add_request(Request("heals", tokens))
                run.ask("heals")
                self._go()
            else:
                detail = f"the page of {tokens[:-1]} is not right after {len(tokens)} uses"
                raise InvariantViolation("HEAL", detail)

    def _go(self) -> None:
        """Take steps until all requests have ended, and nothing is under way."""
        run, manager = self._run, self._run.manager
        for _ in range(ROUNDS):
            for each in list(run.tier.pending) if self._answers else ():
                run.tier.answer(each)
            for number, ticket in list(run.client._link._tickets.items()):
                if not self._answers and not ticket.is_given_up:
                    run.late(number)
            run.poll()
            self._schedule()
            batch = manager.take_batch()
            self._play(tuple(batch))
            if manager.config.max_in_flight:
                manager.complete(batch.number)
            run.poll()
            is_pending = bool(self._answers and run.tier.pending)
            if not (run.engine.sequences or is_pending or manager.state.operations):
                return

    def _schedule(self) -> None:
        """Let each request go on; the last one gives way if none can."""
        run, manager = self._run, self._run.manager
        start = manager.state
        for request in by_row(start):
            name, sequence = request.request_id, run.engine.sequences[request.request_id]
            if manager.state.batch.scheduled[request.row] is not None or sequence.is_loading:
                continue
            if request.status is Status.WAITING:
                if not run.client.is_fetching(sequence):
                    run.begin(name)
            elif request.num_computed < len(request.tokens):
                run.resume(name)
            else:
                run.leave(name, answered=True)
        running = run.engine.running
        if manager.state is start and len(running) > 1:
            manager.free(running[-1].sequence_id)

    def _play(self, commands: tuple[Command, ...]) -> None:
        """Copy to and from the slots, as a batch does."""
        run = self._run
        for each in commands:
            if isinstance(each, Store):
                prefix = in_epoch(self._prefixes.chain(each.key), run.manager.epoch)
                done = run.slots.store(each.key, encoded(prefix))
                run.engine.finished.append(Ended(each.operation, done))
            elif isinstance(each, Load):
                done = run.slots.load(each.key) is not None
                run.engine.finished.append(Ended(each.operation, done))
