# SPDX-License-Identifier: Apache-2.0
"""Many damaged inputs for every door, by all cores.

    python -m tests.bytes.run [INPUTS] [DOOR ...]

Rules: piece number n of a door is made from the seed n, so that a run finds what the one before
found. A process has little more memory than it needs to start with, so that what allocates as much
as a number in the bytes says fails. Ends with code 1 where a property does not hold, and prints the
bytes.
"""

from __future__ import annotations

import re
import resource
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from random import Random

import attrs

from tests.bytes.damage import Damager
from tests.bytes.doors import DOORS
from tests.bytes.of_runtime import RUNTIME_DOORS
from tests.bytes.texts import TEXT_DOORS

INPUTS = 10**6
PIECE = 2000
SECONDS_MAX = 20.0
MEMORY_MAX = 2**30
SLOW = {"replays": 20}
"""Doors that take so many times fewer inputs: each makes calls on a manager."""
ALL = {door.name: door for door in (*DOORS, *TEXT_DOORS, *RUNTIME_DOORS)}


@cache
def damager(name: str) -> Damager:
    """What makes a door's inputs, in this process."""
    made = ALL[name].make()
    pages = Path("/proc/self/statm")
    if pages.exists():
        size = int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_MAX, resource.RLIM_INFINITY))
    return made


@attrs.define
class Tried:
    """What came of some inputs. broken: those that broke a property, and how."""

    refused: int = 0
    seconds: float = 0.0
    broken: list[tuple[bytes, str]] = attrs.field(factory=list)


def try_piece(name: str, size: int, seed: int) -> Tried:
    """Try so many inputs of a seed. seconds: of the processor."""
    random, tried = Random(seed), Tried()
    make, start = damager(name).make, time.process_time()
    for _ in range(size):
        data = make(random)
        began = time.perf_counter()
        try:
            tried.refused += ALL[name].read(data)
            assert time.perf_counter() - began < SECONDS_MAX, "it takes too long"
        except BaseException:  # a panic of the twin is no Exception
            tried.broken.append((data, traceback.format_exc(limit=-4)))
    tried.seconds = time.process_time() - start
    return tried


def try_door(name: str, inputs: int) -> bool:
    """Try a door, and tell of it; whether every property held."""
    count = inputs // SLOW.get(name, 1)
    piece = min(PIECE, max(1, count // 2))
    began, seconds, refused, num_broken = time.perf_counter(), 0.0, 0, 0
    smallest: dict[str, int] = {}
    with ProcessPoolExecutor() as pool:
        for tried in pool.map(partial(try_piece, name, piece), range(-(-count // piece))):
            refused += tried.refused
            seconds += tried.seconds
            num_broken += len(tried.broken)
            for data, text in tried.broken:
                kind = re.sub(r"\d+", "", text)
                if len(data) < smallest.get(kind, len(data) + 1):
                    smallest[kind] = len(data)
                    print(text, f"{name}: {data!r}", sep="\n", flush=True)
    said = f"{count:>9,} inputs, {refused:>9,} refused, {num_broken:,} broke a property"
    spent = f"{time.perf_counter() - began:.0f} s, {seconds:.0f} s of processors"
    print(f"{name:<9} {said}; {spent}", flush=True)
    return num_broken == 0


def main() -> int:
    """Try every door, or those named; the exit code."""
    inputs = int(sys.argv[1]) if sys.argv[1:] else INPUTS
    held = [try_door(name, inputs) for name in sys.argv[2:] or ALL]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
