# SPDX-License-Identifier: Apache-2.0
"""The plots of a replay, as SVG text for a page.

Only this file imports matplotlib (extra `kvcore[plots]`). Colours are CSS variables,
`var(--c-ink)`, so that one drawing serves light and dark pages; `with_colours` inserts real colours
for a separate picture. An SVG contains no external reference: no namespace, no document type, no
metadata.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from kvcore.cli.page_style import COLOURS
from kvcore.replay.explain.explained import Explained
from kvcore.replay.results import Result, Sample
from kvcore.replay.summary import Report, cached_of, rates_of, use_of

NAMES = {f"#0101{number:02}": name for number, name in enumerate(COLOURS)}
"""Placeholder colours for matplotlib, each of which stands for a name."""
INK, FAINT, GRID, BLUE, ORANGE, GREEN, RED, _, _ = NAMES
WIDTH_INCHES = 9.2
COURSE_MARGINS = {"left": 0.07, "right": 0.97, "bottom": 0.051, "top": 0.971, "hspace": 0.25}
"""Shares of the figure, with room for titles and for labels of eight characters. To compute them
from the labels takes matplotlib as long as to draw.
"""
NUM_BINS = 120
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "kvcore",
    "font.size": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 7.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "lines.linewidth": 1.6,
    "path.simplify_threshold": 0.3,
}


def draw_course(result: Result) -> str:
    """Draw use, running and waiting, hits and evictions over virtual time, one below the other."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 9.0))
        axes: Sequence[Axes] = figure.subplots(4, 1, sharex=True, gridspec_kw=COURSE_MARGINS)
        samples = from_zero(result.samples)
        times = [each.time for each in samples]
        _draw_use(axes[0], times, samples)
        _draw_requests(axes[1], times, samples)
        _draw_hits(axes[2], times, samples)
        _draw_evictions(axes[3], times, samples)
        axes[3].set_xlim(0, max(times[-1], 1e-9))
        axes[3].set_xlabel("virtual seconds")
        return _to_svg(figure, "course", "Use, requests, hits and evictions over virtual time")


def draw_causes(explained: Explained) -> str:
    """Draw found tokens, and missed ones by cause, over virtual time."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 3.2), layout="constrained")
        axes = figure.subplots()
        points = explained.points
        times = [0.0, *(each.time for each in points)]
        causes = [cause for cause, _ in explained.totals.causes.most_common()]
        series = [[each.hit for each in points]]
        series += [[each.causes[cause] for each in points] for cause in causes]
        colours = [GREEN, RED, ORANGE, BLUE, FAINT, INK]
        axes.stackplot(
            times,
            [[0, *each] for each in series],
            labels=["found", *causes],
            colors=[colours[min(place, 5)] for place in range(len(series))],
            alpha=0.55,
        )
        axes.set_xlim(0, max(times[-1], 1e-9))
        axes.set_ylim(bottom=0)
        axes.set_title("Tokens that an unlimited cache would have had, so far")
        axes.set_xlabel("virtual seconds")
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        axes.legend(frameon=False, loc="upper left")
        return _to_svg(figure, "causes", "Found and missed tokens by cause over virtual time")


def draw_sweep(report: Report) -> str:
    """Draw the hit rate of each policy against pool size, with the ideal and the optimum."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axes = figure.subplots()
        policies = list(dict.fromkeys(each.options.policy for each in report.sweep))
        rows = [each for each in report.sweep if each.options.policy == policies[0]]
        sizes = [each.options.num_blocks for each in rows]
        rates = [rates_of(each) for each in rows]
        axes.axvline(report.result.options.num_blocks, color=BLUE, alpha=0.25)
        _draw_rate(axes, sizes, [each.ideal for each in rates], FAINT, ":", "ideal")
        _draw_rate(axes, sizes, [each.optimum for each in rates], GREEN, "--", "optimum")
        for place, policy in enumerate(policies):
            rows = [each for each in report.sweep if each.options.policy == policy]
            runs = [rates_of(each).run for each in rows]
            label = "this policy" if len(policies) == 1 else policy
            colour, line = (BLUE, ORANGE, RED, INK)[place % 4], ("-", "-.")[place // 4 % 2]
            _draw_rate(axes, [each.options.num_blocks for each in rows], runs, colour, line, label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        if len(sizes) > 8:
            axes.tick_params(axis="x", labelrotation=45)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(bottom=0)
        axes.set_title("Hit rate against pool size")
        axes.set_xlabel("blocks of the pool")
        axes.legend(frameon=False, loc="best")
        return _to_svg(figure, "sweep", "Hit rate against pool size")


def with_colours(svg: str, colours: Mapping[str, str]) -> str:
    """Return the drawing with real colours, as a separate file."""
    found = re.sub(r"var\(--c-(\w+)\)", lambda name: colours[name[1]], svg)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" style="background: {colours["page"]}" '
    return found.replace("<svg ", head, 1)


def _draw_use(axes: Axes, times: list[float], samples: Sequence[Sample]) -> None:
    use = [use_of(each) for each in samples]
    there = [share + cached_of(each) for share, each in zip(use, samples, strict=True)]
    axes.fill_between(times, use, step="pre", color=BLUE, alpha=0.22, linewidth=0, label="owned")
    axes.plot(times, use, drawstyle="steps-pre", color=BLUE, linewidth=1.0)
    axes.fill_between(
        times, use, there, step="pre", color=GREEN, alpha=0.22, linewidth=0, label="cached, unowned"
    )
    axes.set_ylim(0, 1.04)
    _legend(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("Blocks of the pool: with an owner, and cached without")


def _draw_requests(axes: Axes, times: list[float], samples: Sequence[Sample]) -> None:
    named = [("running", BLUE, "-"), ("waiting", ORANGE, "-"), ("swapped", RED, "--")]
    for name, colour, line in named:
        counts = [getattr(each, name) for each in samples]
        if any(counts) or name != "swapped":
            axes.plot(times, counts, line, drawstyle="steps-pre", color=colour, label=name)
    axes.set_ylim(bottom=0)
    axes.set_title("Requests")
    _legend(axes)


def _draw_hits(axes: Axes, times: list[float], samples: Sequence[Sample]) -> None:
    looked_up, edges = _rates(times, [each.looked_up_tokens for each in samples])
    found, _ = _rates(times, [each.hit_tokens for each in samples])
    shares = [hit / total if total else 0.0 for hit, total in zip(found, looked_up, strict=True)]
    axes.stairs(shares, edges, fill=True, color=GREEN, alpha=0.4, label="in this stretch of time")
    so_far = [each.hit_tokens / max(1, each.looked_up_tokens) for each in samples]
    axes.plot(times, so_far, color=GREEN, label="so far")
    axes.set_ylim(0, 1.04)
    axes.set_title("Hit rate")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _legend(axes)


def _draw_evictions(axes: Axes, times: list[float], samples: Sequence[Sample]) -> None:
    rates, edges = _rates(times, [each.evictions for each in samples])
    axes.stairs(rates, edges, fill=True, color=BLUE, alpha=0.55, label="evicted blocks")
    preempted, _ = _rates(times, [each.preemptions for each in samples])
    marked = [
        (low + high) / 2
        for (low, high), rate in zip(pairwise(edges), preempted, strict=True)
        if rate
    ]
    if marked:
        top = max([*rates, 1.0]) * 1.04
        marks = [top] * len(marked)
        axes.plot(marked, marks, "v", color=RED, markersize=4, label="preemptions")
    axes.set_ylim(0, max([*rates, 1.0]) * 1.12)
    axes.set_title("Evictions per second")
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if marked:
        _legend(axes)


def _draw_rate(
    axes: Axes, sizes: list[int], rates: list[float | None], colour: str, line: str, label: str
) -> None:
    known = [(size, rate) for size, rate in zip(sizes, rates, strict=True) if rate is not None]
    if known:
        marker = "o" if line == "-" else "."
        xs, ys = [size for size, _ in known], [rate for _, rate in known]
        axes.plot(xs, ys, line, marker=marker, color=colour, label=label)


def _legend(axes: Axes) -> None:
    axes.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=3, borderaxespad=0.1
    )


def from_zero(samples: Sequence[Sample]) -> list[Sample]:
    """Add samples without requests: of the empty pool at time 0, and after each idle time, which is
    drawn where the sample before it was taken.
    """
    empty: dict[str, Any] = dict.fromkeys((each.name for each in attrs.fields(Sample)), 0)
    empty["num_blocks"] = samples[0].num_blocks
    drawn = [Sample(**empty)]
    for each in samples:
        last = drawn[-1]
        if each.idle_time > last.idle_time:
            idle = each.idle_time - last.idle_time
            rest = {"running": 0, "waiting": 0, "swapped": 0, "used_blocks": 0}
            drawn.append(attrs.evolve(last, time=last.time + idle, **rest))
        drawn.append(each)
    return drawn


def _rates(times: list[float], totals: list[int]) -> tuple[list[float], list[float]]:
    """Return a running total as rates per second in even bins, with the bins' edges."""
    end = max(times[-1], 1e-9)
    num_bins = min(NUM_BINS, max(1, len(times) - 1))
    edges = [end * each / num_bins for each in range(num_bins + 1)]
    at_edges = []
    place = 0
    for edge in edges:
        while place + 1 < len(times) and times[place + 1] <= edge + 1e-12 * end:
            place += 1
        at_edges.append(totals[place])
    at_edges[-1] = totals[-1]
    width = end / num_bins
    return [(after - before) / width for before, after in pairwise(at_edges)], edges


def _short(value: float, _: object = None) -> str:
    """Format 1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _to_svg(figure: Figure, prefix: str, title: str) -> str:
    """Return the drawing as one svg element, with unique ids and colours by name."""
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    file = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)  # its methods have no types
    # Not savefig, which draws the whole figure a first time to lay it out.
    canvas.print_svg(file, metadata={"Date": None})
    return _cleaned(file.getvalue(), prefix, title)


def _cleaned(text: str, prefix: str, title: str) -> str:
    svg = text[text.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(?::\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r"(font:[^;\"]*?px) [^;\"]*", r"\1 sans-serif", svg)
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    svg = re.sub(r"#01010\d", lambda found: f"var(--c-{NAMES[found[0]]})", svg)
    head = re.match(r"<svg [^>]*>", svg)
    assert head is not None
    box = re.search(r'viewBox="[^"]*"', head[0])
    assert box is not None
    opened = f'<svg {box[0]} role="img" aria-label="{title}">\n<title>{title}</title>'
    return opened + svg[head.end() :].rstrip()
