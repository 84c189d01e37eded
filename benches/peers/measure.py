# SPDX-License-Identifier: Apache-2.0
"""Run peers side by side, and what their rounds say.

One process a peer and a list; in a round each peer runs once, so that whatever else the
machine does falls on all of them. A cost is the sum over steps of the least time of each step over
rounds, net of the same of the empty driver; a spread is over the rounds' own ratios.
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
    """One run of one peer: CPU seconds of each step, and what it found."""

    steps: Sequence[float]
    hits: Sequence[int]  # tokens of each look-up
    memory: tuple[float, float]  # megabytes: the manager made, and at the end


@attrs.frozen
class Runs:
    """The rounds of one peer on one list."""

    rounds: list[Round] = attrs.field(factory=list)

    @property
    def least(self) -> list[float]:
        """The least time of each step."""
        return [min(times) for times in zip(*(one.steps for one in self.rounds), strict=True)]

    @property
    def totals(self) -> list[float]:
        """The whole list, a round."""
        return [sum(one.steps) for one in self.rounds]

    @property
    def hits(self) -> tuple[int, ...]:
        """Hit tokens of each look-up, the same in every round."""
        (found,) = {tuple(one.hits) for one in self.rounds}
        return found

    @property
    def memory(self) -> tuple[float, float]:
        """The least over rounds."""
        made, end = zip(*(one.memory for one in self.rounds), strict=True)
        return min(made), min(end)


@attrs.frozen
class Side:
    """All peers on one list."""

    work: Work
    runs: dict[str, Runs]

    def null(self, peer: str) -> Runs:
        """The empty driver of a peer's language."""
        return self.runs[PEERS[peer].null]

    def cost(self, peer: str, steps: Sequence[int] | None = None) -> float:
        """Net CPU seconds of a peer, of the whole list or of some steps."""
        mine, driver = self.runs[peer].least, self.null(peer).least
        chosen = range(len(mine)) if steps is None else steps
        return sum(mine[step] for step in chosen) - sum(driver[step] for step in chosen)

    def ratio(self, slow: str, fast: str) -> tuple[float, float, float]:
        """How many times as fast, and the least and the greatest over rounds."""

        def net(peer: str) -> list[float]:
            pairs = zip(self.runs[peer].totals, self.null(peer).totals, strict=True)
            return [total - driver for total, driver in pairs]

        rounds = [one / other for one, other in zip(net(slow), net(fast), strict=True)]
        return self.cost(slow) / self.cost(fast), min(rounds), max(rounds)

    def a_block(self, peer: str) -> float:
        """Seconds a block of tokens that an unshared pool would compute."""
        return self.cost(peer) / num_blocks_computed(self.work)

    def step(self, peer: str, share: float) -> float:
        """Seconds of the step that so large a share of steps is no longer than."""
        ordered = sorted(self.runs[peer].least)
        return ordered[round(share * (len(ordered) - 1))]

    def decode_step(self, peer: str) -> float:
        """Net seconds of a step that decodes for all requests and does nothing else, the mean."""
        steps = self.work.pure_decodes()
        return self.cost(peer, steps) / len(steps)


def num_blocks_computed(work: Work) -> float:
    """Blocks of all tokens that the list computes, anew after each preemption."""
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
    """One peer on one list, in a process of its own. Raises RuntimeError with what it said."""
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
