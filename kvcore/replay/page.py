# SPDX-License-Identifier: Apache-2.0
"""Renders a replay's report as one self-contained HTML page.

It uses no external script, font, picture or style, and contains no network address. It is also
well-formed XML, and readable on light and dark screens and on paper. Names from the trace are
escaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from kvcore.cli.page_parts import end, head, paragraph, to_rows
from kvcore.replay.explain.tables import cause_rows, evictor_rows
from kvcore.replay.plots import draw_causes, draw_course, draw_sweep
from kvcore.replay.report_text import (
    advice,
    clock_note,
    cost_rows,
    figures,
    headline,
    percent,
    refused_lines,
    setting,
    span,
    sweep_rows,
)
from kvcore.replay.results import REFUSED_MAX
from kvcore.replay.summary import Report, rates_of


def to_html(report: Report) -> Iterator[str]:
    """Yield the parts of the page."""
    result = report.result
    yield head(headline(result))
    yield paragraph(setting(result), "faint")
    if report.interrupted:
        yield paragraph("Interrupted: this is what was done until then.", "warn")
    yield from _tiles(report)
    if result.samples:
        yield f"<h2>Over time</h2>\n{draw_course(result)}\n"
    if report.sweep:
        yield f"<h2>Other pool sizes</h2>\n{draw_sweep(report)}\n"
        yield to_rows(sweep_rows(report))
    advised = advice(report)
    if advised is not None:
        yield paragraph(f"Advice: {advised}.")
    if report.explained is not None and report.explained.points:
        totals = report.explained.totals
        yield f"<h2>Why tokens were computed again</h2>\n{draw_causes(report.explained)}\n"
        yield to_rows(cause_rows(totals), words=True)
        if totals.evictors:
            yield "<h2>Whose blocks cost others most</h2>\n"
            yield to_rows(evictor_rows(totals))
    if report.left_out:
        sizes = ", ".join(f"{size:,}" for size in report.left_out)
        yield paragraph(f"Interrupted: not run to the end with {sizes} blocks.", "warn")
    yield "<h2>Figures</h2>\n"
    yield to_rows(list(figures(result)), head=False, words=True)
    if result.num_refused:
        yield "<h2>Refused</h2>\n"
        for line in refused_lines(result, REFUSED_MAX):
            yield paragraph(line)
    if any(each.count for each in result.costs):
        yield "<h2>What the manager costs</h2>\n"
        yield to_rows(cost_rows(result.costs))
    yield paragraph(f"Virtual time: {clock_note(result.options)}.", "faint")
    yield end()


def _tiles(report: Report) -> Iterator[str]:
    """Yield the figures that readers look for first."""
    result = report.result
    rates = rates_of(result)
    tiles = [
        ("hit rate", percent(rates.run)),
        ("optimum", percent(rates.optimum)),
        ("ideal", percent(rates.ideal)),
        ("evictions", f"{result.evictions:,}"),
        ("preemptions", f"{result.preemptions:,}"),
        ("queueing, p99", span(result.queueing.p99)),
    ]
    yield "<dl>\n"
    for name, figure in tiles:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}</dd></div>\n"
    yield "</dl>\n"
