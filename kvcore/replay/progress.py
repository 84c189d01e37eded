# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of a replay in one line.

On a terminal the line is updated in place; elsewhere a new one is written from time to time, so
that a log stays short. Progress is estimated from the part of the file read for the finished
requests; for standard input it is unknown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Sample
from kvcore.replay.summary import use_of

LIVE_SECONDS, SPARSE_SECONDS = 0.2, 10.0
COLUMNS, BAR = 99, 20


class Progress:
    """Shows the progress of one run of a sweep. num_requests: at which reading stops. what: name of
    the run.
    """

    def __init__(
        self,
        out: TextIO,
        reader: TraceReader,
        num_requests: int | None,
        what: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._reader, self._num_requests, self._what = out, reader, num_requests, what
        self._clock = clock
        self._live = out.isatty()
        self._start = self._shown = clock()

    def __call__(self, sample: Sample) -> None:
        """Show a finished step, if it is time to."""
        now = self._clock()
        if now - self._shown < (LIVE_SECONDS if self._live else SPARSE_SECONDS):
            return
        self._shown = now
        line = self._line(sample, now)
        if self._live:
            print(f"\r{line[:COLUMNS]:<{COLUMNS}}", end="", file=self._out, flush=True)
        else:
            print(line, file=self._out, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._live:
            print(f"\r{'':<{COLUMNS}}\r", end="", file=self._out, flush=True)

    def _line(self, sample: Sample, now: float) -> str:
        hits = sample.hit_tokens / max(1, sample.looked_up_tokens)
        share = self._share(sample)
        if share is None:
            bar = ""
        else:
            done = round(BAR * share)
            bar = f"[{'#' * done}{'.' * (BAR - done)}] {100 * share:.0f} %, "
        return (
            f"{self._what}{bar}{sample.finished:,} done, {sample.running:,} running, "
            f"{100 * use_of(sample):.0f} % used, {100 * hits:.1f} % hit, {now - self._start:.0f} s"
        )

    def _share(self, sample: Sample) -> float | None:
        """Estimate the finished share of the trace."""
        reader, total = self._reader, float("inf")
        if reader.size and reader.position:
            total = reader.num_lines * reader.size / reader.position
        if self._num_requests is not None:
            total = min(total, self._num_requests)
        return None if total == float("inf") else min(1.0, sample.finished / max(1.0, total))
