# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of the host tier, of stores and loads, and of reset.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from typing import Any

from kvcore import calls, operations, rewind, state, swap
from kvcore.block_pool import PoolDraft
from kvcore.check.mutants.seeding import Patcher, mutant, without
from kvcore.check.mutants.worlds import BASIC, LOAD_PAIRS, LOADS, STORES, SWAP, SWAP_TRIPLES
from kvcore.commands import SwapIn, SwapOut
from kvcore.state import Draft, RequestState


@mutant(SWAP, "KV-READ")
def m_swap_out_no_copy(patcher: Patcher) -> None:
    """A block goes to the host tier without its content."""
    without(patcher, SwapOut)


@mutant(SWAP, "KV-READ")
def m_swap_in_no_copy(patcher: Patcher) -> None:
    """A block comes back from the host tier without its content."""
    without(patcher, SwapIn)


@mutant(SWAP_TRIPLES, "KV-READ")
def m_swap_in_hits_unwritten(patcher: Patcher) -> None:
    """A request that comes back hits blocks that the open batch has yet to write."""
    find = swap.find_hits

    def find_all(draft: Draft, found: list[RequestState]) -> Any:
        records, draft.records = draft.records, draft.records.__class__()
        hits = find(draft, found)
        draft.records = records
        return hits

    patcher.setattr(swap, "find_hits", find_all)


@mutant(BASIC, "RESET", rows=(54,))
def m_reset_in_use(patcher: Patcher) -> None:
    """A reset forgets the keys while blocks are used."""

    def reset(before: Any) -> Any:
        def change(draft: Draft) -> bool:
            draft.device.clear_index()
            return True

        return state.transition(before, change)

    patcher.setitem(calls.TRANSITIONS, "reset_prefix_cache", reset)


@mutant(LOADS, "CACHE-KV")
def m_failed_load_stays_findable(patcher: Patcher) -> None:
    """Blocks that a failed load left unwritten keep their keys."""
    patcher.setattr(rewind, "unwritten", lambda *_: iter(()))


@mutant(LOADS, "COMPUTED-RULE")
def m_failed_load_stays_computed(patcher: Patcher) -> None:
    """Tokens that a failed load did not bring still count as computed."""

    def cut_nothing(draft: Draft, request: RequestState, _num_tokens: int) -> None:
        draft.store(request)

    patcher.setattr(rewind, "cut_tables", cut_nothing)


@mutant(LOAD_PAIRS, "KV-READ")
def m_hits_on_a_failed_load_stay(patcher: Patcher) -> None:
    """Another request keeps counting tokens that a failed load did not bring."""
    patcher.setattr(rewind, "check_held", lambda *_: None)


@mutant(STORES, "OPERATIONS", rows=(57,))
def m_operation_holds_no_block(patcher: Patcher) -> None:
    """A block can be reused while it is still stored or loaded."""
    patcher.setattr(PoolDraft, "pin", lambda *_: None)


@mutant(STORES, "COMPUTED-RULE")
def m_failed_operation_counts(patcher: Patcher) -> None:
    """A load that failed counts as done."""
    finish = operations.finish_load

    def finish_done(draft: Draft, request: RequestState, operation: Any, _done: bool) -> None:
        finish(draft, request, operation, True)

    patcher.setattr(operations, "finish_load", finish_done)
