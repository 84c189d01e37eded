# SPDX-License-Identifier: Apache-2.0
"""Run peers side by side, and evaluate their rounds.

Each peer and list has a process of its own; in a round each peer runs once, so that other load on
the machine affects all of them. A cost is the sum over steps of the least time of each step over
the rounds, minus the cost of the empty driver; a spread is over the ratios of single rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from benches.peers import install
from benches.peers.cases import PEERS
from benches.peers.work import DECODE, FINISH, PREEMPT, PREFILL, Work


@attrs.frozen
class Round:
    """One run of one peer: CPU seconds of each step, hits, and memory."""

    steps: Sequence[float]
    hits: Sequence[int]  # tokens of each look-up
    memory: tuple[float, float]  # megabytes: the manager made, and at the end


@attrs.frozen
class Runs:
    """The rounds of one peer on one list."""

    rounds: list[Round] = attrs.field(factory=list)

    @property
    def least(self) -> list[float]:
        """Return the least time of each step."""
        return [min(times) for times in zip(*(one.steps for one in self.rounds), strict=True)]

    @property
    def totals(self) -> list[float]:
        """Return the time of the whole list, per round."""
        return [sum(one.steps) for one in self.rounds]

    @property
    def hits(self) -> tuple[int, ...]:
        """Return the hit tokens of each look-up, which are equal in every round."""
        (found,) = {tuple(one.hits) for one in self.rounds}
        return found

    @property
    def memory(self) -> tuple[float, float]:
        """Return the least megabytes over rounds."""
        made, end = zip(*(one.memory for one in self.rounds), strict=True)
        return min(made), min(end)


@attrs.frozen
class Side:
    """All peers on one list."""

    work: Work
    runs: dict[str, Runs]

    def null(self, peer: str) -> Runs:
        """Return the runs of the empty driver in a peer's language."""
        return self.runs[PEERS[peer].null]

    def cost(self, peer: str, steps: Sequence[int] | None = None) -> float:
        """Return the net CPU seconds of a peer for the whole list or some steps."""
        mine, driver = self.runs[peer].least, self.null(peer).least
        chosen = range(len(mine)) if steps is None else steps
        return sum(mine[step] for step in chosen) - sum(driver[step] for step in chosen)

    def ratio(self, slow: str, fast: str) -> tuple[float, float, float]:
        """Return how many times as fast one peer is as another, and the extremes over rounds."""

        def net(peer: str) -> list[float]:
            pairs = zip(self.runs[peer].totals, self.null(peer).totals, strict=True)
            return [total - driver for total, driver in pairs]

        rounds = [one / other for one, other in zip(net(slow), net(fast), strict=True)]
        return self.cost(slow) / self.cost(fast), min(rounds), max(rounds)

    def a_block(self, peer: str) -> float:
        """Return the seconds per block of tokens that a pool without sharing would compute."""
        return self.cost(peer) / num_blocks_computed(self.work)

    def step(self, peer: str, share: float) -> float:
        """Return the given quantile of step times in seconds."""
        ordered = sorted(self.runs[peer].least)
        return ordered[round(share * (len(ordered) - 1))]

    def decode_step(self, peer: str) -> float:
        """Return the mean net seconds of a step that only decodes, for all requests."""
        steps = self.work.pure_decodes()
        return self.cost(peer, steps) / len(steps)


def num_blocks_computed(work: Work) -> float:
    """Return the blocks that the list computes, counting them again after each preemption."""
    total = 0
    computed = [0] * len(work.prompts)
    for step in work.steps:
        for code, request, end in step:
            if code == DECODE:
                requests = work.decodes[request].requests
                total += len(requests)
                for each in requests:
                    computed[each] += 1
            elif code == PREFILL:
                total += end - computed[request]
                computed[request] = end
            elif code in (PREEMPT, FINISH):
                computed[request] = 0
    return total / work.block_size


def run_once(peer: str, file: Path) -> Round:
    """Run one peer on one list in a process. Raises RuntimeError with its error output."""
    family = PEERS[peer].family
    if family == "rust":
        command = [str(install.program()), peer, str(file)]
    else:
        own = family in install.PACKAGES
        python = str(install.python_of(family)) if own else sys.executable
        command = [python, "-m", "benches.peers.driver", peer, str(file)]
    quiet = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet)
    if ran.returncode != 0:
        raise RuntimeError(f"{peer} on {file} failed:\n{ran.stderr[-2000:]}")
    said = json.loads(ran.stdout.splitlines()[-1])
    return Round(said["steps"], said["hits"], tuple(said["memory"]))


def compare(
    peers: Sequence[str],
    file: Path,
    work: Work,
    num_rounds: int,
    show: Callable[[str], None],
) -> Side:
    """Run the peers and the drivers they need, round by round."""
    runs = {peer: Runs() for peer in [*dict.fromkeys(PEERS[name].null for name in peers), *peers]}
    for number in range(num_rounds):
        for peer, mine in runs.items():
            show(f"{file.stem}: round {number + 1} of {num_rounds}, {peer}")
            mine.rounds.append(run_once(peer, file))
    return Side(work, runs)
