# SPDX-License-Identifier: Apache-2.0
"""Shrink records of runs with seeded bugs by the search of `kvcore shrink`.

`python -m tools.shrinks [LIBRARY]` uses the bugs of the Python core or, given a build of the twin
with the feature `mutants`, those of the twin. For each bug it records the calls of one simulated
run, 100,000 of them, with the bug active. It prints a table; the exit code is 1 if a record needs
more than CALLS_MAX calls or SECONDS_MAX seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.twin_mutants import load

CALLS_MAX, SECONDS_MAX = 20, 120
KEPT = "kept"
NUM_CALLS, CALLS_A_STEP, SEED = 100_000, 6, 1
TWIN_BUGS = (
    *("EvictKeepsIndex", "FreeForgetsABlock", "FreeHeadFirst", "CowNoCopy", "FullHit"),
    *("TruncateKeepsHashes", "SharedWrittenInPlace", "CancelKeepsKeys", "HitsCostNothing"),
    "CutNotReported",
)
PYTHON_BUGS = (
    *("m_no_cow", "m_cow_no_copy", "m_publishes_the_key_before", "m_evict_keeps_index"),
    *("m_full_block_published_late", "m_hits_cost_no_capacity", "m_free_forgets_a_block"),
    *("m_hash_without_parent", "m_preempt_keeps_open_batch_keys", "m_extra_ignored"),
)


def main() -> int:
    """Shrink a record of each bug; returns the exit code."""
    parser = argparse.ArgumentParser(description="Shrink records of runs with seeded bugs.")
    parser.add_argument(
        "library", nargs="?", help="a twin built with the features python and mutants"
    )
    parser.add_argument(
        "--bug", action="append", help="a seeded bug, may be repeated; by default ten of them"
    )
    parser.add_argument("--calls", type=int, default=NUM_CALLS)
    given = parser.parse_args()
    twin = load(given.library) if given.library else None
    from kvcore.replay.records.shrink import shrink  # kvcore uses the loaded twin

    config, items = simulated(given.calls)
    row = "{:<32} {:>8} {:>8} {:>6} {:>8}  {}".format
    print(row("seeded bug", "recorded", "fails at", "calls", "seconds", "what fails"), flush=True)
    bad = 0
    for bug in given.bug or (TWIN_BUGS if twin else PYTHON_BUGS):
        with tempfile.TemporaryDirectory() as folder, seeded(twin, bug):
            record(Path(folder) / "record", config, items, "rust" if twin else "python")
            began = time.monotonic()
            done = shrink(Path(folder) / "record", ["python", "rust"])
            seconds = time.monotonic() - began
        if done is None:
            print(row(bug, f"{len(items):,}", "-", "-", f"{seconds:.1f}", "nothing"), flush=True)
            bad += 1
            continue
        bad += len(done.calls) > CALLS_MAX or seconds > SECONDS_MAX
        figures = f"{done.num_calls:,}", f"{done.first_at:,}", len(done.calls), f"{seconds:.1f}"
        print(row(bug, *figures, done.broken.name), flush=True)
    return int(bool(bad))


@contextmanager
def seeded(twin: ModuleType | None, bug: str) -> Iterator[None]:
    """Activate a bug in the twin, or in the Python core."""
    from kvcore.check.mutants import MUTANTS, Patcher

    if twin is not None:
        twin.seed(bug)
        try:
            yield
        finally:
            twin.seed(None)
        return
    with Patcher() as patcher:
        next(each for each in MUTANTS if each.name == bug).patch(patcher)
        yield


def simulated(num_calls: int) -> tuple[Any, Any]:
    """Return a configuration and the first calls of a simulated run on the twin, without a bug."""
    from kvcore.check.simulate.runs import simulate
    from kvcore.check.simulate.setting import Fixed
    from kvcore.manager import KVCacheManager
    from kvcore.record.recorder import Recorder
    from kvcore.replay.records.attempt import read_items
    from kvcore.types.config import Config

    made: list[KVCacheManager] = []

    def make(config: Config) -> KVCacheManager:
        made.append(KVCacheManager(config, "rust"))
        made[0].start_recording(Recorder(folder, segment_bytes=1 << 30))
        return made[0]

    config = Config(
        401,
        4,
        num_host_blocks=200,
        max_in_flight=2,
        duplicates="merge",
        hash_seed=b"simulate",
        null_block=True,
    )
    fixed = Fixed(config=config, num_requests=24, further=())
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(SEED, num_calls // CALLS_A_STEP, backend=[("rust", make)], fixed=fixed)
        assert run.failure is None, run.failure
        made[0].stop_recording()
        _, items = read_items(folder, "rust")
    return config, items[:num_calls]


def record(folder: Path, config: Any, items: Any, backend: Any) -> None:
    """Record calls on a backend, up to the first call that a bug keeps from ending."""
    from kvcore.replay.records.attempt import attempt
    from kvcore.replay.records.guarded import in_child

    in_child(
        lambda going: attempt(config, items, [backend], KEPT, going=going, folder=folder) and None
    )


if __name__ == "__main__":
    sys.exit(main())
