# SPDX-License-Identifier: Apache-2.0
"""A model that checks only what a user of the core can observe.

An engine makes the moves of a world and trusts the manager. The contents of all slots are carried
from batch to batch, right or wrong, and are checked only when a query reads them (KV-READ, ZEROED).
Besides, a call may crash, blocks may never be freed, and requests may be unable to progress.
Nothing is renamed, since a state that a bug has broken has no canonical name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from kvcore.check.properties.liveness import RUN_CHECKS
from kvcore.check.properties.outcomes import check_outcome
from kvcore.check.properties.registry import PROPERTIES
from kvcore.check.search.core_model import Steps, failures, follow
from kvcore.check.search.moves import moves
from kvcore.check.search.scope import out_of_reach
from kvcore.check.world.ghost import Ghost
from kvcore.check.world.model import Broken, CheckedCall, Edge
from kvcore.check.world.world import Move, World, by_row, closed, proceed, script_of
from kvcore.invariants import pool_and_state
from kvcore.oracle.content_oracle import Tables
from kvcore.oracle.contents import RUBBISH, SPOILT, Contents, Slots, copy
from kvcore.oracle.schedule import Encoder, Failing, Schedule, failed
from kvcore.pool.block_pool import BlockPool
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.types import commands
from kvcore.types.commands import Command, Store
from kvcore.types.errors import InvariantViolation
from kvcore.types.values import Outcome

OBSERVABLE = tuple(name for name, each in PROPERTIES.items() if each.observable)
"""Properties that a user sees break: wrong content, a crash, lost blocks or stuck requests."""


def observable_in(world: World) -> list[str]:
    """Return those of them that an exploration of a world checks."""
    beyond = out_of_reach(world)
    return [name for name in OBSERVABLE if name not in beyond]


@attrs.frozen
class ObservedNode:
    """A state, and the engine's side of it: the contents of all blocks, and its own tables."""

    state: State
    contents: Contents
    tables: Tables
    encoders: dict[str, Encoder]
    owned: frozenset[int] = frozenset()
    cached: frozenset[int] = frozenset()


class ObservedModel:
    """The states of a world without batches in flight, with the true contents of their slots."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.notes: Counter[tuple[str, str]] = Counter()
        self._ghost = Ghost(world.config)
        self._prefixes = self._ghost.prefixes
        self._nodes: list[ObservedNode] = []
        self._run_checks = {} if world.config.max_num_batched_tokens else RUN_CHECKS

    def start(self) -> ObservedNode:
        """Return the empty state, in which nothing has been written."""
        return ObservedNode(make_state(self.world.config), {}, {}, {})

    def edges(self, node: ObservedNode) -> Iterator[Edge]:
        """Yield every path of moves, with every way in which its loads can end."""
        paths: list[Steps] = [()]
        for _ in range(self.world.moves_per_batch):
            longer: list[Steps] = []
            for path in paths:
                before = path[-1].outcome.state if path else node.state
                for steps in self._moves(before, path):
                    longer.append(steps)
                    for failing in (None, *(failures(steps) if self.world.loads_fail else ())):
                        closing = list(steps)
                        seen = _watched(closing, partial(self._settle, node, closing, failing))
                        if seen is not None:
                            yield Edge("", tuple(closing), seen)
            paths = longer

    def name(self, node: ObservedNode) -> bytes:
        """Return everything that distinguishes a node, as text."""
        state = node.state
        slots = sorted((place, tuple(held)) for place, held in node.contents.items())
        tables = sorted((place, tuple(table)) for place, table in node.tables.items() if table)
        pools = [_pool(pool) for pool in (state.device, state.host) if pool is not None]
        rows = (by_row(state), state.rows, state.free_rows)
        named = sorted(state.named_pins.items())
        return repr((state.epoch, named, *rows, pools, slots, tables)).encode()

    def check(self, node: ObservedNode) -> None:
        """Raise InvariantViolation if blocks are never freed or a request cannot progress."""
        for detail in pool_and_state.leak(node.state):
            raise InvariantViolation("LEAK", detail)
        for name, holds in self._run_checks.items():
            for detail in holds(self.world, node.state):
                raise InvariantViolation(name, detail)

    def pack(self, node: ObservedNode) -> bytes:
        """Return the number of a node, which stays in memory."""
        self._nodes.append(node)
        return (len(self._nodes) - 1).to_bytes(8, "big")

    def unpack(self, data: bytes) -> ObservedNode:
        """Return the node with this number."""
        return self._nodes[int.from_bytes(data, "big")]

    def _moves(self, state: State, path: Steps) -> Iterator[Steps]:
        possible = _watched(path, lambda: list(moves(self.world, state, self._prefixes)))
        for move in possible or ():
            yield self._scripted(move, state, path)

    def _scripted(self, move: Call | Move, state: State, path: Steps) -> Steps:
        script = script_of(move)
        call = _watched(path, lambda: next(script, None))
        while call is not None:
            step = self._made(path, state, call)
            path, state = (*path, step), step.outcome.state
            call = _watched(path, partial(proceed, script, step.outcome))
        return path

    def _made(self, path: Steps, state: State, call: Call) -> CheckedCall:
        opened = (*path, CheckedCall(state, call, Outcome(state, (), None)))
        outcome = _watched(opened, lambda: perform(state, call))
        step = CheckedCall(state, call, outcome)
        if call.name == "reset_prefix_cache":
            _watched((*path, step), lambda: check_outcome(state, call, outcome))
        _watched((*path, step), lambda: self._prefixes.learn(outcome.state))
        return step

    def _settle(
        self, node: ObservedNode, closing: list[CheckedCall], failing: Failing
    ) -> ObservedNode:
        """Take the batch, execute it, check what its queries read, and end its operations."""
        opened = closing[-1].outcome.state
        if opened is node.state:
            return node
        ghost, schedule = self._ghost, Schedule()
        schedule.assume(node.state)
        schedule.encoders = dict(node.encoders)
        ghost.loads = {}
        ghost.contents = dict(node.contents)
        ghost.tables = dict(node.tables)
        ghost.owned, ghost.cached = set(node.owned), set(node.cached)
        for step in closing:
            follow(schedule, step)
        ghost.loading = schedule.loading
        self._execute(opened.batch.commands)
        writes = [failed(write, failing) for write in schedule.take()]
        ghost.compute(opened.requests, writes, schedule.encoders)
        state = self._call(opened, Call("take_batch"), closing)
        for number, operation in sorted(state.operations.items()):
            done = failing is None or operation.first_token < failing[1]
            state = self._call(state, Call("complete_operation", (number, done)), closing)
            ghost.complete(number, done)
        if failing is not None and failing[0] not in schedule.loading:
            state = self._rewound(state, failing, closing)
        self._execute(state.batch.commands)
        contents = {place: ruined(held) for place, held in ghost.contents.items()}
        owners = (frozenset(ghost.owned), frozenset(ghost.cached))
        return ObservedNode(closed(state), contents, ghost.tables, schedule.encoders, *owners)

    def _execute(self, batch: Sequence[Command]) -> None:
        """Run a batch, the copies of each segment in reverse order, which is allowed."""
        ghost, size = self._ghost, max(each.block_size for each in self.world.config.groups)
        parts: dict[int, list[Command]] = {}
        for number, command in zip(commands.segments(batch), batch, strict=True):
            parts.setdefault(number, []).append(command)
        for _, part in sorted(parts.items()):
            other = dict(ghost.contents)
            ghost.apply(each for each in part if not isinstance(each, Store))
            copies = [each for each in part if each.reads() is not None]
            for each in copies[::-1]:
                copy(other, each, size)
            for each in copies:
                target = each.writes()
                if target is not None and target in ghost.contents:
                    ghost.contents[target] = other[target]

    def _rewound(self, state: State, failing: tuple[str, int], closing: list[CheckedCall]) -> State:
        names, count = [failing[0]], failing[1]
        while True:
            reached = self._call(state, Call("rewind", (list(names), count)), closing)
            value = closing[-1].outcome.value
            if not isinstance(value, Misuse):
                return reached
            names += value.fields["requests"]  # type: ignore[arg-type] # an object

    def _call(self, state: State, call: Call, closing: list[CheckedCall]) -> State:
        closing.append(self._made(tuple(closing), state, call))
        after: State = closing[-1].outcome.state
        return after


def ruined(held: Slots) -> Slots:
    """Return the slots that a failed load left undefined although the engine knows of it."""
    return tuple(RUBBISH if each == SPOILT else each for each in held)


def _watched(path: Any, make: Any) -> Any:
    """Return the value of `make`, or None if a user does not see its failure. Raises Broken for a
    property that a user sees break, and for NOCRASH if the core failed.
    """
    try:
        return make()
    except Broken:
        raise
    except InvariantViolation as error:
        if error.name in OBSERVABLE:
            raise Broken(error.name, error.detail, tuple(path)) from error
    except Exception as error:
        if _is_of_core(error):
            raise Broken("NOCRASH", repr(error), tuple(path)) from error
        if not isinstance(error, LookupError):
            raise
    return None


def _is_of_core(error: Exception) -> bool:
    """Tell whether the core raised an error, rather than a check."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals["__name__"])
    return not name.startswith("kvcore.check") or name.startswith("kvcore.check.mutants")


def _pool(pool: BlockPool) -> tuple[object, ...]:
    index = sorted((key, pool.index[key]) for key in pool.index)
    counts, keys, pins = list(pool.ref_counts), list(pool.keys), sorted(pool.pins.items())
    tails = None if pool.tails is None else sorted(pool.tails.by_key.items())
    return counts, keys, list(pool.queue), pool.queue.length, index, pins, tails
