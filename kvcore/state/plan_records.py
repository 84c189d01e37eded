# SPDX-License-Identifier: Apache-2.0
"""The records of a planned allocation, which `transitions/plan.py` and its parts make.

Twin: rust/src/state/plan_records.rs.
"""

from __future__ import annotations

import attrs
from msgspec import Struct
from msgspec.structs import replace

from kvcore.state.state import RequestState
from kvcore.types.slot_request import SlotRequest
from kvcore.types.values import Refused


@attrs.frozen
class Trim:
    """Positions [first, end) of a group's table that become the null block."""

    group_id: int
    first: int
    end: int


class Lengths(Struct, frozen=True, gc=False, kw_only=True):
    """Tokens of an allocation, counted from the request's first one:

        | computed | hit | external | new | lookahead |
                     local      total scheduled   slots

    seen_from: the first query whose window the trim must keep. skipped: leading blocks of each
    group that this query does not see.
    """

    local: int
    total: int
    scheduled: int
    slots: int
    seen_from: int
    skipped: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Rewrite:
    """A block of the request that is about to be written although it is shared or keyed.

    shared: a fresh block replaces it. copied: it holds earlier positions, so the fresh block is a
    copy. same: it keeps its key, because exactly that content is written. for_key: it is replaced
    for its keys alone.
    """

    group_id: int
    position: int
    shared: bool
    copied: bool
    same: bool
    for_key: bool = False

    def without_copy(self) -> Rewrite:
        """Return the rewrite in which the block gives up keys instead of being replaced for
        them.
        """
        return attrs.evolve(self, shared=False, copied=False) if self.for_key else self


class StateStep(Struct, frozen=True, gc=False, kw_only=True):
    """The step of one state group.

    source, target: places of the states before and after it; no source: there is no state before,
    or external tokens bring one. takes: a new block is written, else that of the source. copies:
    the new block begins as a copy of the source. stays: the source stays in the table. begun:
    another call of this batch began the step. for_key: the source is replaced for its key alone.
    num_drafts: new blocks behind the target, for the states after drafts.
    """

    group_id: int
    source: int | None
    target: int
    takes: bool = True
    copies: bool = False
    stays: bool = False
    begun: bool = False
    for_key: bool = False
    num_drafts: int = 0

    @property
    def replaces(self) -> bool:
        """Whether a new block replaces the source."""
        return self.takes and self.source is not None and not self.stays

    def without_copy(self) -> StateStep:
        """Return the step in which a block gives up its key instead of being replaced for it."""
        return replace(self, takes=False, copies=False) if self.for_key else self


class Growth(Struct, frozen=True, gc=False, kw_only=True):
    """The growth of one group's table after the hits.

    num_nulls: positions already skipped. num_external: blocks for external tokens. num_new: blocks
    after those, including preallocation.
    """

    num_nulls: int
    num_external: int
    num_new: int


class Plan(Struct, frozen=True, gc=False, kw_only=True):
    """The changes that an allocation will make.

    slot_request: the arguments. hits: hit blocks per group, the null block where none is needed.
    num_local: computed and hit tokens. num_loaded: num_local plus external tokens. num_scheduled:
    num_loaded plus new tokens. growth: one per group; empty if no table grows, as in most steps.
    steps: of the state groups.
    """

    slot_request: SlotRequest
    request: RequestState
    hits: tuple[tuple[int, ...], ...]
    num_local: int
    num_loaded: int
    num_scheduled: int
    trims: tuple[Trim, ...]
    rewrites: tuple[Rewrite, ...]
    growth: tuple[Growth, ...]
    steps: tuple[StateStep, ...] = ()


@attrs.frozen(kw_only=True)
class Refusal:
    """An allocation that does not fit, and its window trim, which is kept."""

    refused: Refused
    request: RequestState
    trims: tuple[Trim, ...] = ()
