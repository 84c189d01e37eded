# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore simulate`: runs random engines from seeds, checks them, and shrinks failing
runs.

Results go to standard output, progress and errors to standard error. An interrupted command reports
the runs that it has finished. Exit code 0: no run failed; 1: a run failed; 2: bad arguments; 130:
interrupted, nothing found.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

import attrs

from kvcore import _twin
from kvcore.check.cli.options import BadOptions
from kvcore.check.simulate.as_trace import trace_text
from kvcore.check.simulate.runs import BackendName, Failure, MakeDevices, Run, again, simulate
from kvcore.check.simulate.setting import Fixed
from kvcore.check.simulate.shrink import shrink
from kvcore.cli.arguments import CommandParser, count, natural, parse, positive
from kvcore.cli.pipes import ends_cleanly
from kvcore.oracle.device import find_device
from kvcore.types.errors import KvcoreError

FINE, FAILED, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130
SHRINKING_SECONDS = 60.0


@attrs.define
class Tally:
    """The totals of all runs. cut_off: a description of the interrupted run."""

    num_runs: int = 0
    num_steps: int = 0
    num_calls: int = 0
    num_requests: int = 0
    num_seconds: float = 0.0
    goals: Counter[str] = attrs.field(factory=Counter)
    failed: Run | None = None
    interrupted: bool = False
    cut_off: str = ""

    def add(self, run: Run) -> None:
        """Count a finished run."""
        self.num_runs += 1
        self.num_steps += run.num_steps
        self.num_calls += run.num_calls
        self.num_requests += run.num_requests
        self.goals += run.goals
        if run.failure is not None:
            self.failed = run


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Make runs; return the exit code.

    arguments: those after `kvcore simulate`; by default, those of the process.
    """
    options = parse(_make_parser(), arguments)
    try:
        devices = _check(options)
        tally = _run_all(options, devices)
    except (BadOptions, KvcoreError) as error:
        print(f"kvcore simulate: {error}", file=sys.stderr)
        return USAGE_ERROR
    small = _shrunk(options, devices, tally)
    if options.trace and small is not None:
        Path(options.trace).write_text(small, encoding="utf-8")
    print(json.dumps(_as_data(tally, small)) if options.json else _as_text(options, tally, small))
    if tally.failed is not None:
        return FAILED
    return INTERRUPTED if tally.interrupted else FINE


def _run_all(options: argparse.Namespace, devices: MakeDevices) -> Tally:
    """Run one seed after the other, until enough runs are done, time is up or a run fails."""
    tally, start = Tally(), time.monotonic()
    progress = Progress(options, tally, start)
    fixed = Fixed(num_blocks=options.blocks, num_requests=options.requests)
    seed, backend = options.seed, options.backend
    make_run = partial(simulate, backend=backend, fixed=fixed, devices=devices, stop=progress.step)
    try:
        while tally.failed is None and not progress.is_over():
            tally.add(make_run(seed, options.steps))
            seed += 1
    except KeyboardInterrupt:
        tally.interrupted = True
        tally.cut_off = f"the run of seed {seed} was cut off in step {progress.at}"
    progress.end()
    tally.num_seconds = time.monotonic() - start
    return tally


class Progress:
    """One line on a terminal that shows the progress of the runs, and the limits that end them."""

    def __init__(self, options: argparse.Namespace, tally: Tally, start: float) -> None:
        self._options, self._tally, self._start = options, tally, start
        self._shown = start
        self.at = 0
        self._visible = sys.stderr.isatty()

    def is_over(self) -> bool:
        """Return whether the runs end here."""
        if self._options.time is not None:
            return self._late()
        return self._tally.num_runs >= (self._options.runs or 1)

    def step(self, step: int) -> bool:
        """Show the next step; return whether time is up."""
        self.at = step
        now = time.monotonic()
        if self._visible and now - self._shown > 0.2:
            self._shown = now
            seed = self._options.seed + self._tally.num_runs
            line = f"run {self._tally.num_runs + 1}, seed {seed}: step {step} of "
            line += f"{self._options.steps}, {now - self._start:.0f} s"
            print(f"\r{line:<70}", end="", file=sys.stderr, flush=True)
        return self._late()

    def end(self) -> None:
        """Clear the line."""
        if self._visible:
            print(f"\r{'':<70}\r", end="", file=sys.stderr, flush=True)

    def _late(self) -> bool:
        limit = self._options.time
        return limit is not None and time.monotonic() - self._start > limit


def _shrunk(options: argparse.Namespace, devices: MakeDevices, tally: Tally) -> str | None:
    """Return the trace of a failing run after shrinking, or of the whole run if that fails."""
    if tally.failed is None or tally.failed.failure is None:
        return None
    failure = tally.failed.failure
    backend = _where(failure, options.backend, devices)
    try:
        small = shrink(failure, devices=devices, backend=backend, num_seconds=SHRINKING_SECONDS)
    except KeyboardInterrupt:
        small = None
    found = failure if small is None else small
    play, _ = again(found.config, found.moves, backend=backend, devices=devices, ends=False)
    return trace_text(found, found.config, play.calls, _command(options, tally.failed.seed))


def _where(failure: Failure, backend: BackendName, devices: MakeDevices) -> BackendName:
    """Return a backend on which the run fails alone, the faster one first; else the given ones."""
    order: list[BackendName] = ["rust", "python"]
    for one in order if backend == "both" else []:
        _, found = again(failure.config, failure.moves, backend=one, devices=devices)
        if found is not None and found.name == failure.name:
            return one
    return backend


def _command(options: argparse.Namespace, seed: int) -> str:
    words = [f"kvcore simulate --seed {seed} --steps {options.steps}"]
    words += [f"--blocks {options.blocks}"] if options.blocks else []
    words += [f"--requests {options.requests}"] if options.requests else []
    words += [f"--backend {options.backend}"]
    return " ".join([*words, "--torch"] if options.torch else words)


def _as_data(tally: Tally, small: str | None) -> dict[str, Any]:
    failed = tally.failed
    failure = None if failed is None else failed.failure
    found = None
    if failed is not None and failure is not None:
        found = {"seed": failed.seed, "step": failure.at, "property": failure.name}
        found |= {"detail": failure.detail, "trace": small}
    return {
        "runs": tally.num_runs,
        "steps": tally.num_steps,
        "calls": tally.num_calls,
        "requests": tally.num_requests,
        "seconds": round(tally.num_seconds, 3),
        "interrupted": tally.interrupted,
        "goals": dict(sorted(tally.goals.items())),
        "failure": found,
    }


def _as_text(options: argparse.Namespace, tally: Tally, small: str | None) -> str:
    lines = []
    if tally.failed is not None and tally.failed.failure is not None:
        failure, seed = tally.failed.failure, tally.failed.seed
        where = "at the end" if failure.at is None else f"in step {failure.at}"
        lines += [f"seed {seed} breaks {failure.name} {where}: {failure.detail}", small or ""]
        lines += [f"again: {_command(options, seed)}"]
    done = "interrupted: " if tally.interrupted else ""
    lines.append(
        f"{done}{tally.num_runs} run{'s' * (tally.num_runs != 1)}, {tally.num_steps} steps, "
        f"{tally.num_requests} requests, {tally.num_calls} calls in {tally.num_seconds:.1f} s"
    )
    lines += _in_columns(tally.goals)
    if tally.cut_off:
        lines.append(tally.cut_off)
    if tally.failed is None:
        lines.append("no property was broken")
    return "\n".join(lines)


def _in_columns(counts: Mapping[str, int]) -> list[str]:
    """Lay out counts by name, down each column, in as many columns as the terminal has room for."""
    cells = [f"{number:>9,} {name}" for name, number in sorted(counts.items())]
    width = max(map(len, cells), default=0)
    num_columns = max(1, get_terminal_size().columns // (width + 1))
    num_rows = -(-len(cells) // num_columns)
    rows = (cells[row::num_rows] for row in range(num_rows))
    return [" ".join(f"{cell:<{width}}" for cell in row).rstrip() for row in rows]


def _check(options: argparse.Namespace) -> MakeDevices:
    """Return the requested devices. Raises BadOptions."""
    if options.backend in ("rust", "both") and not _twin.available():
        raise BadOptions("the compiled twin is missing: use --backend python")
    if options.runs is not None and options.time is not None:
        raise BadOptions("--runs and --time each say when to end: give one of them")
    if options.trace is not None and not Path(options.trace).resolve().parent.is_dir():
        raise BadOptions(f"there is no folder for {options.trace}")
    if not options.torch:
        return []
    device = find_device("torch")
    if device is None:
        raise BadOptions("--torch needs kvcore-runtime, which is not installed")
    return [device]


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvcore simulate",
        description="Random engines at real sizes over the core: scheduler, late device, failures; "
        "groups of any kinds, recurrent states too, whose checkpoints calls choose; hits inside "
        "blocks, epochs of weights, retention, pins of prefixes, engines that run ahead.",
        epilog="Exit code: 0 no run failed, 1 one did, 2 the call was wrong, 130 interrupted.",
    )
    add = parser.add_argument
    add("--seed", type=natural, default=0, metavar="N", help="seed of the first run (0)")
    add("--steps", type=count, default=1000, metavar="N", help="steps of each run (1000)")
    add("--runs", type=count, metavar="N", help="runs, each with the next seed (1)")
    add("--time", type=positive, metavar="SECONDS", help="make runs until the time is up")
    add("--blocks", type=count, metavar="N", help="usable device blocks (drawn from the seed)")
    add("--requests", type=count, metavar="N", help="most requests at a time (drawn)")
    add("--backend", choices=("both", "python", "rust"), default="both", help="the cores (both)")
    add("--torch", action="store_true", help="run kvcore-runtime's tensors beside, in guard mode")
    add("--json", action="store_true", help="plain data instead of text")
    add("--trace", metavar="FILE", help="where to write the trace of a failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
