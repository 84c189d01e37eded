# SPDX-License-Identifier: Apache-2.0
"""What a facade's call costs beside what it asks of the core.

Run: python -m benches.legacy [--rounds 15] [--backend rust]. A story is played on a facade once to
note which transitions each of its phases makes; then the story and those transitions alone are
timed in turn, in CPU time of this thread, and the least of the rounds is kept. Only the ratios mean
something; `MOST` is what a facade may cost. A phase is some hundred calls, so that the clock does
not count. Each facade brings its stories: `STORIES` of `benches/legacy_*.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvcore.legacy.backing import BackendName, Backing

MOST = 3.0
BACKENDS: tuple[BackendName, ...] = ("rust", "python")
Work = Callable[..., object]
Calls = list[tuple[str | Work, tuple[Any, ...]]]


class Story(Protocol):
    """A facade and what is done with it.

    A story may have `core_functions`: what else of the core its facade calls, such as hashing, as
    pairs of a module and a name.
    """

    backing: Backing
    """The blocks behind the facade, fresh."""

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Names and work, to be done in order before the next one is asked for."""
        ...


class Noting:
    """Blocks that note each call that reaches them."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self.calls: Calls = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._blocks, name)

        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return method(*args)

        return call

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does the same and is noted; an iterator is read to its end."""

        def read(*args: Any, **options: Any) -> Any:
            answer = function(*args, **options)
            return list(answer) if isinstance(answer, Iterator) else answer

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((partial(read, **options), args))
            return read(*args, **options)

        return call


def note(story: Story) -> dict[str, Calls]:
    """The transitions of each phase of a story, which is played."""
    noting = Noting(story.backing._blocks)
    story.backing._blocks = noting
    places = getattr(story, "core_functions", ())
    functions = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, functions, strict=True):
        setattr(module, name, noting.wrap(function))
    found: dict[str, Calls] = {}
    for name, work in story.phases():
        noting.calls = []
        work()
        found[name] = noting.calls
        noting.calls = []
    for (module, name), function in zip(places, functions, strict=True):
        setattr(module, name, function)
    return found


def time_story(story: Story) -> dict[str, float]:
    """Seconds of each phase of a story."""
    return {name: seconds(work) for name, work in story.phases()}


def time_calls(backing: Backing, noted: dict[str, Calls]) -> dict[str, float]:
    """Seconds of the same transitions on fresh blocks."""
    found = {}
    for name, calls in noted.items():
        bound = [
            (getattr(backing._blocks, method) if isinstance(method, str) else method, args)
            for method, args in calls
        ]
        found[name] = seconds(partial(call_all, bound))
    return found


def call_all(bound: list[tuple[Work, tuple[Any, ...]]]) -> None:
    """Make calls, one after the other."""
    for method, args in bound:
        method(*args)


def seconds(work: Work) -> float:
    """CPU seconds of this thread that some work takes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(make: Callable[[BackendName], Story], backend: BackendName, rounds: int) -> None:
    """Print a line for each phase of a story."""
    noted = note(make(backend))
    facade = dict.fromkeys(noted, float("inf"))
    beneath = dict(facade)
    for _ in range(rounds):
        for least, times in (
            (facade, time_story(make(backend))),
            (beneath, time_calls(make(backend).backing, noted)),
        ):
            for name, value in times.items():
                least[name] = min(least[name], value)
    for name, calls in noted.items():
        ratio = facade[name] / beneath[name] if calls else float("nan")
        mark = f"  more than {MOST}" if ratio > MOST else ""  # nothing beneath has no ratio
        print(
            f"{make.__name__:24} {backend:7} {name:34} {len(calls):6} transitions"
            f" {1e6 * facade[name]:9.0f} us {ratio:6.2f} times{mark}"
        )


def main() -> None:
    """Measure the stories of all facades."""
    parser = argparse.ArgumentParser(description="What a facade's call costs.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", choices=BACKENDS)
    options = parser.parse_args()
    gc.disable()
    for path in sorted(Path(__file__).parent.glob("legacy_*.py")):
        for make in importlib.import_module(f"benches.{path.stem}").STORIES:
            for backend in (options.backend,) if options.backend else BACKENDS:
                measure(make, backend, options.rounds)


if __name__ == "__main__":
    main()
