# SPDX-License-Identifier: Apache-2.0
"""A replay's report as text for people: one figure per line, with its meaning.

Limitations of the report come first (interrupted, refused, skipped); a bound that was not counted
is not shown. Times of the manager are processor time, all others virtual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from kvcore.replay.explain.tables import cause_rows, evictor_rows
from kvcore.replay.results import FULL_SHARE, Cost, Options, RefusedRequest, Result
from kvcore.replay.summary import (
    Report,
    course_of,
    rates_of,
    saturation_of,
    share,
)

SHOWN_MAX = 10
"""Number of refused requests in the text; the JSON has all that the result names."""
LABEL = 12
ADVICE_POINTS = 0.01
"""A larger pool that gains less is not recommended."""
SATURATED = "waits and hit rate are those of a backlog, in which a prefix waits to be met again"


def to_text(report: Report) -> str:
    """Format the report as lines."""
    return "\n".join(_lines(report))


def headline(result: Result) -> str:
    """Return the headline: what was replayed, and how far."""
    cut = "interrupted: " if result.interrupted else ""
    return (
        f"{cut}{result.trace}: {counted(result.requests, 'request')} in "
        f"{counted(result.steps, 'step')}, {span(result.virtual_seconds)} of virtual time"
    )


def setting(result: Result) -> str:
    """Return the settings of the pool and the loop."""
    options = result.options
    preempt = "recompute" if options.preempt == "recompute" else f"swap to {_host(options)}"
    return (
        f"{counted(options.num_blocks, 'block')} of {_kept(options)}, "
        f"{options.policy}, {options.max_running:,} running at most, "
        f"{counted(options.token_budget, 'token')} per step, preempt by {preempt}, "
        f"{result.backend} core"
    )


def clock_note(options: Options) -> str:
    """Return a note on the cost of a step in virtual time."""
    return (
        f"a step takes {_micro(options.base_seconds)} us, "
        f"{_micro(options.seconds_per_prefill_token)} us per prompt token and "
        f"{_micro(options.seconds_per_decode)} us per decoded one"
    )


def figures(result: Result) -> Iterator[tuple[str, str, str]]:
    """Yield label, figure and explanation of each line."""
    yield from _requests(result)
    yield from _hits(result)
    yield "evictions", f"{result.evictions:,}", "blocks that lost their content to another"
    swapped = f", {result.swaps:,} of them by swap" if result.swaps else ""
    yield "preemptions", f"{result.preemptions:,}", f"preempted requests{swapped}"
    waited = result.queueing
    detail = f"median; 99 % within {span(waited.p99)}, worst {span(waited.worst)}"
    if result.looked_up_tokens:
        yield "queueing", span(waited.median), f"{detail}: from arrival to first schedule"
    saturation = saturation_of(result)
    if saturation is not None:
        grew = f"to {counted(saturation.most, 'request')} from {span(saturation.since)}"
        detail = f"the queue grew {grew} to {span(saturation.until)}: {SATURATED}"
        yield "saturated", "yes", detail
    yield from _course(result)


def advice(report: Report) -> str | None:
    """Return advice on what would gain most: more blocks, by the sweep, or the most that the bounds
    allow.
    """
    result, rates = report.result, rates_of(report.result)
    if rates.run is None:
        return None
    size, best = result.options.num_blocks, None
    of_policy = (each for each in report.sweep if each.options.policy == result.options.policy)
    for each in of_policy:
        more, rate = each.options.num_blocks - size, rates_of(each).run
        if more > 0 and rate is not None and rate - rates.run >= ADVICE_POINTS:
            per_block = (rate - rates.run) / more
            if best is None or per_block > best[0]:
                best = per_block, more, rate
    if best is not None:
        points = 100 * (best[2] - rates.run)
        return f"{best[1]:,} more blocks would bring {points:.1f} points of hit rate"
    if rates.ideal is None or rates.optimum is None:
        return None
    policy, blocks = 100 * (rates.optimum - rates.run), 100 * (rates.ideal - rates.optimum)
    return (
        f"another policy can bring at most {policy:.1f} points of hit rate in this pool, "
        f"more blocks {blocks:.1f} on top"
    )


def sweep_rows(report: Report) -> list[tuple[str, ...]]:
    """Return a header and a row per pool size, and per policy if there are several."""
    several = len({each.options.policy for each in report.sweep}) > 1
    head = (
        *(
            "blocks",
            *(["policy"] if several else []),
            "hit rate",
            "ideal",
            "optimum",
            "evictions",
            "preemptions",
            "queueing p99",
        ),
        "refused",
    )
    rows: list[tuple[str, ...]] = [head]
    for each in report.sweep:
        rates = rates_of(each)
        rows.append(
            (
                f"{each.options.num_blocks:,}",
                *([each.options.policy] if several else []),
                *(percent(rate) for rate in (rates.run, rates.ideal, rates.optimum)),
                f"{each.evictions:,}",
                f"{each.preemptions:,}",
                span(each.queueing.p99),
                f"{each.num_refused:,}",
            )
        )
    return rows


def cost_rows(costs: Sequence[Cost]) -> list[tuple[str, ...]]:
    """Return a header and a row per operation, times in microseconds."""
    rows: list[tuple[str, ...]] = [
        ("us of CPU", "count", "mean", "median", "p99", "p99.9", "worst", "total")
    ]
    for each in costs:
        times = (each.median, each.p99, each.p999, each.worst)
        mean = each.total / each.count if each.count else 0.0
        words = [f"{seconds * 1e6:,.1f}" for seconds in (mean, *times)]
        rows.append((each.name, f"{each.count:,}", *words, f"{each.total:,.3f} s"))
    return rows


def refused_line(refused: RefusedRequest) -> str:
    """Return the line of a refused request, with the reason."""
    return (
        f"request {refused.request} (line {refused.line:,}) has "
        f"{counted(refused.num_tokens, 'token')} and needs "
        f"{counted(refused.needed_blocks, 'block')}, the pool has {refused.usable_blocks:,}"
    )


def refused_lines(result: Result, most: int) -> Iterator[str]:
    """Yield the first refused requests, and the number of further ones."""
    shown = result.refused[:most]
    yield from map(refused_line, shown)
    if len(shown) < result.num_refused:
        yield f"and {result.num_refused - len(shown):,} more"


def percent(rate: float | None) -> str:
    """Format a share in percent."""
    return "-" if rate is None else f"{100 * rate:.2f} %"


def span(seconds: float) -> str:
    """Format a time for people."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds else "0 s"
    return f"{seconds:,.1f} s" if seconds < 1000 else f"{seconds:,.0f} s"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def table(rows: Sequence[Sequence[str]], *, words: bool = False) -> Iterator[str]:
    """Format a table: the first column left-aligned, the others right-aligned; a last column of
    words, left-aligned.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        if words:
            cells[-1] = cells[-1].lstrip()
        yield "  ".join([f"{first:<{max(widths[0], LABEL)}}", *cells]).rstrip()


def _lines(report: Report) -> Iterator[str]:
    result = report.result
    yield headline(result)
    yield setting(result)
    yield ""
    rows = list(figures(result))
    width = max(len(figure) for _, figure, _ in rows)
    for label, figure, detail in rows:
        yield f"{label:<{LABEL}} {figure:>{width}}  {detail}".rstrip()
    for line in refused_lines(result, SHOWN_MAX):
        yield f"{'':<{LABEL}} {line}"
    if any(each.count for each in result.costs):
        yield ""
        yield from table(cost_rows(result.costs))
    if report.sweep:
        yield ""
        yield from table(sweep_rows(report))
    if report.explained is not None:
        yield ""
        yield from table(cause_rows(report.explained.totals), words=True)
        yield ""
        yield from table(evictor_rows(report.explained.totals))
    if report.left_out:
        yield ""
        sizes = ", ".join(f"{size:,}" for size in report.left_out)
        yield f"interrupted: not run to the end with {sizes} blocks"
    yield ""
    yield f"virtual time: {clock_note(result.options)}"
    advised = advice(report)
    if advised is not None:
        yield f"advice: {advised}"


def _requests(result: Result) -> Iterator[tuple[str, str, str]]:
    refused = f", {result.num_refused:,} refused: too large" if result.num_refused else ""
    skipped = f"; {counted(result.skipped_lines, 'bad line')} skipped"
    yield (
        "requests",
        f"{result.requests:,}",
        f"{result.finished:,} finished{refused}{skipped if result.skipped_lines else ''}",
    )
    tokens = f"of prompts, {result.output_tokens:,} of answers"
    yield "tokens", f"{result.prompt_tokens:,}", tokens


def _hits(result: Result) -> Iterator[tuple[str, str, str]]:
    rates = rates_of(result)
    detail = f"{result.hit_tokens:,} of {result.looked_up_tokens:,} prompt tokens"
    yield "hit rate", percent(rates.run), detail
    for name, rate, tokens, meaning in (
        ("ideal", rates.ideal, result.ideal_hit_tokens, "an unlimited cache"),
        ("optimum", rates.optimum, result.optimum_hit_tokens, "what no policy passes in this pool"),
    ):
        if rate is not None:
            reached = share(result.hit_tokens, tokens)
            had = "" if reached is None else f"; the run had {percent(reached)} of it"
            yield name, percent(rate), f"{meaning}{had}"
    if result.far_hit_tokens is not None:
        detail = f"{result.far_hit_tokens:,} tokens behind the hits; {result.far_written:,} "
        yield "far hits", percent(rates.far), f"{detail}blocks were stored"
    if rates.again is not None:
        detail = f"{result.again_hit_tokens:,} of {result.again_looked_up_tokens:,} tokens"
        yield "hit again", percent(rates.again), f"{detail}, looked up after a preemption"


def _course(result: Result) -> Iterator[tuple[str, str, str]]:
    course = course_of(result)
    if course is None:
        return
    yield "use", percent(course.use.median), f"median over time; most {percent(course.use.most)}"
    detail = f"median over time; most {percent(course.cached.most)}; without an owner, to be found"
    yield "cached", percent(course.cached.median), detail
    level = f"of the time {100 * FULL_SHARE:.0f} % or more is in use"
    first = "" if course.first_full is None else f", first after {span(course.first_full)}"
    yield "nearly full", percent(course.nearly_full), f"{level}{first}"
    for name, each in (("running", course.running), ("waiting", course.waiting)):
        yield (
            name,
            f"{each.median:,.0f}",
            f"median over time; mean {each.mean:,.1f}, most {each.most:,.0f}",
        )


def _kept(options: Options) -> str:
    """Return what a block keeps, and where hits end if that is not at the ends of blocks."""
    kept = counted(options.block_size, "token")
    if options.groups:
        kinds = Counter((each.kind, each.block_size) for each in options.groups)
        kept = " and ".join(
            f"{counted(number, f'{kind} group')} of {counted(size, 'token')}"
            for (kind, size), number in kinds.items()
        )
    unit = options.hash_block_size
    return kept if unit is None else f"{kept}, hits at multiples of {unit:,}"


def _host(options: Options) -> str:
    blocks = options.num_blocks if options.num_host_blocks is None else options.num_host_blocks
    return counted(blocks, "host block")


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.6g}"
