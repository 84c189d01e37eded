# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of external loads that fail: what rests on them, and whom a report reaches.

Rules: as in seeding.py. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions import allocate, batches, fork, free, publish, requests, rewind
from kvcore.transitions.unconfirmed_loads import fall_to, note_keyed, spoil


def nothing(*_: Any) -> None:
    """Do nothing."""


def drop_reporter(tx: Transaction, name: str) -> None:
    """Forget a request as one that can report, and a load that nobody can; keys stay."""
    left = [
        replace(load, reporters=tuple(each for each in load.reporters if each.request_id != name))
        for load in tx.loads
    ]
    tx.loads = tuple(load for load in left if load.reporters)


@mutant("loads-fail", "CACHE-KV", "LOAD-FAILED")
def m_failed_load_stays_findable(patcher: Patcher) -> None:
    """Blocks that a failed load left unwritten keep their keys."""

    def keep_keys(tx: Transaction, *_: Any) -> None:
        tx.loads = ()

    patcher.setattr(rewind, "spoil", keep_keys)


@mutant("loads-fail", "COMPUTED-RULE")
def m_failed_load_stays_computed(patcher: Patcher) -> None:
    """Tokens that a failed load did not bring still count as computed."""

    def cut_nothing(tx: Transaction, request: RequestState, _num_tokens: int) -> None:
        tx.put(request)

    patcher.setattr(rewind, "cut_tables", cut_nothing)


@mutant("loads-fail-pairs", "KV-READ", "LOAD-FAILED")
def m_hits_on_a_failed_load_stay(patcher: Patcher) -> None:
    """Another request keeps counting tokens that a failed load did not bring."""
    patcher.setattr(rewind, "spoilt_requests", lambda *_: [])
    patcher.setattr(rewind, "check_held", nothing)


@mutant("loads-fail-pairs", "LOAD-FAILED")
def m_hits_do_not_rest_on_a_load(patcher: Patcher) -> None:
    """The request that hits loaded tokens is not remembered."""
    patcher.setattr(allocate, "rest", nothing)


@mutant("loads-fail-pairs", "CACHE-KV", "LOAD-FAILED")
def m_report_withdraws_what_is_held(patcher: Patcher) -> None:
    """Keys are withdrawn of the blocks in tables alone: those of a request that left stay."""

    def spoil_held(tx: Transaction, names: Sequence[str], count: int) -> None:
        held = {
            block
            for request_id in tx.rows
            if request_id is not None
            for table in tx.requests[request_id].tables
            for block in table
        }
        tx.loads = tuple(
            replace(load, blocks=tuple(pair for pair in load.blocks if pair[0] in held))
            for load in tx.loads
        )
        spoil(tx, names, count)

    patcher.setattr(rewind, "spoil", spoil_held)


@mutant("loads-fail-pairs", "CACHE-KV", "LOAD-FAILED")
def m_only_the_loaders_blocks_rest(patcher: Patcher) -> None:
    """What another request computes from loaded tokens is not remembered."""

    def note_own(tx: Transaction, name: str, keyed: Sequence[tuple[int, int]]) -> None:
        if any(load.reporters[0].request_id == name for load in tx.loads):
            note_keyed(tx, name, keyed)

    patcher.setattr(publish, "note_keyed", note_own)


@mutant("loads-fail", "KV-READ", "LOAD-FAILED")
def m_child_does_not_rest_on_a_load(patcher: Patcher) -> None:
    """A forked child is not reached by the report of what it shares."""
    patcher.setattr(fork, "inherit_rest", nothing)
    patcher.setattr(rewind, "check_held", nothing)


@mutant("loads-fail", "KV-READ", "LOAD-FAILED")
def m_report_passes_by_the_host(patcher: Patcher) -> None:
    """A swapped request keeps counting tokens that a failed load did not bring."""
    patcher.setattr(rewind, "drop_host", nothing)


@mutant("flight-loads-remove", "CACHE-KV", "LOAD-FAILED")
def m_freed_request_cannot_report(patcher: Patcher) -> None:
    """A request that counts no token of a load any more is forgotten as one that can report it."""

    def forget(tx: Transaction, name: str, num_tokens: int) -> None:
        fall_to(tx, name, num_tokens)
        for load in tx.loads:
            if not load.reporter(name).counted:
                drop_reporter(tx, name)

    patcher.setattr(free, "fall_to", forget)


@mutant("flight-loads-remove", "CACHE-KV", "LOAD-FAILED")
def m_load_that_nobody_can_report_stays(patcher: Patcher) -> None:
    """What rests on a load stays findable when the last request is removed that could report it."""
    patcher.setattr(requests, "forget_reporter", drop_reporter)


@mutant("loads-fail-pairs", "LOAD-FAILED")
def m_load_is_confirmed_at_once(patcher: Patcher) -> None:
    """A load is confirmed when its own batch is taken."""
    patcher.setattr(batches, "confirm", lambda *_: ())


@mutant(
    "loads-fail",
    "UNCONFIRMED",
    costs="a report takes more tokens than it must",
)
def m_cut_request_still_counts_a_load(patcher: Patcher) -> None:
    """A request whose count fell still counts the tokens of a load."""
    patcher.setattr(free, "fall_to", nothing)
