# SPDX-License-Identifier: Apache-2.0
"""Renders a replay's report as one self-contained HTML page.

It uses no external script, font, picture or style, and contains no network address. It is also
well-formed XML, and readable on light and dark screens and on paper. Names from the trace are
escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kvcore.cli.page_style import css
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

CSS = """
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--c-grid); text-align: right;
  font-weight: normal; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.figures td:last-child { text-align: left; white-space: normal; width: 75%; }
svg { display: block; width: 100%; height: auto; }
""".strip()


def to_html(report: Report) -> Iterator[str]:
    """Yield the parts of the page."""
    result = report.result
    title = escape(headline(result))
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
    yield f"<title>{title}</title>\n"
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f"\n<style>\n{css()}\n{CSS}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    yield _paragraph(setting(result), "faint")
    if report.interrupted:
        yield _paragraph("Interrupted: this is what was done until then.", "warn")
    yield from _tiles(report)
    if result.samples:
        yield f"<h2>Over time</h2>\n{draw_course(result)}\n"
    if report.sweep:
        yield f"<h2>Other pool sizes</h2>\n{draw_sweep(report)}\n"
        yield _table(sweep_rows(report))
    advised = advice(report)
    if advised is not None:
        yield _paragraph(f"Advice: {advised}.")
    if report.explained is not None and report.explained.points:
        totals = report.explained.totals
        yield f"<h2>Why tokens were computed again</h2>\n{draw_causes(report.explained)}\n"
        yield _table(cause_rows(totals), words=True)
        if totals.evictors:
            yield "<h2>Whose blocks cost others most</h2>\n"
            yield _table(evictor_rows(totals))
    if report.left_out:
        sizes = ", ".join(f"{size:,}" for size in report.left_out)
        yield _paragraph(f"Interrupted: not run to the end with {sizes} blocks.", "warn")
    yield "<h2>Figures</h2>\n"
    yield _table(list(figures(result)), head=False, words=True)
    if result.num_refused:
        yield "<h2>Refused</h2>\n"
        for line in refused_lines(result, REFUSED_MAX):
            yield _paragraph(line)
    if any(each.count for each in result.costs):
        yield "<h2>What the manager costs</h2>\n"
        yield _table(cost_rows(result.costs))
    yield _paragraph(f"Virtual time: {clock_note(result.options)}.", "faint")
    yield "</body>\n</html>\n"


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


def _table(rows: Sequence[Sequence[str]], *, head: bool = True, words: bool = False) -> str:
    """Yield rows as a table, the first as its head. words: the last column is text."""
    opened = '<table class="figures">' if words else "<table>"
    lines = [f'<div class="wide">{opened}']
    for place, row in enumerate(rows):
        kind = "th" if head and place == 0 else "td"
        cells = "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table></div>\n"])


def _paragraph(text: str, kind: str = "") -> str:
    opened = f'<p class="{kind}">' if kind else "<p>"
    return f"{opened}{escape(text)}</p>\n"
