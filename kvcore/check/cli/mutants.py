# SPDX-License-Identifier: Apache-2.0
"""The score: hunts every seeded bug, and reports what found it, for people and for CI.

A bug is killed if each property that it names finds it alone in its named world, in a short run. A
second hunt checks only what users observe: a bug is either seen there, or has a reason why it costs
at most hits, and then it must not be seen. A bug without a named world needs a reason, and so does
a row of the catalogue without a bug. Times are printed but gate nothing. tools/twin_mutants.py
computes the twin's score.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import attrs

from kvcore.check.mutants import MUTANTS
from kvcore.check.mutants.catalogue import NOT_EXPRESSED, SENTENCES, by_row
from kvcore.check.mutants.hunt import MutantHunt, hunt, observe
from kvcore.check.mutants.seeding import Mutant
from kvcore.check.search.workers import leaving_interrupts
from kvcore.check.world.world import World

LONGEST_RUN = 9
"""Most operations of a run to a bug."""
SECONDS_MAX = 2.0
"""Time limit of a hunt; a slower one is named, but not counted as alive."""
NUM_WORKERS = 2


@attrs.frozen(kw_only=True)
class Score:
    """The result of one seeded bug. kills: one hunt per property that it names. seen: the hunt by
    what users observe.
    """

    mutant: Mutant
    kills: tuple[MutantHunt, ...]
    seen: MutantHunt

    @property
    def faults(self) -> list[str]:
        """Return the differences between the hunt and the bug's description."""
        mutant, found = self.mutant, []
        for name, kill in zip(mutant.broken, self.kills, strict=True):
            if kill.found != name:
                found.append(f"{name} does not find it")
            elif len(kill.calls) > LONGEST_RUN:
                found.append(f"{name} needs {len(kill.calls)} operations")
        if not mutant.broken and mutant.costs is None:
            found.append("no property is named")
        if mutant.costs is None and self.seen.found is None:
            found.append(f"no user sees it: {self.seen.verdict}")
        if mutant.costs is not None and self.seen.found is not None:
            found.append(f"a user does see it: {self.seen.found}")
        return found


def score_one(name: str) -> Score:
    """Hunt the seeded bug with this name."""
    mutant = next(each for each in MUTANTS if each.name == name)
    kills = tuple(hunt(mutant, mutant.world, {each}) for each in mutant.broken)
    return Score(mutant=mutant, kills=kills, seen=observe(mutant))


def score_all(names: Iterable[str], num_workers: int = NUM_WORKERS) -> Iterable[Score]:
    """Hunt the seeded bugs with these names in several processes; return the scores in order."""
    if num_workers < 2:
        yield from map(score_one, names)
        return
    with ProcessPoolExecutor(num_workers, get_context("spawn")) as pool:
        with leaving_interrupts():
            scores = pool.map(score_one, names)
        yield from scores


def run_mutants(options: Any) -> int:
    """Run `kvcore check --mutants`; return 0 if every bug is killed and every row accounted for.
    options: json: print data instead of a table.
    """
    scores = []
    for score in score_all([each.name for each in MUTANTS]):
        scores.append(score)
        if not options.json:
            print("\n".join(lines_of(score)), flush=True)
    if options.json:
        print(json.dumps([as_data(score) for score in scores], indent=1))
    else:
        print("\n".join(summary(scores)))
    return int(any(score.faults for score in scores) or bool(rows_left()))


def rows_left() -> list[int]:
    """Return the rows of the catalogue with neither a seeded bug nor a reason."""
    rows = by_row(MUTANTS)
    return [each for each in SENTENCES if not rows[each] and each not in NOT_EXPRESSED]


def lines_of(score: Score) -> list[str]:
    """Return a few lines of text about a bug."""
    mutant = score.mutant
    rows = ", ".join(map(str, mutant.rows))
    lines = [f"{mutant.name}" + (f" (row {rows})" if rows else ""), f"    {mutant.sentence}"]
    for kill in score.kills:
        slow = ", slow" if kill.seconds > SECONDS_MAX else ""
        lines.append(f"    {kill.found}: {describe(kill)} in {place(mutant)}{slow}")
    if mutant.unnamed is not None:
        lines.append(f"    hunted in a world of its own: {mutant.unnamed}")
    if mutant.trace is not None:
        lines.append(f"    fails the trace {mutant.trace}")
    if mutant.costs is not None:
        lines.append(f"    no user sees it: {mutant.costs}")
    elif mutant.shows is not None:
        lines.append(
            f"    a user sees {score.seen.found}: {describe(score.seen)} in {scope(mutant.shows)}"
        )
    return lines + [f"    FAULT: {fault}" for fault in score.faults]


def summary(scores: list[Score]) -> list[str]:
    """Return the score in a few lines."""
    rows = by_row([score.mutant for score in scores])
    expressed = sum(bool(each) for each in rows.values())
    seen = sum(score.mutant.costs is None for score in scores)
    alive = [score.mutant.name for score in scores if score.faults]
    slowest = max((kill.seconds for score in scores for kill in score.kills), default=0.0)
    longest = max((len(kill.calls) for score in scores for kill in score.kills), default=0)
    lines = [
        f"{len(scores) - len(alive)} of {len(scores)} seeded bugs are killed",
        f"{sum(score.mutant.unnamed is None for score in scores)} have a named world",
        f"longest run {longest} operations, slowest hunt {slowest:.2f} s",
        f"{seen} are seen by a user, {len(scores) - seen} are not, for a reason beside each",
        f"{expressed} of {len(SENTENCES)} rows of the catalogue are expressed",
    ]
    traced = [row for row, found in rows.items() if found and not any(m.broken for m in found)]
    lines += [f"  row {row} is found by a trace alone, not by a property" for row in traced]
    lines += [f"  row {row} is not: {reason}" for row, reason in NOT_EXPRESSED.items()]
    lines += [f"  row {row} has neither a bug nor a reason" for row in rows_left()]
    return lines + [f"  {name} is alive" for name in alive]


def describe(found: MutantHunt) -> str:
    """Describe length, states and time of a hunt."""
    count = len(found.calls)
    return f"{count} operations, {found.num_states} states, {found.seconds:.2f} s"


def place(mutant: Mutant) -> str:
    """Return the named world in which a bug is hunted, or the scope of its own world."""
    return mutant.profile or scope(mutant.world)


def scope(world: World) -> str:
    """Return blocks x requests x tokens of a world."""
    config = world.config
    num_usable = config.num_blocks - int(config.null_block)
    return f"{num_usable}x{world.num_requests}x{world.num_tokens}"


def as_data(score: Score) -> dict[str, Any]:
    """Return a bug's score as plain data."""
    mutant, shows = score.mutant, score.mutant.shows
    return {
        **{name: getattr(mutant, name) for name in ("name", "sentence", "unnamed", "costs")},
        "rows": list(mutant.rows),
        "world": mutant.profile,
        "scope": scope(mutant.world),
        "kills": [kill_data(kill) for kill in score.kills],
        "observed": None if shows is None else {"scope": scope(shows), **kill_data(score.seen)},
        "trace": mutant.trace,
        "faults": score.faults,
    }


def kill_data(found: MutantHunt) -> dict[str, Any]:
    """Return a hunt as plain data."""
    return {
        "property": found.found,
        "detail": found.detail,
        "calls": [str(call) for call in found.calls],
        "operations": len(found.calls),
        "states": found.num_states,
        "seconds": round(found.seconds, 3),
        "verdict": found.verdict,
    }


def to_markdown(scores: list[Score]) -> str:
    """Return the score as a table by rows of the catalogue, for docs/checking.md."""
    lines = ["| row | seeded bug | found by | operations | world | a user sees |"]
    lines.append("|---|---|---|---|---|---|")
    for score in sorted(scores, key=lambda each: (each.mutant.rows or (99,), each.mutant.name)):
        mutant = score.mutant
        names = ", ".join(mutant.broken) or f"trace `{mutant.trace}`"
        runs = ", ".join(str(len(kill.calls)) for kill in score.kills) or "-"
        seen = f"{score.seen.found}" if mutant.costs is None else f"nothing: {mutant.costs}"
        rows = ", ".join(map(str, mutant.rows)) or "-"
        lines.append(f"| {rows} | `{mutant.name}` | {names} | {runs} | {place(mutant)} | {seen} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_markdown(list(score_all([each.name for each in MUTANTS]))))
