# SPDX-License-Identifier: Apache-2.0
"""Values that explain an admission: its lengths, and spans of tokens with their causes."""

from __future__ import annotations

from collections import Counter

import attrs
from msgspec import Struct

LENGTHS = (
    *("known", "same_extra_keys", "computed", "this_epoch", "whole_blocks", "one_left"),
    *("drafts_dropped", "without_states", "once_findable", "in_each_group", "found", "used"),
)
"""What each length counts. The first is the ideal, the last the hits."""
CAUSES = (
    *("namespace", "not_computed", "old_epoch", "partial_block", "last_token", "draft_drop"),
    *("not_published", "no_checkpoint", "evicted", "withdrawn", "groups_disagree", "unused"),
    "external",
)
TAKERS = ("prompt", "decode", "swap_in", "load")
"""Kinds of calls that take blocks; a key that another call removed is withdrawn."""


class Removal(Struct, frozen=True, gc=False):
    """How a block's key was lost.

    request: the request that took the block, or None. call: number of the call. kind: one of
    TAKERS, or the call's name; "unknown" if it was not observed. step: number of batches taken
    before. idle_steps: batches since the block last had an owner.
    """

    request: str | None
    call: int
    kind: str
    step: int
    idle_steps: int


@attrs.frozen
class Span:
    """Tokens [start, end) that were computed again, and why. removal: set if a key was lost."""

    start: int
    end: int
    cause: str
    removal: Removal | None = None


@attrs.frozen(kw_only=True)
class Nearest:
    """The earlier request with the longest equal prefix, the newest of several.

    token, its_token: the token of each after that prefix; None if it ends there.
    """

    request: str
    differs_at: int
    token: int | None
    its_token: int | None


@attrs.frozen(kw_only=True)
class Explanation:
    """One admission. again: the request was admitted before, so this one counts in no total.
    lengths: one for each of LENGTHS. spans: tile the tokens from the hits to the ideal.
    """

    request: str
    call: int
    step: int
    again: bool
    num_tokens: int
    lengths: tuple[int, ...]
    spans: tuple[Span, ...]
    nearest: Nearest | None

    @property
    def ideal(self) -> int:
        """Tokens that an unlimited cache would have had."""
        return self.lengths[0]

    @property
    def hits(self) -> int:
        """Tokens that the allocation took from the cache."""
        return self.lengths[-1]


@attrs.frozen(kw_only=True)
class Missed:
    """What a request misses of the keys of this epoch, as far as they are remembered.

    call, step: number of calls and batches before. lengths: the last four of LENGTHS, as of the
    look-up before its first slots, or as of now while it has none; the last one is then the result
    of a look-up. spans: tile the tokens from the hits to the most that a look-up could find; those
    after the first length have the cause "unknown": their keys never existed, or are forgotten.
    complete: no key was forgotten.
    """

    request: str
    call: int
    step: int
    num_tokens: int
    lengths: tuple[int, ...]
    spans: tuple[Span, ...]
    complete: bool

    @property
    def hits(self) -> int:
        """Tokens that the allocation took from the cache, or would take."""
        return self.lengths[-1]


@attrs.define
class Totals:
    """Sums over all first admissions, in tokens. causes: tokens per cause (CAUSES). takers: evicted
    tokens per kind of call. evictors: evicted tokens per request.
    """

    admissions: int = 0
    tokens: int = 0
    ideal: int = 0
    hits: int = 0
    causes: Counter[str] = attrs.field(factory=Counter)
    takers: Counter[str] = attrs.field(factory=Counter)
    evictors: Counter[str] = attrs.field(factory=Counter)

    def add(self, each: Explanation) -> None:
        """Count an admission if it is the first of its request."""
        if each.again:
            return
        self.admissions += 1
        self.tokens += each.num_tokens
        self.ideal += each.ideal
        self.hits += each.hits
        for span in each.spans:
            size = span.end - span.start
            self.causes[span.cause] += size
            if span.cause == "evicted" and span.removal is not None:
                self.takers[span.removal.kind] += size
                self.evictors[span.removal.request or "?"] += size
