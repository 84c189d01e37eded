# SPDX-License-Identifier: Apache-2.0
"""Measure CPU time of vLLM 0.33.0's steps with and without kvcore in its manager's shadow.

Runs in vLLM's environment: `python -m benches.engines --engines vllm-shadow` calls this. The loads
are those of vllm_steps.py, the sides take turns step by step. The extra cost of a step has two
parts: kvcore's manager itself, as `manager_calls.py` measures it in the adapter's scheduler, and
the rest, for forwarding, timing and comparing each call. Both are shares of vLLM's own step.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from typing import Any

import attrs

from benches.engines.manager_calls import clocked
from benches.engines.options import Options, read_options
from benches.engines.vllm_steps import KINDS, Case, Drive, each_case

MOST = 0.05
"""Share of a step that shadow mode may cost besides kvcore's manager."""


@attrs.define
class Measured:
    """The measurements of a case, round by round.

    Seconds of a step without and with a shadow, and of the calls of kvcore's manager in a step that
    it serves alone.
    """

    alone: list[float] = attrs.field(factory=list)
    shadow: list[float] = attrs.field(factory=list)
    calls: list[float] = attrs.field(factory=list)

    @property
    def manager(self) -> float:
        """The share of vLLM's step that kvcore's manager takes."""
        pairs = zip(self.calls, self.alone, strict=True)
        return statistics.median(calls / own for calls, own in pairs)

    @property
    def besides(self) -> float:
        """The share of vLLM's step that the rest of the shadow takes."""
        rounds = zip(self.shadow, self.calls, self.alone, strict=True)
        return statistics.median((both - calls) / own for both, calls, own in rounds) - 1

    @property
    def seconds_besides(self) -> float:
        """The seconds of a step that the rest of the shadow takes."""
        rounds = zip(self.shadow, self.calls, self.alone, strict=True)
        return statistics.median(both - calls - own for both, calls, own in rounds)


def measure(case: Case, options: Options, model: str) -> Measured:
    """Run rounds of the same steps on all sides. Raises RuntimeError if kvcore differs."""
    own, behind = KINDS[case.is_async]
    os.environ["KVCORE_SHADOW"] = "1"
    shadow, alone = Drive(behind, case, model), Drive(own, case, model)
    os.environ["KVCORE_SHADOW"] = "0"
    in_charge = Drive(behind, case, model)
    managers: Any = shadow.scheduler.kv_cache_manager
    spent = clocked(in_charge.scheduler.kv_cache_manager)
    sides, measured = (alone, shadow, in_charge), Measured()
    gc.collect()
    gc.freeze()
    for _ in range(options.rounds):
        seconds, before = [0.0] * len(sides), spent.total
        for step in range(options.steps):
            # No side runs twice in a row, and each follows the other two equally often, since a
            # side finds in the processor's caches what the previous one left.
            for side in (0, 2, 1) if step % 2 else (0, 1, 2):
                seconds[side] += sides[side].step() / options.steps
        measured.alone.append(seconds[0])
        measured.shadow.append(seconds[1])
        measured.calls.append((spent.total - before) / options.steps)
    gc.unfreeze()
    if managers.tally.difference is not None or not managers.tally.num_calls:
        raise RuntimeError(f"{case}: {managers.tally.difference or 'nothing was compared'}")
    return measured


def main() -> int:
    """Measure the requested cases."""
    options = read_options()
    print("vLLM 0.33.0 with kvcore in its shadow; shares of vLLM's own step, in CPU time")
    print(f"{'':28}{'us per step':>12}{'manager':>10}{'besides':>10}{'us':>7}")
    for case, model in each_case(options):
        measured = measure(case, options, model)
        print(
            f"{case!s:28}{statistics.median(measured.alone) * 1e6:10,.0f}"
            f"{measured.manager:10.1%}{measured.besides:10.1%}"
            f"{measured.seconds_besides * 1e6:7,.0f}"
            f"{f'  more than {MOST:.0%}' if measured.besides > MOST else ''}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
