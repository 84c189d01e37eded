# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU time of a sanitizer on vLLM 0.33.0's scheduler, against that of its steps.

Runs in vLLM's environment: `python -m benches.engines --engines vllm-sanitizer` calls this. The
loads are those of vllm_steps.py. A share is the sanitizer's time over the rest of the steps' time.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import attrs

from benches.engines.options import Options, read_options
from benches.engines.vllm_steps import Case, Drive, each_case

# isort: split

from kvcore.sanitizer.engines.vllm import scheduler as watched

EVERY = (1, 16)
"""Sampling rates: check every request, or one in this many."""
KINDS = {False: watched.Scheduler, True: watched.AsyncScheduler}


@attrs.define
class Side:
    """A scheduler under a load.

    inside: CPU seconds of the sanitizer in a round. rounds: CPU seconds of the round's steps
    without it.
    """

    drive: Drive
    spent: float = 0.0
    inside: list[float] = attrs.field(factory=list)
    rounds: list[float] = attrs.field(factory=list)

    def clock(self) -> None:
        """Start measuring the sanitizer's time."""
        guard, clock = self.drive.scheduler._guard, time.thread_time
        for name in ("tell", "report"):
            setattr(guard, name, self._clocked(getattr(guard, name), clock))

    def _clocked(self, call: Any, clock: Callable[[], float]) -> Any:
        def timed(argument: Any) -> Any:
            start = clock()
            got = call(argument)
            self.spent += clock() - start
            return got

        return timed

    def run(self, steps: int) -> None:
        """Run one round."""
        self.spent = 0.0
        whole = sum(self.drive.step() for _ in range(steps))
        self.inside.append(self.spent)
        self.rounds.append(whole - self.spent)


def measure(case: Case, options: Options, model: str) -> list[Side]:
    """Run rounds of the same steps on all sides. Raises RuntimeError on a finding."""
    sides = []
    for every in EVERY:
        os.environ["KVCORE_SANITIZER_EVERY"] = str(every)
        sides.append(Side(Drive(KINDS[case.is_async], case, model)))
        sides[-1].clock()
    gc.collect()
    gc.freeze()
    for number in range(options.rounds):
        for side in sides if number % 2 else reversed(sides):
            side.run(options.steps)
    gc.unfreeze()
    for side in sides:
        sanitizer = side.drive.scheduler._guard.sanitizer
        if sanitizer is None or sanitizer.findings:
            raise RuntimeError(f"{case}: off, or a finding: {sanitizer and sanitizer.findings[0]}")
    return sides


def show(case: Case, sides: list[Side], options: Options) -> None:
    """Print the row of a case."""
    cells = []
    for side in sides:
        shares = [mine / rest for mine, rest in zip(side.inside, side.rounds, strict=True)]
        spread = f"({min(shares):.1%} to {max(shares):.1%})"
        microseconds = statistics.median(side.inside) / options.steps * 1e6
        cells.append(f"{microseconds:6,.0f} us {statistics.median(shares):6.1%} {spread:>17}")
    microseconds = statistics.median(sides[0].rounds) / options.steps * 1e6
    print(f"{case!s:28}{microseconds:10,.0f}  {'  '.join(cells)}", flush=True)


def main() -> int:
    """Measure the requested cases."""
    options = read_options()
    heads = "".join(f"  {'1 in ' + str(every) if every > 1 else 'all':34}" for every in EVERY)
    print(f"{'vLLM 0.33.0':28}{'us per step':>12}{heads}")
    for case, model in each_case(options):
        show(case, measure(case, options, model), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
