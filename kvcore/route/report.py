# SPDX-License-Identifier: Apache-2.0
"""The report of a trace behind a router, as text for people and as plain data for programs.

The text has a row per run, and shows only the options that differ from their defaults.
docs/scale.md lists the keys of the data; they keep their meaning, and FORMAT grows when one
changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from kvcore.replay.report_text import counted, percent, span, table
from kvcore.replay.summary import share
from kvcore.route.results import WITH_INDEX, Options, Report, Result

FORMAT = 1
USUAL = {"scale": "1", "delay": "0 s", "loss": "0 %", "died": "0"}
"""Values that need no column."""
MODELS = {"lru": "an LRU model", "manager": "a manager"}


def to_text(report: Report, *, timing: bool) -> str:
    """Format the report as lines. timing: include the time of the router's choice."""
    return "\n".join(_lines(report, timing=timing))


def to_json(report: Report, *, timing: bool) -> dict[str, Any]:
    """Return the report as dicts, lists, strings and numbers."""
    return {
        "format": FORMAT,
        "trace": report.trace,
        "interrupted": report.interrupted,
        "requests": report.requests,
        "blocks": report.blocks,
        "block_size": report.block_size,
        "speed": report.speed,
        "ideal_hit_rate": share(report.ideal_hit_blocks, report.blocks),
        "runs": [_run(each, report, timing=timing) for each in report.runs],
    }


def _run(run: Result, report: Report, *, timing: bool) -> dict[str, Any]:
    waits = run.first_token
    data = {
        "options": attrs.asdict(run.options),
        "requests": run.requests,
        "refused": run.refused,
        "routed_again": run.again,
        "hit_rate": share(run.hit_blocks, run.blocks),
        "hits_lost": _hits_lost(run, report),
        "first_token_seconds": None if waits is None else attrs.asdict(waits),
        "busiest": run.busiest,
        "deviation": run.deviation,
        "copies": run.copies,
        "died_blocks": run.died_blocks,
        "events": {
            "events": run.events,
            "messages": run.messages,
            "lost_messages": run.lost,
            "bytes": run.payload_bytes,
        },
        "seconds": run.seconds,
    }
    return data | ({"router_us": _router_us(run)} if timing else {})


def _lines(report: Report, *, timing: bool) -> Iterator[str]:
    cut = "interrupted: " if report.interrupted else ""
    blocks = f"{counted(report.blocks, 'block')} of {counted(report.block_size, 'token')}"
    speed = "" if report.speed == 1 else f", {report.speed:g} times as fast"
    yield f"{cut}{report.trace}: {counted(report.requests, 'request')}, {blocks}{speed}"
    yield _setting(report.runs[0].options)
    ideal = percent(share(report.ideal_hit_blocks, report.blocks))
    yield f"ideal hit rate {ideal}: one unlimited cache"
    yield ""
    yield from table(_rows(report, timing=timing))
    yield ""
    yield "first token: seconds from arrival; busiest: most tokens computed over the mean, and the"
    yield "deviation over the mean; copies of a cached block at the end; events of all replicas"
    if any(run.options.num_dead for run in report.runs):
        yield "died: replicas; only there: distinct blocks that no other replica had; lost: hits"
        yield "compared with the same run without deaths"
    for run in report.runs:
        if run.refused:
            yield f"{_name(run.options)}: {counted(run.refused, 'request')} refused: too large"


def _setting(options: Options) -> str:
    replay = "" if options.replay else ", lost events stay lost"
    return (
        f"{counted(options.num_blocks, 'block')} per replica in {MODELS[options.model]}, "
        f"{options.prefill_rate:,g} prompt tokens per second, "
        f"{span(options.seconds_per_decode)} a decoded token, seed {options.seed}{replay}"
    )


def _name(options: Options) -> str:
    return f"{options.rule} on {options.num_replicas:,}"


def _rows(report: Report, *, timing: bool) -> list[tuple[str, ...]]:
    """Return a header and a row per run, without columns that have the default in all rows."""
    runs = report.runs
    columns: dict[str, list[str]] = {
        "rule": [each.options.rule for each in runs],
        "replicas": [f"{each.options.num_replicas:,}" for each in runs],
        "scale": [_if(each, f"{each.options.scale:g}", "cost") for each in runs],
        "delay": [_if(each, span(each.options.delay), *WITH_INDEX) for each in runs],
        "loss": [_if(each, f"{100 * each.options.loss:g} %", *WITH_INDEX) for each in runs],
        "died": [f"{each.options.num_dead:,}" for each in runs],
    }
    columns = {
        name: cells
        for name, cells in columns.items()
        if len(set(cells) - {"-"}) > 1 or set(cells) - {"-", USUAL.get(name)}
    }
    columns["hit rate"] = [percent(share(each.hit_blocks, each.blocks)) for each in runs]
    if "died" in columns:
        columns["lost"] = [percent(_hits_lost(each, report)) for each in runs]
        columns["only there"] = [f"{each.died_blocks:,}" for each in runs]
    waits = [each.first_token for each in runs]
    for name in ("p50", "p95", "p99"):
        columns[name] = ["-" if each is None else f"{getattr(each, name):,.1f}" for each in waits]
    columns |= {
        "busiest": [f"{each.busiest:,.2f}" for each in runs],
        "deviation": [f"{each.deviation:,.2f}" for each in runs],
        "copies": [f"{each.copies:,.2f}" for each in runs],
        "events/s": [_per_second(each, each.events) for each in runs],
        "bytes/s": [_per_second(each, each.payload_bytes) for each in runs],
    }
    if timing:
        columns["router us"] = [f"{_router_us(each):,.0f}" for each in runs]
    return [tuple(columns), *zip(*columns.values(), strict=True)]


def _if(run: Result, text: str, *rules: str) -> str:
    """Return the text if it matters for the rule."""
    return text if run.options.rule in rules else "-"


def _hits_lost(run: Result, report: Report) -> float | None:
    """Return the hit rate of the same run without deaths, less that of the run; None if there is no
    such run.
    """
    if not run.options.num_dead:
        return None
    alike = attrs.evolve(run.options, num_dead=0)
    for each in report.runs:
        if each.options == alike:
            return each.hit_rate - run.hit_rate
    return None


def _per_second(run: Result, total: int) -> str:
    return f"{total / run.seconds:,.0f}" if run.seconds else "-"


def _router_us(run: Result) -> float:
    return run.router_seconds * 1e6 / max(1, run.requests + run.refused + run.again)
