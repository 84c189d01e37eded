# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs on drafts, external tokens, events and extra keys.

Rules: as in mutants.py. Numbers are rows of the bug catalogue.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvcore import Group, LoRA, calls, operations, rewind
from kvcore.block_pool import PoolDraft
from kvcore.effects import Effects
from kvcore.extra_keys import ExtraKey, ExtraKeys
from kvcore.hash_index import HashIndexDraft
from kvcore.requests import extend
from kvcore.state import Draft, RequestState
from tests.explore.seeding import after, mutant, put
from tests.explore.worlds import world

SLOT = Group(1)
DRAFTS = world(3, 1, 4, num_drafts=2)
LOADS = world(2, 2, 3, num_external=2, loads_fail=True)
PAIRS = world(2, 2, 2, groups=(SLOT,), num_external=1, loads_fail=True, calls_per_batch=2)
STORES = world(3, 2, 3, "load", "store", loads_fail=True, groups=(SLOT,))
COPIES = world(3, 2, 3, enable_events=True)
SALTED = world(
    *(2, 2, 2),
    kinds_of_requests=({}, {"cache_salt": "one"}, {"lora": LoRA("one")}),
    num_letters=1,
)


@mutant(DRAFTS, "DRAFT")
def m_cache_lookahead(patcher: pytest.MonkeyPatch) -> None:
    """Row 45: drafts are hashed and published before they are accepted."""

    def hash_drafts(_before: Any, drafted: Any, name: str) -> Any:
        request = drafted.requests[name]
        longer = extend(Draft(drafted), request, list(request.drafts))
        return put(drafted, attrs.evolve(request, block_hashes=longer.block_hashes))

    after(patcher, "add_drafts", hash_drafts)
    patcher.setattr(RequestState, "num_accepted", property(lambda self: self.num_computed))


@mutant(DRAFTS, "REQ-HASH")
def m_drafts_are_hashed(patcher: pytest.MonkeyPatch) -> None:
    def hash_drafts(_before: Any, drafted: Any, name: str) -> Any:
        request = drafted.requests[name]
        longer = extend(Draft(drafted), request, list(request.drafts))
        return put(drafted, attrs.evolve(request, block_hashes=longer.block_hashes))

    after(patcher, "add_drafts", hash_drafts)


@mutant(DRAFTS, "COMPUTED", "COMPUTED-RULE")
def m_rejected_drafts_stay_computed(patcher: pytest.MonkeyPatch) -> None:
    def keep(before: Any, accepted: Any, name: str) -> Any:
        count = before.requests[name].num_computed
        return put(accepted, attrs.evolve(accepted.requests[name], num_computed=count))

    accept = calls.TRANSITIONS["accept"]

    def accept_all(where: Any, name: str, num_accepted: int) -> Any:
        outcome = accept(where, name, num_accepted)
        return attrs.evolve(outcome, state=keep(where, outcome.state, name))

    patcher.setitem(calls.TRANSITIONS, "accept", accept_all)


@mutant(LOADS, "CACHE-KV")
def m_failed_load_stays_findable(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(rewind, "unwritten", lambda *_: iter(()))


@mutant(LOADS, "COMPUTED-RULE")
def m_failed_load_stays_computed(patcher: pytest.MonkeyPatch) -> None:
    def cut_nothing(draft: Draft, request: RequestState, _num_tokens: int) -> None:
        draft.store(request)

    patcher.setattr(rewind, "cut_tables", cut_nothing)


@mutant(PAIRS, "KV-READ")
def m_hits_on_a_failed_load_stay(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(rewind, "check_held", lambda *_: None)


@mutant(STORES, "OPERATIONS")
def m_operation_holds_no_block(patcher: pytest.MonkeyPatch) -> None:
    """Row 57: a block can be reused while it is still stored or loaded."""
    patcher.setattr(PoolDraft, "pin", lambda *_: None)


@mutant(STORES, "COMPUTED-RULE")
def m_failed_operation_counts(patcher: pytest.MonkeyPatch) -> None:
    finish = operations.finish_load

    def finish_done(draft: Draft, request: RequestState, operation: Any, _done: bool) -> None:
        finish(draft, request, operation, True)

    patcher.setattr(operations, "finish_load", finish_done)


@mutant(COPIES, "IDX-COMPLETE")
def m_evict_drops_dups(patcher: pytest.MonkeyPatch) -> None:
    """Row 4: evicting one copy drops its siblings from the index."""
    remove = HashIndexDraft.remove

    def remove_all(self: HashIndexDraft, key: bytes, _block: int) -> bool:
        while not remove(self, key, self.firsts[key]):
            pass
        return True

    patcher.setattr(HashIndexDraft, "remove", remove_all)


@mutant(COPIES, "EVT-COPY")
def m_event_per_copy(patcher: pytest.MonkeyPatch) -> None:
    """Row 5: an event for each evicted copy although another one is left."""
    remove = HashIndexDraft.remove

    def remove_loudly(self: HashIndexDraft, key: bytes, block: int) -> bool:
        remove(self, key, block)
        return True

    patcher.setattr(HashIndexDraft, "remove", remove_loudly)


@mutant(COPIES, "EVT-COPY")
def m_stored_event_lost(patcher: pytest.MonkeyPatch) -> None:
    patcher.setattr(Effects, "announce", lambda *_: None)


@mutant(SALTED, "KEY-SEP")
def m_extra_ignored(patcher: pytest.MonkeyPatch) -> None:
    """Rows 11, 12: the key is made of tokens only."""
    patcher.setattr(ExtraKeys, "of_block", lambda *_: ())


@mutant(SALTED, "KEY-SEP")
def m_extra_untagged(patcher: pytest.MonkeyPatch) -> None:
    """Row 10: an adapter and a salt of one name give one key."""

    def untagged(self: ExtraKeys, start: int, _end: int, _size: int) -> tuple[ExtraKey, ...]:
        names = [] if self.lora is None else [self.lora.name]
        names += [] if self.cache_salt is None or start else [self.cache_salt]
        return tuple((0, name.encode()) for name in names)

    patcher.setattr(ExtraKeys, "of_block", untagged)
