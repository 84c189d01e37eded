# SPDX-License-Identifier: Apache-2.0
"""The oracle's score: how many of the tree's seeded bugs it finds, and within how many calls.

Why: what finds nothing proves nothing. This file may import the bugs, the oracle may not. Snapshots
are off, since `restore` asserts kvcore's own invariants, which would find bugs for the oracle.
`python -m tests.oracle.seeded` prints the table.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvcore.check.mutants import MUTANTS, Mutant, Patcher
from kvcore.check.mutants.hunt import walk
from kvcore.pool.free_queue import FreeQueue
from tests.oracle import states
from tests.oracle.run import Run, run

CALLS_MAX = 20_000
RUN_SECONDS_MAX = 60
"""A run that takes longer never ends."""


class NeverEnds(Exception):
    """A run that does not come to its end."""


@contextmanager
def seeded(mutant: Mutant) -> Iterator[None]:
    """Run with a bug in the transitions of the Python core, as a manager calls them."""
    with Patcher() as patcher:
        patcher.replace(FreeQueue, "__iter__", walk)
        mutant.patch(patcher)
        yield


def hunt(mutant: Mutant, num_calls: int, seed: int = 0) -> tuple[int, str | None]:
    """Make runs with a bug, from a seed on, until one has a finding; return calls and finding."""
    made = 0
    with seeded(mutant):
        while made < num_calls:
            try:
                found = bounded(seed)
            except NeverEnds:
                return made, "a call never ends"
            made, seed = made + found.num_calls, seed + 1
            if found.wrong is not None:
                return made, found.wrong
    return made, None


def hunt_states(mutant: Mutant, seeds: range) -> str | None:
    """Make runs with recurrent states and a bug until one has a finding; return it."""
    with seeded(mutant):
        found = (states.run(seed, ("python",))[1] for seed in seeds)
        return next((each for each in found if each is not None), None)


def bounded(seed: int) -> Run:
    """Make a run on the Python core, without snapshots. Raises NeverEnds."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise NeverEnds

    old = signal.signal(signal.SIGALRM, ring)
    signal.alarm(RUN_SECONDS_MAX)
    try:
        return run(seed, languages=("python",))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def main() -> None:
    """Print the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of the seeded bugs; all if none is named")
    parser.add_argument("--calls", type=int, default=CALLS_MAX, help="for each bug, at most")
    requested = parser.parse_args()
    known = [each.name for each in MUTANTS]
    unknown = [name for name in requested.names if name not in known]
    if unknown:
        parser.error(f"no seeded bug {', '.join(unknown)}; the seeded bugs are {', '.join(known)}")
    chosen = [each for each in MUTANTS if not requested.names or each.name in requested.names]
    num_found = 0
    for mutant in chosen:
        num_calls, wrong = hunt(mutant, requested.calls)
        num_found += wrong is not None
        print(f"{mutant.name:45} {num_calls:>7,}  {(wrong or 'lives')[:110]}", flush=True)
    print(
        f"{num_found} of {len(chosen)} seeded bugs are found, within {requested.calls:,} calls each"
    )


if __name__ == "__main__":
    main()
