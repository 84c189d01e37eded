# SPDX-License-Identifier: Apache-2.0
"""The engine of a world with a far tier: what the client of kvcore/far sees of it.

The client is the one that the runtime uses. Its manager makes the calls of the core on a state, as
steps that a search checks. All of it is plain data apart from the state, so that a node keeps the
client as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs

from kvcore.check.far.tier import Adversary, FarSlots, place_of
from kvcore.check.names.in_flight import Node
from kvcore.check.world.model import CheckedCall
from kvcore.check.world.world import by_row
from kvcore.far.breaker import Breaker
from kvcore.far.client import FarClient
from kvcore.far.options import FarCounts, FarOptions
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse
from kvcore.transitions import queries
from kvcore.types.errors import KvcoreError
from kvcore.types.values import Hit, Status

Perform = Callable[[State, Call], CheckedCall]
MANY = 99
"""More names than a world has: the client forgets none of those that it believes to be stored."""


@attrs.define(eq=False)
class StateManager:
    """The methods of the manager that the client calls, on a state. steps: those that were made."""

    state: Any = None
    perform: Any = None
    steps: list[CheckedCall] = attrs.field(factory=list)

    def __getstate__(self) -> tuple[()]:
        return ()

    def __setstate__(self, _: object) -> None:
        self.steps = []

    def __getattr__(self, name: str) -> Any:
        """Return a property of the state, a query, or a transition that is made as a step."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("config", "epoch"):
            return getattr(self.state, name)
        if hasattr(queries, name):
            return lambda *args: getattr(queries, name)(self.state, *args)
        return lambda *args, **options: self.call(name, *args, **options)

    def num_tokens(self, request_id: str) -> int:
        """See `KVCacheManager`."""
        return len(self.state.requests[request_id].tokens)

    def num_computed_tokens(self, request_id: str) -> int:
        """See `KVCacheManager`."""
        return int(self.state.requests[request_id].num_computed)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Make a call. Raises KvcoreError if it is misuse."""
        step = self.perform(self.state, Call(name, args, options))
        self.steps.append(step)
        self.state = step.outcome.state
        if isinstance(step.outcome.value, Misuse):
            raise KvcoreError(**step.outcome.value.fields)
        return step.outcome.value


@attrs.define(eq=False)
class Sequence:
    """See `FarSequence`. is_loading: whether its load has not ended."""

    sequence_id: str
    engine: StateEngine
    is_gone: bool = False
    is_loading: bool = False
    age: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        """The number of its tokens."""
        return self.engine.manager.num_tokens(self.sequence_id)


@attrs.frozen
class Ended:
    """See `Ending`."""

    operation: int
    done: bool


@attrs.define(eq=False)
class StateEngine:
    """See `FarEngine`. finished: operations of executed batches that the client has yet to hear."""

    manager: StateManager = attrs.field(factory=StateManager)
    sequences: dict[str, Sequence] = attrs.field(factory=dict)
    finished: list[Ended] = attrs.field(factory=list)
    now: float = 0.0

    @property
    def scheduler(self) -> StateEngine:
        """Itself, which knows what runs."""
        return self

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold blocks and load nothing, by their rows."""
        held = [each for each in by_row(self.manager.state) if each.status is Status.RUNNING]
        found = [self.sequences[each.request_id] for each in held]
        return [each for each in found if not each.is_loading]

    @property
    def open_number(self) -> int:
        """The number of the open batch."""
        return int(self.manager.state.batch.number)

    def take_finished(self) -> list[Ended]:
        """See `FarEngine`."""
        finished, self.finished = self.finished, []
        return finished

    def monotonic(self) -> float:
        """Return the time, which never passes: a search chooses who is late."""
        return self.now

    def sleep(self, seconds: float, /) -> None:
        """Do nothing."""


@attrs.frozen
class FarNode(Node):
    """A node with the engine, its client and its tier, as bytes.

    num_faults: those that are left. num_moves: of the open batch, that scheduled or loaded.
    """

    far: bytes = b""
    num_faults: int = 0
    num_moves: int = 0


class OneCount(Breaker):
    """Counts the failures of all operations as one: no property depends on when it opens."""

    def failed(self, operation: str, now: float) -> None:
        """See `Breaker`."""
        del operation
        super().failed("", now)

    def worked(self, operation: str) -> None:
        """See `Breaker`."""
        del operation
        super().worked("")


class Uncounted(FarCounts):
    """Counts that no node keeps, since no decision depends on them."""

    def __reduce__(self) -> str:
        return "UNCOUNTED"


class Options(FarOptions):
    """Options that a node keeps as the number of slots."""

    def __reduce__(self) -> tuple[Any, ...]:
        return options_of, (self.staging_pages,)


UNCOUNTED = Uncounted()


@cache
def options_of(num_slots: int) -> Options:
    """Return the options of the worlds with this number of slots."""
    return Options(staging_pages=num_slots, min_fetch_tokens=1, weights="")


class FarRun:
    """An engine, its client and its tier: what a search changes along an edge."""

    def __init__(self, state: State, num_slots: int, num_tickets: int, perform: Perform) -> None:
        self.engine = StateEngine()
        self.tier = Adversary(num_tickets)
        self.slots = FarSlots(num_slots)
        self.wake(state, perform)
        engine: Any = self.engine
        options = options_of(num_slots)
        self.client = FarClient(engine, self.tier, self.slots, options, self.engine)
        self.client._link.counts = UNCOUNTED
        self.client._link._breaker = OneCount()
        self.client._fetches._known._num_names_max = MANY
        self.client._link.set_place(place_of(state.epoch))

    def wake(self, state: State, perform: Perform) -> None:
        """Go on in a state."""
        self.engine.manager.state, self.engine.manager.perform = state, perform

    @property
    def manager(self) -> StateManager:
        """The manager."""
        return self.engine.manager

    def ask(self, name: str) -> None:
        """Let a request that was added wait for its pages."""
        sequence = self.engine.sequences[name] = Sequence(name, self.engine)
        self.client.is_fetching(sequence)

    def begin(self, name: str) -> int:
        """Admit a waiting request: load its ready pages, or compute all that it lacks. Returns the
        number of tokens that are loaded.
        """
        sequence, manager = self.engine.sequences[name], self.manager
        hit: Hit = manager.get_computed_blocks(name)
        got = self.client.begin(sequence, hit)
        if isinstance(got, int) and got:
            sequence.is_loading = True
            return got
        if got == 0:
            self.resume(name, hit)
        return 0

    def resume(self, name: str, hit: Hit | None = None) -> None:
        """Schedule all tokens that a request lacks. hit: what it takes first."""
        start = self.manager.num_computed_tokens(name) if hit is None else hit.num_tokens
        args = (name, self.manager.num_tokens(name) - start)
        self.manager.allocate_slots(*args, *(() if hit is None or not start else (hit,)))

    def leave(self, name: str, *, answered: bool) -> None:
        """End a request, answered or aborted."""
        sequence = self.engine.sequences[name]
        if answered:
            self.client.finished(sequence)
        sequence.is_gone = True
        self.client.forget(sequence)
        del self.engine.sequences[name]
        if self.manager.state.requests[name].status is not Status.WAITING:
            self.manager.free(name)
        self.manager.remove_request(name)

    def poll(self) -> None:
        """Let the client hear what has ended."""
        for sequence in self.client.poll():
            sequence.is_loading = False

    def late(self, number: int) -> None:
        """Let a ticket reach its deadline without an answer."""
        self.client._link._tickets[number].deadline = self.engine.now
        self.poll()
