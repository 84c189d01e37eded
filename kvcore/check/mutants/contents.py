# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of what blocks really hold: copies, publication, preemption.

Rules: as in seeding.py. `rows` are those of the catalogue (catalogue.py). Twin: none.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore import calls, plan, release
from kvcore.block_pool import PoolDraft
from kvcore.check.mutants.seeding import Patcher, after, mutant, put, without
from kvcore.check.mutants.worlds import BASIC, CUT, DRAFTS, ONE, PAIRS, TRIPLES
from kvcore.commands import CopyOnWrite
from kvcore.requests import extend
from kvcore.state import Draft, RequestState


@mutant(BASIC, "REF", "KV-READ", rows=(41,))
def m_fork_no_ref(patcher: Patcher) -> None:
    """A fork shares its parent's blocks without being counted as an owner."""
    fork = calls.TRANSITIONS["fork"]

    def fork_untouched(*args: Any) -> Any:
        with Patcher() as inner:
            inner.setattr(PoolDraft, "touch", lambda *_: None)
            return fork(*args)

    patcher.setitem(calls.TRANSITIONS, "fork", fork_untouched)


@mutant(BASIC, "KV-READ", "WRITE-EXCL", rows=(41,))
def m_no_cow(patcher: Patcher) -> None:
    """A shared block is written in place."""
    patcher.setattr(plan, "plan_rewrites", lambda *_: ())


@mutant(BASIC, "KV-READ", rows=(41,))
def m_cow_no_copy(patcher: Patcher) -> None:
    """The block that takes a shared one's place is not filled from it."""
    without(patcher, CopyOnWrite)


@mutant(CUT, "CACHE-KV", "WRITE-EXCL")
def m_keyed_block_written_in_place(patcher: Patcher) -> None:
    """A block that is written again keeps the key of its old content."""
    rewrites = plan.plan_rewrites

    def only_shared(*args: Any) -> Any:
        return tuple(rewrite for rewrite in rewrites(*args) if rewrite.shared)

    patcher.setattr(plan, "plan_rewrites", only_shared)


@mutant(ONE, "WAIT-EMPTY", rows=(44,))
def m_free_keeps_count(patcher: Patcher) -> None:
    """A preempted request still counts as computed what it gave back."""

    def keep(before: Any, freed: Any, name: str) -> Any:
        count = before.requests[name].num_computed
        return put(freed, attrs.evolve(freed.requests[name], num_computed=count))

    after(patcher, "free", keep)


@mutant(PAIRS, "CACHE-KV", rows=(72,))
def m_preempt_keeps_open_batch_keys(patcher: Patcher) -> None:
    """Keys that the open batch published for a request stay when it leaves the batch."""

    def leave_keys(draft: Draft, request: RequestState) -> None:
        record = draft.records.get(request.request_id)
        if record is not None:
            draft.records = draft.records.delete(request.request_id)
            release.cut_tables(draft, request, record.num_computed_before)

    patcher.setattr(release, "leave_open_batch", leave_keys)


@mutant(TRIPLES, "KV-READ")
def m_hit_in_open_batch_pulled_away(patcher: Patcher) -> None:
    """A request leaves the open batch though another one counts tokens that it was to write."""
    patcher.setattr(release, "check_leaving", lambda *_: None)


@mutant(DRAFTS, "DRAFT", rows=(45,))
def m_cache_lookahead(patcher: Patcher) -> None:
    """Drafts are hashed and published before they are accepted."""

    def hash_drafts(_before: Any, drafted: Any, name: str) -> Any:
        request = drafted.requests[name]
        longer = extend(Draft(drafted), request, list(request.drafts))
        return put(drafted, attrs.evolve(request, block_hashes=longer.block_hashes))

    after(patcher, "add_drafts", hash_drafts)
    patcher.setattr(RequestState, "num_accepted", property(lambda self: self.num_computed))
