# SPDX-License-Identifier: Apache-2.0
"""Replays one trace on several pools: a full result for the first, and a row for each other size.

Each run reads the trace again, so a pipe is kept in a temporary file if there are several.
An interrupt ends the current run and all later ones; unfinished sizes have no row, since they saw a
different part of the trace.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO, Protocol

import attrs

from kvcore.replay.errors import UnreadableTrace
from kvcore.replay.explain.explained import Explained
from kvcore.replay.loop import Apply, Watch, replay
from kvcore.replay.request_trace import STDIN, TraceReader
from kvcore.replay.results import BackendName, Options, Result, Sample
from kvcore.replay.summary import Report

OpenTrace = Callable[[], TraceReader]


class Watching(Protocol):
    """Shows the progress of a run."""

    def __call__(self, sample: Sample) -> None: ...

    def end(self) -> None: ...


MakeWatch = Callable[[TraceReader, Options, int], Watching]
"""Makes the watcher of a run from its reader, its options, and its place in the sweep, from 0."""
MakeApply = Callable[[Options], Apply]


@contextmanager
def opened(
    path: str, *, skip_bad: bool, several: bool, rate: float | None = None
) -> Iterator[OpenTrace]:
    """Provide a function that makes a new reader of a trace at each call. Raises
    UnreadableTrace.
    """
    is_pipe = path == STDIN or Path(path).is_fifo()
    if not (several and is_pipe):
        yield lambda: TraceReader(path, skip_bad=skip_bad, rate=rate)
        return
    name = TraceReader(path).name
    with _kept(name, path) as file:
        size = file.tell()

        def reopen() -> TraceReader:
            file.seek(0)
            reader = TraceReader(file, skip_bad=skip_bad, name=name, rate=rate)
            reader.size = size
            return reader

        yield reopen


def run_sizes(
    trace: OpenTrace,
    options: Options,
    sizes: Sequence[int],
    *,
    backend: BackendName | None = None,
    watch: MakeWatch | None = None,
    make_apply: MakeApply | None = None,
    explained: Explained | None = None,
) -> tuple[Report, TraceReader]:
    """Replay on the pool of the options, then on the other sizes; return the report, and the reader
    of the first run, which knows its bad lines.

    explained: collects the explanations of the first run. Raises what `replay` raises, and
    KeyboardInterrupt if not even the first run began.
    """
    wanted = [each for each in sorted(set(sizes)) if each != options.num_blocks]
    plans = [options, *(attrs.evolve(options, num_blocks=each) for each in wanted)]
    done: list[Result] = []
    left_out: list[int] = []
    first: TraceReader | None = None
    for place, plan in enumerate(plans):
        if left_out or (done and done[0].interrupted):
            left_out.append(plan.num_blocks)
            continue
        reader = trace()
        first = first or reader
        watching = None if watch is None else watch(reader, plan, place)
        try:
            apply = None if make_apply is None else make_apply(plan)
            observer = explained if place == 0 else None
            result = replay(
                reader,
                plan,
                backend=backend,
                watch=_both(watching, observer),
                apply=apply,
                observe=None if observer is None else observer.observe,
                costs=place == 0,
            )
        except KeyboardInterrupt:
            if not done:
                raise
            left_out.append(plan.num_blocks)
            continue
        finally:
            if watching is not None:
                watching.end()
        if done and result.interrupted:
            left_out.append(plan.num_blocks)
        else:
            done.append(result)
    assert first is not None
    report = _report(done, left_out, is_sweep=bool(sizes))
    return attrs.evolve(report, explained=explained), first


def _both(watching: Watching | None, explained: Explained | None) -> Watch | None:
    """Return one watcher that reports to both, or to the only one."""
    if explained is None:
        return watching

    def watch(sample: Sample) -> None:
        explained.watch(sample)
        if watching is not None:
            watching(sample)

    return watch


def _report(done: Sequence[Result], left_out: Sequence[int], *, is_sweep: bool) -> Report:
    """Make the report: the first result in full, and the sweep of all finished ones, small pools
    first.
    """
    rows = [each for each in done if not each.interrupted] if is_sweep else []
    rows.sort(key=lambda each: each.options.num_blocks)
    return Report(done[0], tuple(rows), tuple(sorted(left_out)))


@contextmanager
def _kept(name: str, path: str) -> Iterator[BinaryIO]:
    """Copy a pipe to a temporary file. Raises UnreadableTrace."""
    with tempfile.TemporaryFile() as file:
        try:
            with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as pipe:
                shutil.copyfileobj(pipe, file)
        except OSError as error:
            raise UnreadableTrace(file=name, reason=error.strerror or str(error)) from error
        yield file
