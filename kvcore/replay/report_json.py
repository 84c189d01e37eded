# SPDX-License-Identifier: Apache-2.0
"""A replay's report as plain data, for programs.

Keys are stable; new ones may be added, and FORMAT grows when one changes its meaning. Rates are
from 0 to 1, None if there is nothing to count; the key of a time ends with its unit. docs/replay.md
lists the keys.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.explain.explanation import CAUSES, Totals
from kvcore.replay.explain.tables import TOP
from kvcore.replay.results import Cost, Result, Sample
from kvcore.replay.summary import Report, course_of, rates_of, saturation_of

FORMAT = 1


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as dicts, lists, strings and numbers."""
    result = report.result
    return {
        "format": FORMAT,
        "trace": result.trace,
        "backend": result.backend,
        "interrupted": report.interrupted,
        "options": attrs.asdict(result.options),
        "requests": _requests(result),
        **_outcome(result),
        "course": _course(result),
        "saturation": _saturation(result),
        "cost_us": {each.name: _cost(each) for each in result.costs},
        "samples": _samples(result),
        "sweep": [
            {
                "num_blocks": each.options.num_blocks,
                "policy": each.options.policy,
                "refused": each.num_refused,
                **_outcome(each),
            }
            for each in report.sweep
        ],
        "sweep_left_out": list(report.left_out),
        "explained": None if report.explained is None else _explained(report.explained.totals),
    }


def _requests(result: Result) -> dict[str, Any]:
    return {
        "read": result.requests,
        "finished": result.finished,
        "refused": result.num_refused,
        "refused_named": [attrs.asdict(each) for each in result.refused],
        "skipped_lines": result.skipped_lines,
    }


def _explained(totals: Totals) -> dict[str, Any]:
    return {
        "ideal": totals.ideal,
        "hits": totals.hits,
        "causes": {cause: totals.causes[cause] for cause in CAUSES},
        "evicted_by": dict(totals.takers),
        "evictors": dict(totals.evictors.most_common(TOP)),
    }


def _saturation(result: Result) -> dict[str, float] | None:
    found = saturation_of(result)
    if found is None:
        return None
    return {"since_seconds": found.since, "until_seconds": found.until, "waiting": found.most}


def _tokens(result: Result) -> dict[str, int | None]:
    return {
        "prompt": result.prompt_tokens,
        "output": result.output_tokens,
        "looked_up": result.looked_up_tokens,
        "hit": result.hit_tokens,
        "ideal_hit": result.ideal_hit_tokens,
        "optimum_hit": result.optimum_hit_tokens,
        "far_hit": result.far_hit_tokens,
        "again_looked_up": result.again_looked_up_tokens,
        "again_hit": result.again_hit_tokens,
    }


def _course(result: Result) -> dict[str, Any] | None:
    course = course_of(result)
    if course is None:
        return None
    return {
        "use": attrs.asdict(course.use),
        "cached": attrs.asdict(course.cached),
        "running": attrs.asdict(course.running),
        "waiting": attrs.asdict(course.waiting),
        "nearly_full": course.nearly_full,
        "first_full_seconds": course.first_full,
    }


def _cost(cost: Cost) -> dict[str, float]:
    times = {name: getattr(cost, name) for name in ("total", "median", "p99", "p999", "worst")}
    return {"count": cost.count} | {n: round(value * 1e6, 3) for n, value in times.items()}


def _samples(result: Result) -> dict[str, list[Any]]:
    """Return a column per field, which is much shorter than an object per sample."""
    names = [each.name for each in attrs.fields(Sample)]
    return {name: [getattr(each, name) for each in result.samples] for name in names}


def _outcome(result: Result) -> dict[str, Any]:
    """Return the fields that a run shares with a row of a sweep."""
    return {
        "tokens": _tokens(result),
        "hit_rate": attrs.asdict(rates_of(result)),
        "evictions": result.evictions,
        "far_written": result.far_written,
        "preemptions": result.preemptions,
        "swaps": result.swaps,
        "steps": result.steps,
        "virtual_seconds": result.virtual_seconds,
        "queueing_seconds": attrs.asdict(result.queueing),
    }
