# SPDX-License-Identifier: Apache-2.0
"""Reports explanations as text and as plain data: by cause, by evictor, by request, or for one
request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import attrs
from msgspec import to_builtins

from kvcore.explain.explanation import CAUSES, LENGTHS, Explanation, Span
from kvcore.replay.explain.explained import Explained
from kvcore.replay.explain.tables import MEANING, TAKEN_BY, TOP, cause_rows, evictor_rows
from kvcore.replay.report_text import counted, headline, percent, setting, table
from kvcore.replay.results import Result
from kvcore.replay.summary import share

FORMAT = 1


def to_lines(
    head: Iterable[str], explained: Explained, split: Counter[str], by: str | None
) -> Iterator[str]:
    """Yield the lines of the report. head: what was explained. split: evicted tokens by policy and
    capacity, if requested. by: None for each admission that was kept.
    """
    totals = explained.totals
    yield from head
    yield ""
    if by is None:
        for each in explained.kept:
            yield from _one(each)
        return
    rows = [("tokens", "", "share", "")]
    rows += [
        ("ideal", f"{totals.ideal:,}", percent(share(totals.ideal, totals.tokens)), "without limit")
    ]
    rows += [("hits", f"{totals.hits:,}", percent(share(totals.hits, totals.tokens)), "")]
    missed = totals.ideal - totals.hits
    rows += [("missed", f"{missed:,}", percent(share(missed, totals.tokens)), "ideal minus hits")]
    yield from table(rows, words=True)
    yield ""
    yield from table(_ROWS[by](explained, split), words=by == "cause")


def head_lines(result: Result) -> list[str]:
    """Return the head of the report: the trace, its manager, and what was left out."""
    left_out = []
    if result.num_refused:
        left_out.append(f"{counted(result.num_refused, 'request')} too large for the pool")
    if result.skipped_lines:
        left_out.append(counted(result.skipped_lines, "bad line"))
    lines = [headline(result), setting(result)]
    return [*lines, f"left out: {', '.join(left_out)}"] if left_out else lines


def head_data(result: Result) -> dict[str, Any]:
    """Return the same as plain data."""
    return {
        "trace": result.trace,
        "backend": result.backend,
        "interrupted": result.interrupted,
        "options": attrs.asdict(result.options),
        "refused": result.num_refused,
        "skipped_lines": result.skipped_lines,
    }


def to_data(
    head: dict[str, Any], explained: Explained, split: Counter[str], by: str
) -> dict[str, Any]:
    """Return the report as dicts, lists, strings and numbers, in tokens unless the name says
    otherwise.
    """
    totals = explained.totals
    data: dict[str, Any] = {
        "format": FORMAT,
        **head,
        "admissions": totals.admissions,
        "tokens": totals.tokens,
        "ideal": totals.ideal,
        "hits": totals.hits,
        "missed": totals.ideal - totals.hits,
        "causes": {cause: totals.causes[cause] for cause in CAUSES},
        "evicted_by": dict(totals.takers),
        "evicted_split": dict(split) or None,
    }
    if by == "evictor":
        data["evictors"] = dict(totals.evictors.most_common())
    data["requests"] = [_data(each) for each in explained.kept]
    return data


def _by_cause(explained: Explained, split: Counter[str]) -> list[tuple[str, ...]]:
    return list(cause_rows(explained.totals, split))


def _by_evictor(explained: Explained, _: Counter[str]) -> list[tuple[str, ...]]:
    return evictor_rows(explained.totals)


def _by_request(explained: Explained, _: Counter[str]) -> list[tuple[str, ...]]:
    """List the requests that missed most, each with its largest cause."""
    rows: list[tuple[str, ...]] = [("request", "prompt", "ideal", "hits", "missed", "mostly")]
    firsts = [each for each in explained.kept if not each.again]
    for each in sorted(firsts, key=lambda each: each.hits - each.ideal)[:TOP]:
        causes = Counter[str]()
        for span in each.spans:
            causes[span.cause] += span.end - span.start
        counts = (each.num_tokens, each.ideal, each.hits, each.ideal - each.hits)
        mostly = causes.most_common(1)[0][0] if causes else "-"
        rows.append((each.request, *(f"{count:,}" for count in counts), mostly))
    return rows


_ROWS = {"cause": _by_cause, "evictor": _by_evictor, "request": _by_request}


def _one(each: Explanation) -> Iterator[str]:
    """Yield one admission: its lengths, and the cause of each span after the hits."""
    again = ", after a preemption" if each.again else ""
    yield (
        f"request {each.request}{again}, step {each.step:,}: {each.num_tokens:,} tokens, ideal "
        f"{each.ideal:,}, hits {each.hits:,}"
    )
    if each.nearest is not None:
        near, behind = each.nearest, ""
        if near.token is not None and near.its_token is not None:
            behind = f" ({near.token} here, {near.its_token} there)"
        yield f"differs from request {near.request!r} at token {near.differs_at:,}{behind}"
    for _, group in groupby(each.spans, key=_taker):
        spans = list(group)
        yield f"  {spans[0].start:,} to {spans[-1].end:,}: {_why(spans)}"
    if each.num_tokens > each.ideal:
        yield f"  {each.ideal:,} to {each.num_tokens:,}: seen for the first time"


def _taker(span: Span) -> tuple[str, str | None, str]:
    gone = span.removal
    return (span.cause, None, "") if gone is None else (span.cause, gone.request, gone.kind)


def _why(spans: list[Span]) -> str:
    """Return the cause of neighbouring spans that lost their keys to one request, or of a single
    span.
    """
    gone = [span.removal for span in spans if span.removal is not None]
    if not gone:
        return f"{spans[0].cause}: {MEANING[spans[0].cause]}"
    if spans[0].cause == "withdrawn":
        return f"withdrawn by {gone[0].kind}, call {gone[0].call:,}"
    steps, idle = ({getattr(each, name) for each in gone} for name in ("step", "idle_steps"))
    return (
        f"evicted by request {gone[0].request!r}, {TAKEN_BY[gone[0].kind]}, "
        f"in step {_range(steps)}, {_range(idle)} steps after the last owner left"
    )


def _range(numbers: set[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _data(each: Explanation) -> dict[str, Any]:
    return {
        "request": each.request,
        "call": each.call,
        "step": each.step,
        "again": each.again,
        "tokens": each.num_tokens,
        "lengths": dict(zip(LENGTHS, each.lengths, strict=True)),
        "nearest": None if each.nearest is None else attrs.asdict(each.nearest),
        "spans": to_builtins(each.spans),
    }
