# SPDX-License-Identifier: Apache-2.0
"""The command `kvcore check`: explores every state of a small world, and reports.

The report goes to standard output, progress and errors to standard error. An interrupted search
reports what it has found. Exit code 0: no violation, complete or bounded; 1: a violation; 2: bad
arguments; 3: a named world did not reach its goals; 130: interrupted, nothing found; 141: the
reader of the output has gone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import attrs

from kvcore.check.cli.options import (
    BadOptions,
    backend_of,
    check_hunt,
    check_options,
    given_of_world,
    make_parser,
    option,
    profile_of,
    symmetry_of,
    world_of,
)
from kvcore.check.extend.as_pytest import pytest_text, trace_text
from kvcore.check.profiles.registry import PROFILES
from kvcore.check.properties.registry import PROPERTIES, select
from kvcore.check.search.coverage import missed, never
from kvcore.check.search.report import COMPLETE, INTERRUPTED, Report
from kvcore.check.search.scope import plain_property
from kvcore.check.search.search import check
from kvcore.check.search.text import to_text
from kvcore.check.stories.story import render
from kvcore.check.world.model import Violation
from kvcore.check.world.world import World
from kvcore.cli.arguments import parse
from kvcore.cli.pipes import ends_cleanly
from kvcore.types.errors import KvcoreError

FINE, VIOLATED, USAGE_ERROR, SHOWS_TOO_LITTLE, STOPPED = 0, 1, 2, 3, 130
LIVE_SECONDS, SPARSE_SECONDS = 0.2, 10.0
EXPLODES, MANY_STATES, TOO_MANY, LEVELS_AHEAD = 1.5, 1_000, 2_000_000, 5


@ends_cleanly
def main(arguments: Sequence[str] | None = None) -> int:
    """Explore one world; return the exit code.

    arguments: those after `kvcore check`; by default, those of the process.
    """
    options = parse(make_parser(), arguments)
    if options.list and options.facade is None and options.manager is None:
        ignored = given_of_world(options)
        if ignored:
            words = ", ".join(map(option, ignored))
            print(f"kvcore check: --list shows every named world: {words} ignored", file=sys.stderr)
        print(list_profiles(as_json=options.json))
        return FINE
    if options.properties == ("list",) or options.properties == ["list"]:
        print(list_properties(as_json=options.json))
        return FINE
    try:
        if options.manager is not None or options.names:
            return _explore_manager(options)
        if options.facade is not None:
            return _explore_facade(options)
        if options.mutants:
            return _hunt(options)
        profile = profile_of(options)
        world = world_of(options) if profile is None else profile.world
        backend = backend_of(options, profile)
        check_options(options)
        if options.properties:
            select(frozenset(options.properties), world.calls)
        progress = Progress(sys.stderr, warns=profile is None)
        report = check(
            world,
            backend=backend,
            max_depth=options.depth,
            max_states=options.limit,
            max_seconds=options.time,
            properties=options.properties or None,
            symmetry=symmetry_of(options),
            full_keys=options.full_keys,
            workers=options.workers or 1,
            progress=progress,
        )
    except (BadOptions, KvcoreError, ValueError) as error:
        print(f"kvcore check: {error}", file=sys.stderr)
        return USAGE_ERROR
    progress.end()
    report.never = never(world, report.notes)
    if profile is not None and not options.json:
        report.never = tuple(map(profile.with_reason, report.never))
    if profile is not None and report.verdict == COMPLETE:
        report.missed = missed(profile, report.notes)
    if report.violation is not None:
        _write_files(options, report.violation, world)
    print(json.dumps(report.to_json(), indent=2) if options.json else to_text(report))
    if report.violation is None:
        fine = SHOWS_TOO_LITTLE if report.missed else FINE
        return STOPPED if report.verdict == INTERRUPTED else fine
    if not options.json:
        print(f"\n{render(report.violation, world)}")
    return VIOLATED


def _explore_manager(options: argparse.Namespace) -> int:
    """Explore a world of a manager that the user names. Raises BadOptions."""
    from kvcore.check.cli.manager import run_manager

    if options.manager is None:
        raise BadOptions("--names are those of a --manager")
    check_options(options)
    profile_of(options)
    progress = Progress(sys.stderr)
    return run_manager(options, progress, progress.end)


def _explore_facade(options: argparse.Namespace) -> int:
    """Explore the worlds of an older manager. Raises BadOptions."""
    from kvcore.check.cli.facades import run_facade

    progress = Progress(sys.stderr)
    return run_facade(options, progress, progress.end)


def _hunt(options: argparse.Namespace) -> int:
    """Hunt the seeded bugs. Raises BadOptions."""
    from kvcore.check.cli.mutants import run_mutants

    check_hunt(options)
    try:
        return run_mutants(options)
    except KeyboardInterrupt:
        print("interrupted: the bugs above were hunted, the others were not", file=sys.stderr)
        return STOPPED


def list_properties(*, as_json: bool) -> str:
    """List every property with its scope and severity, one per line."""
    if as_json:
        return json.dumps({each.name: plain_property(each) for each in PROPERTIES.values()})
    lines = []
    for each in PROPERTIES.values():
        seen = ", users see it" if each.observable else ""
        lines.append(f"{each.name} ({each.scope}, {each.severity}{seen}): {each.sentence}")
    return "\n".join(lines)


def _write_files(options: argparse.Namespace, violation: Violation, world: World) -> None:
    """Write the requested files."""
    for path, text in ((options.write_test, pytest_text), (options.write_trace, trace_text)):
        if path:
            Path(path).write_text(text(violation, world), encoding="utf-8")


def list_profiles(*, as_json: bool) -> str:
    """List the named worlds, one per line."""
    if as_json:
        return json.dumps(
            {n: {"states": p.num_states, "edges": p.num_edges} for n, p in PROFILES.items()}
        )
    rows = [("world", "states", "edges", "what it has")]
    for name, each in PROFILES.items():
        rows.append((name, f"{each.num_states:,}", f"{each.num_edges:,}", each.sentence))
    names, states, edges = (max(len(row[column]) for row in rows) for column in range(3))
    return "\n".join(f"{n:<{names}}  {s:>{states}}  {e:>{edges}}  {has}" for n, s, e, has in rows)


@attrs.define
class Progress:
    """Reports the progress of a search: continuously on a terminal, otherwise from time to time.

    warns: whether to warn if the world grows too fast; named worlds are known to end.
    """

    out: TextIO
    warns: bool = True
    _reported_at: float = attrs.field(factory=time.monotonic)
    _live: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._live = self.out.isatty()

    def __call__(self, report: Report) -> None:
        now = time.monotonic()
        growth = growth_of(report)
        many = growth >= EXPLODES and report.num_states >= MANY_STATES
        if self.warns and many and states_ahead(report, growth) >= TOO_MANY:
            self.warns = False
            self.end()
            print(warning(report, growth), file=self.out, flush=True)
        if now - self._reported_at < (LIVE_SECONDS if self._live else SPARSE_SECONDS):
            return
        self._reported_at = now
        rate = report.num_edges / max(report.seconds, 1e-9)
        line = (
            f"{report.num_states:,} states, {report.num_edges:,} edges, depth {report.depth}, "
            f"{report.num_waiting:,} waiting, {rate:,.0f} edges/s, {report.seconds:.0f} s"
        )
        if self._live:
            print(f"\r{line:<99}", end="", file=self.out, flush=True)
        else:
            print(line, file=self.out, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._live:
            print(f"\r{'':<99}\r", end="", file=self.out, flush=True)


def growth_of(report: Report) -> float:
    """Estimate the growth factor from level to level; 0 if too few levels are known."""
    depths = report.depths
    if not depths or not all(depths[-4:]):
        return 0.0
    if len(depths) < 4:  # a level that is not yet complete
        return report.num_waiting / depths[-1]
    return float((depths[-1] / depths[-4]) ** (1 / 3))


def states_ahead(report: Report, growth: float) -> float:
    """Estimate the number of states after `LEVELS_AHEAD` more levels, if the growth continues."""
    last = max(report.depths[-1], 1)
    return report.num_states + last * sum(growth**level for level in range(1, LEVELS_AHEAD + 1))


def warning(report: Report, growth: float) -> str:
    """Return the warning that a world grows too fast, with advice."""
    return (
        f"kvcore check: each level has {growth:.1f} times the states of the one before, about "
        f"{states_ahead(report, growth):,.0f} in {LEVELS_AHEAD} more: bound the search by --depth, "
        "--limit or --time, or stop it by Ctrl-C for a partial verdict"
    )


if __name__ == "__main__":
    sys.exit(main())
