# SPDX-License-Identifier: Apache-2.0
"""An engine's counts of a request and of a call, and the tokens requested from the core for them.

`kvcore.compat` makes them anew in each call.
"""

from __future__ import annotations

from msgspec import Struct


class RequestCounts(Struct, frozen=True, gc=False):
    """A request's id and counts at the time of a call."""

    name: str
    num_tokens: int
    num_computed: int


class TokenCounts(Struct, frozen=True, gc=False):
    """The tokens of a call: new, hit, external and lookahead."""

    num_new: int
    num_hit: int
    num_external: int
    num_lookahead: int


class AllocationSpan(Struct, frozen=True, gc=False):
    """The tokens requested from the core.

    start: first position that the engine computes. end: exclusive. again: the tokens have slots
    already and are computed again. whole: external tokens fill the request.
    """

    num_new: int
    num_external: int
    num_lookahead: int
    start: int
    end: int
    again: bool
    whole: bool
