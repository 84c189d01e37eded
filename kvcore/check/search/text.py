# SPDX-License-Identifier: Apache-2.0
"""The text form of a report.

The verdict comes first, then the figures, then what was never reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs

from kvcore.check.search.report import COMPLETE, INTERRUPTED, VIOLATION, Report

WIDTH = 99
BAR = 40


def to_text(report: Report) -> str:
    """Return the report as text."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield verdict(report)
    rate = report.num_edges / report.seconds if report.seconds else 0.0
    size = report.memory_bytes / max(1, report.num_states)
    yield (
        f"{report.num_states:,} states, {report.num_edges:,} edges, depth {report.depth}; "
        f"{report.seconds:.1f} s, {rate:,.0f} edges/s; {report.keys}; backend {report.backend}"
    )
    yield (
        f"{size:,.0f} bytes per state for names, links and waiting states; "
        f"{report.grown_bytes / 1e6:,.0f} MB more memory in all"
    )
    yield from _on_request(report)
    kinds = {f"{kind}s": report.of_kind(kind) for kind in ("call", "command", "goal")}
    tables = {"moves": _moves(report), "calls enabled": report.enabled, **kinds}
    for head, found in tables.items():
        words = [f"{name} {count:,}" for name, count in found.items()]
        if words:
            yield from _wrapped(f"{head}: ", words)
    yield "new states by distance from the start:"
    most = max(report.depths, default=1)
    for depth, count in enumerate(report.depths):
        yield f"  {depth:>3}  {count:>9,}  {'#' * round(BAR * count / most)}".rstrip()
    if report.never and report.violation is None:
        yield from _wrapped("never taken: ", report.never)


def _moves(report: Report) -> dict[str, int]:
    """Return how often each move was made, in a batch with others or alone."""
    found: Counter[str] = Counter()
    for path, count in report.of_kind("move").items():
        for name in path.split(", "):
            found[name] += count
    return dict(found.most_common())


def _on_request(report: Report) -> Iterator[str]:
    """Yield the differences from the defaults: unchecked properties, and names that are not
    renamed.
    """
    kept = [name for name, on in attrs.asdict(report.symmetry).items() if not on]
    if kept:
        words = " and ".join(kept)
        yield f"symmetry switched off: states that differ by the names of {words} are counted apart"
    if report.left_out and len(report.left_out) < len(report.checked):
        yield from _wrapped("checked: all properties but ", report.left_out)
    elif report.left_out:
        yield from _wrapped("checked alone: ", tuple(report.checked))


def verdict(report: Report) -> str:
    """Return the exploration's verdict, in one sentence."""
    if report.verdict == VIOLATION and report.violation is not None:
        found = report.violation
        return f"violation of {found.name} after {len(found.calls)} calls: {found.detail}"
    if report.missed:
        return f"complete, but the world did not show what it is for: {', '.join(report.missed)}"
    if report.verdict == COMPLETE:
        which = "no property that was checked" if report.left_out else "no property"
        return f"complete: {which} is broken in any state that this world can reach"
    what = "interrupted" if report.verdict == INTERRUPTED else report.verdict
    return f"{what}: nothing is broken so far, {report.num_waiting:,} states wait to be tried"


def _wrapped(head: str, words: list[str] | tuple[str, ...]) -> Iterator[str]:
    line = head
    for place, word in enumerate(words):
        said = word if place == len(words) - 1 else f"{word}, "
        if len(line) + len(said) > WIDTH and line.strip():
            yield line.rstrip()
            line = "  "
        line += said
    yield line.rstrip()
