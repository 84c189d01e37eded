# SPDX-License-Identifier: Apache-2.0
"""Replays one trace under several policies and pool sizes: read once, run on all cores.

The processes are forked, so each has the trace. An interrupt ends all of them; unfinished variants
have no row.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import attrs

from kvcore.replay.loop import replay
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import BackendName, Options, Result
from kvcore.replay.summary import Report
from kvcore.replay.workload import TraceRequest

Done = Callable[[Result], object]

_requests: list[TraceRequest] = []
"""The trace, in the processes that replay it."""


def run_variants(
    reader: TraceReader,
    plans: Sequence[Options],
    *,
    backend: BackendName | None = None,
    done: Done | None = None,
) -> Report:
    """Replay under each of the options; return the report of the first, with a row for each.

    done: called with each result. Raises what `replay` and reading raise, and KeyboardInterrupt if
    the first one did not finish.
    """
    requests = list(reader)
    results: dict[int, Result] = {}
    cores = min(len(os.sched_getaffinity(0)), len(plans))
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(cores, context, initializer=_keep, initargs=(requests,))
    try:
        waiting = {
            pool.submit(_run, plan, backend, place == 0): place for place, plan in enumerate(plans)
        }
        for future in as_completed(waiting):
            result = future.result()
            if result.interrupted:
                raise KeyboardInterrupt
            named = attrs.evolve(result, trace=reader.name, skipped_lines=reader.num_skipped)
            results[waiting[future]] = named
            if done is not None:
                done(named)
    except KeyboardInterrupt:
        if 0 not in results:
            raise
    finally:
        pool.shutdown(cancel_futures=True)
    left_out = {plan.num_blocks for place, plan in enumerate(plans) if place not in results}
    order = sorted(results, key=lambda place: (plans[place].num_blocks, place))
    rows = tuple(results[place] for place in order)
    return Report(results[0], rows, tuple(sorted(left_out)))


def _keep(requests: list[TraceRequest]) -> None:
    _requests[:] = requests


def _run(plan: Options, backend: BackendName | None, costs: bool) -> Result:
    return replay(_requests, plan, backend=backend, costs=costs)
