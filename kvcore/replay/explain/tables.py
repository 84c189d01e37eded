# SPDX-License-Identifier: Apache-2.0
"""Rows for all reports: missed tokens by cause, and evicted ones by evictor."""

from __future__ import annotations

from collections import Counter

from kvcore.explain.explanation import CAUSES, Totals

TOP = 10
"""Number of evictors and requests that a report shows."""
TAKEN_BY = {
    "prompt": "by a prompt's allocation",
    "decode": "by a decode's allocation",
    "swap_in": "by a swap in",
    "load": "by a load",
}
MEANING = {
    "namespace": "adapter, media, salt or embedding differs",
    "not_computed": "known, but not computed by any request yet",
    "old_epoch": "computed only with other weights",
    "partial_block": "after the last place where a hit can end",
    "last_token": "the token that must be left to compute",
    "draft_drop": "the block that a drafter drops",
    "not_published": "full, but never findable",
    "no_checkpoint": "no recurrent state was kept there",
    "withdrawn": "the key was withdrawn",
    "groups_disagree": "the groups do not agree on one token",
    "unused": "found, but not taken",
    "external": "brought by a connector or a load",
}


def cause_rows(totals: Totals, split: Counter[str] | None = None) -> list[tuple[str, ...]]:
    """List missed tokens by cause; evicted ones also by the taking call, and by the split."""
    split = split or Counter()
    missed = totals.ideal - totals.hits
    rows: list[tuple[str, ...]] = [("cause", "tokens", "of missed", "")]

    def row(name: str, tokens: int, meaning: str) -> None:
        if tokens:
            rows.append((name, f"{tokens:,}", _percent(tokens, missed), meaning))

    for cause in CAUSES:
        if cause != "evicted":
            row(cause, totals.causes[cause], MEANING[cause])
            continue
        for kind, words in TAKEN_BY.items():
            row("evicted", totals.takers[kind], words)
        row("  policy", split["policy"], "of evicted: the optimum finds it in this pool")
        row("  capacity", split["capacity"], "of evicted: a policy need not find it")
    return rows


def evictor_rows(totals: Totals, most: int = TOP) -> list[tuple[str, ...]]:
    """List the requests whose blocks cost others most."""
    evicted = sum(totals.evictors.values())
    rows: list[tuple[str, ...]] = [("evictor", "tokens", "of evicted")]
    for name, tokens in totals.evictors.most_common(most):
        rows.append((name, f"{tokens:,}", _percent(tokens, evicted)))
    return rows


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %"
