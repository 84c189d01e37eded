# SPDX-License-Identifier: Apache-2.0
"""Measure what a facade's call costs compared with the core calls that it makes.

Run: python -m benches.legacy [--rounds 15] [--backend rust] [--facade v0]. A story is played on a
facade once to record the core calls of each phase; then the story and the recorded calls run in
turn, in CPU time of this thread, and the least of the rounds is kept. A phase has some hundred
calls, so that reading the clock does not matter.

Beneath a call are the transitions that it makes, and hashing if the core does it: the ratio is
the call's time by theirs, and `MOST` is what it may be. What a call reads of the core is told
beside it and counts as the facade's own, so that asking less makes a facade cheaper. Phases that
change nothing have no ratio and are listed by themselves. Microseconds are those of one call; only
within a run do they compare. Each facade brings its stories: `STORIES` of `benches/legacy_*.py`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import attrs

from kvcore.legacy.blocks.blocks import MODULES, BackendName, Backing

MOST = 3.0
BACKENDS: tuple[BackendName, ...] = ("rust", "python")
Work = Callable[[], object]
Calls = list[tuple[str | Callable[..., object], tuple[Any, ...]]]


class Story(Protocol):
    """A facade and what is done with it.

    A story may have `core_functions`: what else of the core its facade calls, such as hashing, as
    pairs of a module and a name.
    """

    backing: Backing
    """The blocks behind the facade, not yet used."""

    def phases(self) -> Iterator[tuple[str, Work]]:
        """Yield names and work; each work must run before the next one is requested."""
        ...


class Each:
    """Work that calls a function with each row of arguments, and keeps the results."""

    def __init__(self, call: Callable[..., Any], *columns: Iterable[object]) -> None:
        self.call = call
        self.rows = list(zip(*columns, strict=True))
        self.answers: list[Any] = []

    def __call__(self) -> None:
        call = self.call
        self.answers = [call(*row) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)


@attrs.define
class Noted:
    """The core calls of a phase, and the number of facade calls that made them."""

    num_calls: int
    transitions: Calls
    reads: Calls


class Noting:
    """Blocks that record each call that reaches them."""

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks
        self.transitions: Calls = []
        self.reads: Calls = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._blocks, name)
        calls = self.transitions if is_transition(name) else self.reads

        def call(*args: Any) -> Any:
            lists = (each[:] if isinstance(each, list) else each for each in args)
            calls.append((name, tuple(lists)))  # copies, since a table keeps changing
            return method(*args)

        return call

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are recorded; an iterator is read to its end."""

        def read(*args: Any, **options: Any) -> Any:
            answer = function(*args, **options)
            return list(answer) if isinstance(answer, Iterator) else answer

        def call(*args: Any, **options: Any) -> Any:
            self.transitions.append((partial(read, **options), args))
            return read(*args, **options)

        return call

    def hand_out(self, num_calls: int) -> Noted:
        """Return the calls recorded since the last time, and forget them."""
        noted = Noted(num_calls, self.transitions[:], self.reads[:])
        self.transitions.clear()
        self.reads.clear()
        return noted


def is_transition(name: str) -> bool:
    """Return whether a call changes the tiers, judged by its return type."""
    function = next(getattr(each, name) for each in MODULES if hasattr(each, name))
    return str(function.__annotations__["return"]).startswith("Outcome")


def note(story: Story) -> dict[str, Noted]:
    """Play a story and return the core calls of each phase."""
    noting: Any = Noting(story.backing.blocks)
    story.backing.blocks = noting
    places = getattr(story, "core_functions", ())
    functions = [getattr(module, name) for module, name in places]
    for (module, name), function in zip(places, functions, strict=True):
        setattr(module, name, noting.wrap(function))
    found: dict[str, Noted] = {}
    for name, work in story.phases():
        noting.hand_out(0)
        work()
        found[name] = noting.hand_out(len(work) if isinstance(work, Sized) else 1)
    for (module, name), function in zip(places, functions, strict=True):
        setattr(module, name, function)
    return found


def time_story(story: Story) -> dict[str, float]:
    """Return the seconds of each phase of a story."""
    return {name: seconds(work) for name, work in story.phases()}


def time_calls(backing: Backing, noted: dict[str, Noted]) -> dict[str, tuple[float, float]]:
    """Return the seconds of the recorded transitions on fresh blocks, and of the recorded reads.

    The reads of a phase run after its transitions, which changes their results.
    """
    blocks = backing.blocks
    return {
        name: (seconds(calls_of(blocks, each.transitions)), seconds(calls_of(blocks, each.reads)))
        for name, each in noted.items()
    }


def calls_of(blocks: Any, calls: Calls) -> Work:
    """Return work that makes the calls, one after the other."""
    bound = [
        (getattr(blocks, method) if isinstance(method, str) else method, args)
        for method, args in calls
    ]

    def work() -> None:
        for method, args in bound:
            method(*args)

    return work


def seconds(work: Work) -> float:
    """Return the CPU seconds of this thread that some work takes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def measure(make: Callable[[BackendName], Story], backend: BackendName, rounds: int) -> list[str]:
    """Print a line for each phase of a story that changes something; lines for the others."""
    noted = note(make(backend))
    facade = dict.fromkeys(noted, float("inf"))
    transitions, reads = dict(facade), dict(facade)
    for _ in range(rounds):
        gc.collect()  # frees the memory of earlier rounds
        for name, value in time_story(make(backend)).items():
            facade[name] = min(facade[name], value)
        for name, (changing, reading) in time_calls(make(backend).backing, noted).items():
            transitions[name] = min(transitions[name], changing)
            reads[name] = min(reads[name], reading)
    questions = []
    for name, calls in noted.items():
        part = 1e6 / calls.num_calls
        own, beneath, requested = part * facade[name], part * transitions[name], part * reads[name]
        num_changes, num_reads = len(calls.transitions), len(calls.reads)
        head = f"{make.__name__:10} {backend:7} {name:31} {own:8.2f} us"
        said = f"{num_reads / calls.num_calls:5.1f} reads {requested:6.2f} us"
        if not num_changes:
            questions.append(f"{head}  {said}")
            continue
        ratio = own / beneath
        mark = f"  more than {MOST}" if ratio > MOST else ""
        count = num_changes / calls.num_calls
        print(f"{head} {ratio:6.2f} times {count:5.1f} transitions {beneath:7.2f} us, {said}{mark}")
    return questions


class Idle:
    """A facade whose call does nothing, to measure the cost of a call."""

    def call(self, first: int, second: int) -> None:
        """Do nothing."""


def time_idle(num_calls: int = 1000, rounds: int = 15) -> float:
    """Return the microseconds of a method that does nothing, called as the facades' methods are."""
    work = Each(Idle().call, range(num_calls), range(num_calls))
    return 1e6 * min(seconds(work) for _ in range(rounds)) / num_calls


def main() -> None:
    """Measure the stories of all facades, or of those whose file names contain a given name."""
    parser = argparse.ArgumentParser(description="Measure what a facade's call costs.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument(
        "--facade", default="", help="part of a facade's file name, such as v0, v03, kv_cache"
    )
    options = parser.parse_args()
    gc.disable()
    questions = []
    for path in sorted(Path(__file__).parent.glob("legacy_*.py")):
        if options.facade and path.stem != f"legacy_{options.facade}":
            continue
        for make in importlib.import_module(f"benches.{path.stem}").STORIES:
            for backend in (options.backend,) if options.backend else BACKENDS:
                questions += measure(make, backend, options.rounds)
    print(f"\nA method that does nothing takes {time_idle():.3f} us.")
    print("\nThat change nothing:")
    print("\n".join(questions))


if __name__ == "__main__":
    main()
