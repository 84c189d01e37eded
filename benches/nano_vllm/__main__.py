# SPDX-License-Identifier: Apache-2.0
"""Compare nano-vllm's scheduler over its own block manager and over kvcore: steps and cost.

Run: python -m benches.nano_vllm [--quick]. Clones nano-vllm first, outside the project, unless
KVCORE_NANO_VLLM names a checkout; if neither is available, it says why. The exit status is 1 if a
token or a step differs.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from benches.nano_vllm import checkout
from benches.nano_vllm.drive import Load, drive, random_load, tokens
from benches.nano_vllm.managers import keeping_copies, recording, repeating
from engines.nano_vllm.kvcore_nano_vllm import BlockManager, installed

SIZES = ((16, 16, 1500), (16, 128, 8000), (256, 16, 100), (256, 128, 600))
"""Block size, sequences and blocks. nano-vllm itself takes multiples of 256 only."""
SEEDS, ROUNDS = 200, 5


@attrs.define
class Comparison:
    """The number of random schedules that were equal, and the seeds of the others."""

    num_same: int = 0
    other_tokens: list[int] = attrs.field(factory=list)
    other_steps: list[int] = attrs.field(factory=list)

    @property
    def failed(self) -> bool:
        """Whether a sequence got other tokens, or a step differs for no known reason."""
        return bool(self.other_tokens or self.other_steps)


def compare(scheduler: Any, seeds: range) -> Comparison:
    """Compare kvcore with nano-vllm, unchanged and with an index of all blocks of a content."""
    found = Comparison()
    for seed in seeds:
        load = random_load(seed)
        own_tokens, own_steps, _ = drive(scheduler, load)
        with installed():
            mine, steps, manager = drive(scheduler, load)
        core = manager.manager
        core.check()
        if mine != own_tokens or core.num_free_blocks != load.num_blocks:
            found.other_tokens.append(seed)
        found.num_same += steps == own_steps
        with making(scheduler, keeping_copies(scheduler.BlockManager)):
            kept_tokens, kept_steps, _ = drive(scheduler, load)
        if (kept_tokens, kept_steps) != (mine, steps):
            found.other_steps.append(seed)
    return found


def served_load(
    block_size: int, max_num_seqs: int, num_blocks: int, num_prompts: int = 300
) -> Load:
    """Make chats after 8 system prompts of 600 tokens: 20 to 300 more tokens, 50 to 150 new."""
    draw = random.Random(1)
    systems = [tokens(draw, 600) for _ in range(8)]
    prompts = [
        draw.choice(systems) + tokens(draw, draw.randrange(20, 300)) for _ in range(num_prompts)
    ]
    num_new = [draw.randrange(50, 150) for _ in prompts]
    return Load(block_size, num_blocks, max_num_seqs, 2048, prompts, num_new)


@contextlib.contextmanager
def making(scheduler: Any, manager: Any) -> Iterator[None]:
    """Make nano-vllm's schedulers use this manager."""
    theirs, scheduler.BlockManager = scheduler.BlockManager, manager
    try:
        yield
    finally:
        scheduler.BlockManager = theirs


@attrs.frozen
class Cost:
    """The CPU microseconds of a scheduler's step over a manager.

    alone: those over a manager that only repeats the recorded answers.
    """

    whole: float
    alone: float

    @property
    def net(self) -> float:
        """The manager's part, without what a call of an empty method takes."""
        return self.whole - self.alone


def measure(
    scheduler: Any, load: Load, num_rounds: int, show: Callable[[str], None]
) -> tuple[Cost, Cost]:
    """Measure both managers: the least time of each step over the rounds, averaged."""
    managers = []
    for manager in (scheduler.BlockManager, BlockManager):
        answers: list[Any] = []
        with making(scheduler, recording(manager, answers)):
            drive(scheduler, load, seconds=[])
        managers += [manager, repeating(answers)]
    rounds: list[list[list[float]]] = [[] for _ in managers]
    for number in range(num_rounds):
        show(f"round {number + 1} of {num_rounds}")
        for runs, manager in zip(rounds, managers, strict=True):
            runs.append([])
            with making(scheduler, manager):
                drive(scheduler, load, seconds=runs[-1])
    means = [
        1e6 * sum(min(times) for times in zip(*runs, strict=True)) / len(runs[0]) for runs in rounds
    ]
    return Cost(*means[:2]), Cost(*means[2:])


def main() -> int:
    """Compare, and print the costs."""
    quick = "--quick" in sys.argv[1:]
    try:
        checkout.clone()
    except subprocess.CalledProcessError:  # Git has printed the reason
        print(f"nano-vllm: left out: {checkout.missing()}")
        return 0

    def show(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text} ", end="", file=sys.stderr, flush=True)

    with checkout.imported() as scheduler:
        seeds = range(20 if quick else SEEDS)
        found = compare(scheduler, seeds)
        print(
            f"{len(seeds)} random schedules: the same tokens in "
            f"{len(seeds) - len(found.other_tokens)}, the same steps and block ids in "
            f"{found.num_same}; if nano-vllm keeps all blocks of a content, in "
            f"{len(seeds) - len(found.other_steps)}"
        )
        if found.failed:
            print(f"other tokens: seeds {found.other_tokens}; other steps: {found.other_steps}")
        print("CPU time of a step in us: in the manager, net, and in the whole scheduler")
        print("block size, sequences   theirs   kvcore  ratio    theirs   kvcore  ratio")
        for size, seqs, blocks in SIZES:
            load = served_load(size, seqs, blocks)
            theirs, mine = measure(scheduler, load, 2 if quick else ROUNDS, show)
            pairs = [(theirs.net, mine.net), (theirs.whole, mine.whole)]
            cells = [f"{one:9.1f}{other:9.1f}{other / one:7.2f} " for one, other in pairs]
            print(f"{size:10}, {seqs:9}", *cells, flush=True)
    return int(found.failed)


if __name__ == "__main__":
    sys.exit(main())
