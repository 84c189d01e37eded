# SPDX-License-Identifier: Apache-2.0
"""The search of the compiled twin, with a report like Python's.

Nothing is explored here. A violation comes as calls; its steps are made again on the Python core,
for the story: if only the twin is wrong, the last of them succeeds here. Twin:
rust/src/bindings/check.rs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from kvcore import _twin
from kvcore.check.search.core_model import TAKE_BATCH
from kvcore.check.search.flight_model import executed
from kvcore.check.search.process_memory import memory_bytes as most_memory
from kvcore.check.search.report import Report, kept
from kvcore.check.world.model import CheckedCall, Violation
from kvcore.check.world.world import Symmetry, World, closed
from kvcore.state.state import State, make_state
from kvcore.trace.calls import Call, perform

TwinCall = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call in the twin's form: name, arguments, options."""


def explore_twin(
    world: World,
    *,
    names: list[str] | None,
    symmetry: Symmetry,
    full_keys: bool,
    limits: dict[str, Any],
    workers: int,
    progress: Any,
) -> Report:
    """Explore a world in the twin. Raises BackendMissing."""
    keys = kept(full_keys)
    report = Report(backend="rust", keys=keys)

    def report_progress(
        states: int, edges: int, depth: int, waiting: int, seconds: float, size: int
    ) -> None:
        report.num_states, report.num_edges, report.num_waiting = states, edges, waiting
        report.depths = [0] * (depth + 1)
        report.seconds, report.memory_bytes = seconds, size
        progress(report)

    begun = most_memory()
    found = _twin.check_world(
        world,
        symmetry=(symmetry.requests, symmetry.blocks, symmetry.tokens),
        full_keys=full_keys,
        checks=names,
        workers=workers,
        progress=None if progress is None else report_progress,
        **limits,
    )
    report = Report(
        backend="rust",
        keys=keys,
        verdict=found["verdict"],
        num_states=found["num_states"],
        num_edges=found["num_edges"],
        num_waiting=found["num_waiting"],
        depths=list(found["depths"]),
        notes=Counter(found["notes"]),
        seconds=found["seconds"],
        memory_bytes=found["num_bytes"],
        grown_bytes=max(0, most_memory() - begun),
    )
    if found["violation"] is not None:
        name, detail, edges = found["violation"]
        report.violation = Violation(name, detail, tuple(steps_of(world, edges)))
    return report


def steps_of(world: World, edges: Iterable[Iterable[TwinCall]]) -> Iterator[CheckedCall]:
    """Yield the steps of a run of the twin, made on the Python core, with batches taken."""
    state, in_flight = make_state(world.config), world.config.max_in_flight > 0
    for edge in edges:
        for name, args, options in edge:
            call = Call(name, tuple(args), dict(options))
            step = executed(state, *call.args) if call.name == "execute" else made(state, call)
            yield step
            state = step.outcome.state
        if in_flight:
            continue
        while len(state.batch.commands) or any(state.batch.scheduled) or len(state.batch.merges):
            step = made(state, TAKE_BATCH)
            yield step
            state = step.outcome.state
        state = closed(state)


def made(state: State, call: Call) -> CheckedCall:
    """Make a call on the Python core."""
    return CheckedCall(state, call, perform(state, call))
