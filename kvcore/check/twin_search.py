# SPDX-License-Identifier: Apache-2.0
"""The same search, compiled: the twin explores a world over its own transitions.

Rules: the compiled search gives counts and, of a violation, the calls of a shortest run; the states
of the story are the twin's, read back call by call. Twin: rust/src/check/search.rs is what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kvcore import _twin
from kvcore.calls import Call
from kvcore.check.core_model import closed
from kvcore.check.model import Step, Violation
from kvcore.check.parity import TwinRun
from kvcore.check.report import Report
from kvcore.check.world import Symmetry, World
from kvcore.values import Outcome

Progress = Callable[[Report], None]
TAKE_BATCH = Call("take_batch")


def check_on_twin(
    world: World,
    *,
    max_depth: int | None = None,
    max_states: int | None = None,
    max_seconds: float | None = None,
    properties: Iterable[str] | None = None,
    symmetry: Symmetry | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Report:
    """Explore a world with the compiled search; arguments as of `kvcore.check.check`.

    Raises BackendMissing.
    """
    report = Report(backend="rust")
    folded = symmetry or Symmetry()
    found = _twin.check_world(
        world,
        symmetry=(folded.requests, folded.blocks, folded.tokens),
        judges=None if properties is None else list(properties),
        max_depth=max_depth,
        max_states=max_states,
        max_seconds=max_seconds,
        workers=workers,
        progress=None if progress is None else _teller(report, progress),
    )
    report.verdict = found["verdict"]
    report.num_states, report.num_edges = found["num_states"], found["num_edges"]
    report.num_waiting, report.depths = found["num_waiting"], list(found["depths"])
    report.notes = Counter(found["notes"])
    report.seconds, report.memory_bytes = found["seconds"], found["num_bytes"]
    if found["violation"] is not None:
        name, detail, edges = found["violation"]
        report.violation = Violation(name, detail, _steps(world, edges))
    return report


def _teller(report: Report, progress: Progress) -> Callable[..., None]:
    """What the compiled search calls now and then."""

    def tell(states: int, edges: int, depth: int, waiting: int, seconds: float, size: int) -> None:
        report.num_states, report.num_edges, report.num_waiting = states, edges, waiting
        report.seconds, report.memory_bytes = seconds, size
        report.depths = [0] * (depth + 1)
        progress(report)

    return tell


def _steps(world: World, edges: Iterable[Iterable[tuple[str, Any, Any]]]) -> tuple[Step, ...]:
    """The steps of a story: a batch is taken after each edge, what drains is drained."""
    run = TwinRun(world.config)
    steps: list[Step] = []
    waits = world.config.max_in_flight > 0
    for number, edge in enumerate(edges):
        if number and not waits:
            if steps[-1].call.name != "take_batch" and len(run.state.batch.commands):
                steps.append(_step(run, TAKE_BATCH))
            run.put(closed(run.state))
        steps.extend(_step(run, Call(name, tuple(args), dict(more))) for name, args, more in edge)
    return tuple(steps)


def _step(run: TwinRun, call: Call) -> Step:
    before = run.state
    if call.name == "execute":
        return Step(before, call, Outcome(before, (), None))
    return Step(before, call, run.perform(call))
