# SPDX-License-Identifier: Apache-2.0
"""Compare facades of kvcore.legacy with the managers that they replace, call by call.

Run: python -m benches.peers.legacy [--rounds 9] [--facade v0] [--markdown]. Installs the original
release if it is missing, and continues in its environment, where both can be imported. A round
plays a story on the original and on the facade over both backends, in turn, in CPU time of one
thread; the least of the rounds is kept. Only the ratios of one run mean something. Each facade
brings its stories: `BESIDE` of `benches/peers/legacy_*.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Protocol

import attrs

from benches.legacy import BACKENDS, Work, seconds
from benches.peers import install
from benches.peers.table import print_table
from kvcore.legacy.blocks.blocks import BackendName

FAMILY = "vllm085"
INSIDE = "--inside"
ROOT = Path(__file__).parents[2]


class Story(Protocol):
    """An unused manager, and the work to do with it."""

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield names and work; each work must run before the next one is requested."""
        ...


@attrs.frozen
class Beside:
    """A story on an original manager and on its facade."""

    title: str
    original: Callable[[], Story]
    facade: Callable[[BackendName], Story]


@attrs.frozen
class Row:
    """One phase: microseconds of one call of the original, and of the facade by backend."""

    phase: str
    original: float
    facade: dict[BackendName, float]

    def cells(self) -> list[str]:
        """Return the row as columns."""
        shown = [self.phase, f"{self.original:.2f}"]
        for backend in BACKENDS:
            mine = self.facade[backend]
            shown += [f"{mine:.2f}", f"{self.original / mine:.2f}x"]
        return shown


HEADS = ["", "original us", *(head for each in BACKENDS for head in (f"{each} us", "faster by"))]


def play(story: Story) -> dict[str, float]:
    """Return the microseconds per call of each phase; phases of one name are averaged."""
    total: dict[str, float] = {}
    num_calls: dict[str, int] = {}
    for name, work in story.phases():
        total[name] = total.get(name, 0.0) + seconds(work)
        num_calls[name] = num_calls.get(name, 0) + (len(work) if isinstance(work, Sized) else 1)
    return {name: 1e6 * value / num_calls[name] for name, value in total.items()}


def compare(pair: Beside, num_rounds: int) -> list[Row]:
    """Play the rounds. Raises ValueError if the two have different phases."""
    least: dict[str, dict[str, float]] = {}
    for _ in range(num_rounds):
        sides: dict[str, Callable[[], Story]] = {"original": pair.original}
        sides |= {backend: partial(pair.facade, backend) for backend in BACKENDS}
        for side, make in sides.items():
            found = play(make())
            known = least.setdefault(side, found)
            if known.keys() != found.keys():
                raise ValueError(f"{pair.title}: {side} has other phases than before")
            least[side] = {name: min(known[name], value) for name, value in found.items()}
    phases = least["original"]
    if any(each.keys() != phases.keys() for each in least.values()):
        raise ValueError(f"{pair.title}: the original and the facade have other phases")
    return [
        Row(name, value, {backend: least[backend][name] for backend in BACKENDS})
        for name, value in phases.items()
    ]


def stories(facade: str) -> Iterator[Beside]:
    """Yield the stories of all facades, or of one."""
    for path in sorted(Path(__file__).parent.glob("legacy_*.py")):
        if facade in ("", path.stem.removeprefix("legacy_")):
            yield from importlib.import_module(f"benches.peers.{path.stem}").BESIDE


def print_story(title: str, rows: Sequence[Row], *, markdown: bool) -> None:
    """Print one story as a table, with the sum of the means of its calls."""
    total = {each: sum(row.facade[each] for row in rows) for each in BACKENDS}
    table = [row.cells() for row in rows]
    if len(rows) > 1:
        table.append(Row("one of each", sum(row.original for row in rows), total).cells())
    print(f"\n{title}\n")
    print_table(HEADS, table, markdown=markdown)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benches.peers.legacy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--facade", default="", help="one facade, such as v0; by default all")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def go_inside(arguments: Sequence[str]) -> int:
    """Run again in the peer's environment."""
    install.install([FAMILY])
    command = [str(install.python_of(FAMILY)), "-m", "benches.peers.legacy", *arguments, INSIDE]
    quiet = {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V1": "0",
    }
    return subprocess.run(command, check=False, env={**os.environ, **quiet}).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print."""
    options = read_options(arguments)
    if not options.inside:
        return go_inside(sys.argv[1:] if arguments is None else arguments)
    gc.disable()
    for pair in stories(options.facade):
        print_story(pair.title, compare(pair, options.rounds), markdown=options.markdown)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
