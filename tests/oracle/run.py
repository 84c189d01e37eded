# SPDX-License-Identifier: Apache-2.0
"""A run: a configuration and moves, all determined by a seed. A failing run is made small.

`python -m tests.oracle.run SEED` makes a run again. If it has a finding, it is cut down to the
moves that it needs, and its calls are printed as a program. With `--calls N` it goes on with the
next seeds until that number of calls is made.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import attrs

from kvcore import Config
from tests.oracle import misuse, moves_ahead, moves_batches, moves_loads, moves_pool, moves_requests
from tests.oracle.backends import Language
from tests.oracle.configs import draw_config
from tests.oracle.engine import Engine
from tests.oracle.finding import Finding, demand

NUM_MOVES = (40, 120, 120, 400)
EACH_LOADS, LOADS_WEIGHT = 6, 80
"""One of this many runs spreads failed loads, with this weight among its moves."""
LOCKSTEP_SHARE = 0.15
"""This many of the runs make each call in both languages; the others have one at a time."""
MOVES: dict[Callable[[Engine], None], int] = {
    moves_requests.add: 6,
    moves_requests.extend: 3,
    moves_requests.admit: 12,
    moves_requests.grow: 8,
    moves_requests.append: 14,
    moves_ahead.run_ahead: 3,
    moves_ahead.follow: 4,
    moves_ahead.guess: 3,
    moves_ahead.receive: 4,
    moves_requests.draft: 4,
    moves_requests.accept: 4,
    moves_requests.cache: 2,
    moves_requests.fork: 4,
    moves_requests.free: 5,
    moves_requests.remove: 4,
    moves_requests.truncate: 4,
    moves_requests.unschedule: 3,
    moves_requests.rewind: 2,
    moves_requests.trim: 1,
    moves_requests.stale_hit: 2,
    moves_requests.chase: 3,
    moves_batches.take: 14,
    moves_batches.execute: 12,
    moves_batches.complete: 10,
    moves_batches.cancel: 3,
    moves_batches.finish_transfer: 5,
    moves_batches.store: 3,
    moves_batches.load: 3,
    moves_batches.finish_operation: 6,
    moves_pool.swap_out: 4,
    moves_pool.swap_in: 5,
    moves_pool.pin: 1,
    moves_pool.unpin: 2,
    moves_pool.evict: 1,
    moves_pool.reset: 1,
    moves_pool.snapshot: 1,
    moves_pool.ask: 1,
    misuse.misuse: 3,
    moves_loads.spread: 0,
}


@attrs.frozen(kw_only=True)
class Run:
    """The result of a run. wrong: the finding, None without one. moves: those that were made.

    reached: how often each call was made, and each refusal and error was met.
    """

    seed: int
    config: Config
    num_calls: int
    wrong: str | None
    moves: tuple[int, ...]
    program: str
    reached: Counter[str]


def run(
    seed: int, chosen: Sequence[int] | None = None, languages: tuple[Language, ...] | None = None
) -> Run:
    """Make the run of a seed, or only these of its moves; languages: those of the seed if None."""
    rng = Random(seed)
    config, num_moves = draw_config(rng), rng.choice(NUM_MOVES)
    drawn: tuple[Language, ...] = (rng.choice(("rust", "rust", "rust", "python")),)
    if rng.random() < LOCKSTEP_SHARE:
        drawn = ("python", "rust")
    engine = Engine(config, languages or drawn, restores=languages is None)
    weights = MOVES | {moves_loads.spread: 0 if seed % EACH_LOADS else LOADS_WEIGHT}
    kinds = rng.choices(list(MOVES), list(weights.values()), k=num_moves)
    chosen = range(num_moves) if chosen is None else chosen
    wrong, made = None, []
    try:
        for number in chosen:
            engine.rng = Random(f"{seed} {number}")
            engine.probing = engine.rng.random() < 0.2
            made.append(number)
            kinds[number](engine)
            engine.check_counts()
            engine.note_reporters()
        engine.rng = Random(seed)
        leave_all(engine)
    except Finding as finding:
        wrong = str(finding)
    return Run(
        seed=seed,
        config=config,
        num_calls=engine.manager.num_calls,
        wrong=wrong,
        moves=tuple(made),
        program=engine.manager.program() if wrong is not None else "",
        reached=engine.manager.reached,
    )


def leave_all(engine: Engine) -> None:
    """End everything and remove every request; then all blocks are free and no key is left."""
    for _ in range(2):
        moves_batches.finish_all(engine)
        for request in engine.known.values():
            freed = engine.free(request)
            demand(freed, f"{request.name} cannot be freed, and nothing is scheduled")
    for name in engine.known:
        engine.call("remove_request", name)
    while engine.pins:
        moves_pool.unpin(engine)
    moves_pool.reset(engine)
    free = engine.manager.ask("num_free_blocks"), engine.manager.ask("num_free_host_blocks")
    want = engine.config.num_usable_blocks, engine.config.num_host_blocks
    demand(free == want, f"without requests {free} blocks are free, of {want}")


def shorten(found: Run, languages: tuple[Language, ...] | None = None) -> Run:
    """Return a run with a finding and as few of the moves as a greedy search needs."""
    size = len(found.moves) // 2
    while size:
        start = 0
        while start < len(found.moves):
            fewer = found.moves[:start] + found.moves[start + size :]
            shorter = run(found.seed, fewer, languages)
            if shorter.wrong is not None and _kind(shorter.wrong) == _kind(found.wrong):
                found = shorter
            else:
                start += size
        size //= 2
    return found


def _kind(wrong: str | None) -> str:
    """Return the words that a finding begins with, without numbers."""
    return "".join(each for each in str(wrong) if not each.isdigit())[:30]


def main() -> int:
    """Make the runs that are asked for. Returns 1 if one has a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", help="the run to make, or the first of them")
    parser.add_argument("--calls", type=int, default=1, help="number of calls to make")
    requested = parser.parse_args()
    seed, num_calls = requested.seed or 0, 0
    while num_calls < requested.calls:
        made = run(seed)
        num_calls += made.num_calls
        if made.wrong is not None:
            print(run_text(shorten(made)))
            return 1
        seed += 1
    print(f"{num_calls:,} calls in {seed - (requested.seed or 0):,} runs, no finding")
    return 0


def run_text(found: Run) -> str:
    """Describe a run with a finding: its program, its seed and its moves."""
    return f"{found.program}\n# seed {found.seed}, moves {found.moves}: {found.wrong}"


if __name__ == "__main__":
    sys.exit(main())
