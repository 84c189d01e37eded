# SPDX-License-Identifier: Apache-2.0
"""Many damaged inputs for every door, drawn by Hypothesis on all cores.

    python -m tests.bytes.run [--inputs N] [DOOR ...]

Piece number n of a door is drawn from the seed n, so that a run finds what the one before found. A
process has little more memory than it needs to start with, so that a decoder fails if it allocates
as much as a number in the bytes says. Ends with code 1 if a property does not hold, and prints the
bytes, made small.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from random import Random

import attrs
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.bytes.damage import Damager
from tests.bytes.doors import DOORS
from tests.bytes.of_runtime import RUNTIME_DOORS
from tests.bytes.texts import TEXT_DOORS

INPUTS = 10**6
PIECE = 2000
DRAWN_BYTES = 64
DRAWN_TOGETHER = 8
"""Inputs of one example of Hypothesis, whose own work is most of the time of one that is alone."""
SECONDS_MAX = 20.0
MEMORY_MAX = 2**30
SLOW = {"replays": 20}
"""How many times fewer inputs these doors take: each makes calls on a manager."""
ALL = {door.name: door for door in (*DOORS, *TEXT_DOORS, *RUNTIME_DOORS)}


@cache
def damager(name: str) -> Damager:
    """Return the source of a door's inputs, in this process."""
    made = ALL[name].make()
    pages = Path("/proc/self/statm")
    if pages.exists():
        size = int(pages.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_MAX, resource.RLIM_INFINITY))
    return made


class Drawn(Random):
    """Random numbers read from bytes, followed by zeros.

    Why: Hypothesis draws these bytes at once, in two thirds of the time of `st.randoms`.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._bits = int.from_bytes(data, "little")

    def getrandbits(self, k: int) -> int:
        """Return the next k bits."""
        bits = self._bits & ((1 << k) - 1)
        self._bits >>= k
        return bits


@attrs.define
class Tried:
    """The result of some inputs. broken: the smallest that broke a property, and how."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    broken: str = ""


def try_piece(name: str, size: int, number: int) -> Tried:
    """Try this many inputs, drawn from a seed. seconds: of the processor."""
    tried, make, read = Tried(), damager(name).make, ALL[name].read
    last = b""

    @seed(number)
    @settings(
        max_examples=-(-size // DRAWN_TOGETHER),
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(
        data=st.binary(min_size=DRAWN_TOGETHER * DRAWN_BYTES, max_size=DRAWN_TOGETHER * DRAWN_BYTES)
    )
    def hold(data: bytes) -> None:
        nonlocal last
        for start in range(0, len(data), DRAWN_BYTES):
            last = make(Drawn(data[start : start + DRAWN_BYTES]))
            began = time.perf_counter()
            tried.refused += read(last)
            tried.inputs += 1
            assert time.perf_counter() - began < SECONDS_MAX, "it takes too long"

    start = time.process_time()
    try:
        hold()
    except BaseException:  # a panic of the twin is no Exception
        tried.broken = f"{traceback.format_exc(limit=-4)}{name}: {last!r}"
    tried.seconds = time.process_time() - start
    return tried


def try_door(name: str, inputs: int) -> bool:
    """Try a door, and tell of it; whether every property held."""
    requested = inputs // SLOW.get(name, 1)
    piece = min(PIECE, max(1, requested // 2))
    began, total = time.perf_counter(), Tried()
    with ProcessPoolExecutor() as pool:
        for tried in pool.map(partial(try_piece, name, piece), range(-(-requested // piece))):
            total.inputs += tried.inputs
            total.refused += tried.refused
            total.seconds += tried.seconds
            if tried.broken and not total.broken:
                total.broken = tried.broken
                print(total.broken, flush=True)
    verdict = "a property is broken" if total.broken else "every property holds"
    spent = f"{time.perf_counter() - began:.0f} s, {total.seconds:.0f} s of processors"
    counts = f"{total.inputs:>9,} inputs, {total.refused:>9,} refused"
    print(f"{name:<9} {counts}, {verdict}; {spent}", flush=True)
    return not total.broken


def main() -> int:
    """Try every door, or those named; the exit code."""
    description = "Many damaged inputs for every door, drawn by Hypothesis on all cores."
    parser = argparse.ArgumentParser(prog="python -m tests.bytes.run", description=description)
    parser.add_argument("--inputs", type=count, default=INPUTS, help=f"per door ({INPUTS:,})")
    parser.add_argument("doors", nargs="*", metavar="DOOR", help=f"of {', '.join(ALL)}")
    options = parser.parse_args()
    unknown = [name for name in options.doors if name not in ALL]
    if unknown:
        parser.error(f"no door {', '.join(unknown)}; the doors are {', '.join(ALL)}")
    held = [try_door(name, options.inputs) for name in options.doors or ALL]
    return int(not all(held))


def count(text: str) -> int:
    """Parse a number of inputs, at least 1."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
