# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of failing external loads: what depends on them, and whom a report reaches."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.state.transaction import Transaction
from kvcore.transitions import allocate, batches, fork, free, publish, requests, rewind


def nothing(*_: Any) -> None:
    """Do nothing."""


def drop_reporter(tx: Transaction, name: str) -> None:
    """Forget that a request can report a load; keys stay, even if no request can report it."""
    left = [
        replace(load, reporters=tuple(each for each in load.reporters if each.request_id != name))
        for load in tx.loads
    ]
    tx.loads = tuple(load for load in left if load.reporters)


@mutant("loads-fail", "CACHE-KV", "LOAD-FAILED")
def m_failed_load_stays_findable(patcher: Patcher) -> None:
    """Blocks that a failed load left unwritten keep their keys."""
    patcher.replace(rewind, "spoil_loads", lambda tx, *_: setattr(tx, "loads", ()))


@mutant("loads-fail-inside", "LOAD-FAILED")
def m_report_withdraws_what_it_begins_in(patcher: Patcher) -> None:
    """A report withdraws the whole block in which its load begins, whoever wrote that block."""

    @patcher.around(rewind, "unwritten")
    def with_the_block(unwritten: Any, tx: Transaction, request: Any, count: int) -> list[int]:
        begun = [
            table[count // group.block_size]
            for group, table in zip(tx.config.groups, request.tables, strict=True)
            if count % group.block_size and count // group.block_size < len(table)
        ]
        return [*begun, *unwritten(tx, request, count)]


@mutant("loads-fail", "COMPUTED-RULE")
def m_failed_load_stays_computed(patcher: Patcher) -> None:
    """Tokens that a failed load did not bring still count as computed."""
    patcher.replace(rewind, "cut_tables", lambda tx, request, _: tx.put(request))


@mutant("loads-fail-pairs", "KV-READ", "LOAD-FAILED")
def m_hits_on_a_failed_load_stay(patcher: Patcher) -> None:
    """Another request keeps counting tokens that a failed load did not bring."""
    patcher.replace(rewind, "spoilt_requests", lambda *_: [])
    patcher.replace(rewind, "check_held", nothing)


@mutant("loads-fail-pairs", "LOAD-FAILED")
def m_hits_do_not_rest_on_a_load(patcher: Patcher) -> None:
    """The request that hits loaded tokens is not remembered."""
    patcher.replace(allocate, "note_owner", nothing)


@mutant("loads-fail-pairs", "CACHE-KV", "LOAD-FAILED")
def m_report_withdraws_what_is_held(patcher: Patcher) -> None:
    """Keys are withdrawn of the blocks in tables alone: those of a request that left stay."""

    @patcher.around(rewind, "spoil_loads")
    def spoil_held(spoil: Any, tx: Transaction, *args: Any) -> None:
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
        spoil(tx, *args)


@mutant("loads-fail-pairs", "CACHE-KV", "LOAD-FAILED")
def m_only_the_loaders_blocks_rest(patcher: Patcher) -> None:
    """What another request computes from loaded tokens is not remembered."""

    @patcher.around(publish, "note_keyed")
    def note_own(note: Any, tx: Transaction, name: str, keyed: Any) -> None:
        if any(load.reporters[0].request_id == name for load in tx.loads):
            note(tx, name, keyed)


@mutant("loads-fail", "KV-READ", "LOAD-FAILED")
def m_child_does_not_rest_on_a_load(patcher: Patcher) -> None:
    """A forked child is not reached by the report of what it shares."""
    patcher.replace(fork, "inherit_loads", nothing)
    patcher.replace(rewind, "check_held", nothing)


@mutant("states-loads-completed", "LOAD-FAILED")
def m_owed_state_outlives_its_load(patcher: Patcher) -> None:
    """A state that a batch in flight owes gets its key although a load below it failed."""
    patcher.replace(Transaction, "rests", lambda self, block: self.device.has_key(block))


@mutant("loads-fail", "KV-READ", "LOAD-FAILED")
def m_report_passes_by_the_host(patcher: Patcher) -> None:
    """A swapped request keeps counting tokens that a failed load did not bring."""
    patcher.replace(rewind, "drop_host", nothing)


@mutant("flight-loads-remove", "CACHE-KV", "LOAD-FAILED")
def m_freed_request_cannot_report(patcher: Patcher) -> None:
    """A request that counts no token of a load any more is forgotten as one that can report it."""

    @patcher.around(free, "lower_counted")
    def forget(lower: Any, tx: Transaction, name: str, num_tokens: int) -> None:
        lower(tx, name, num_tokens)
        for load in tx.loads:
            if not load.reporter(name).counted:
                drop_reporter(tx, name)


@mutant("flight-loads-remove", "CACHE-KV", "LOAD-FAILED")
def m_unreportable_load_stays(patcher: Patcher) -> None:
    """What rests on a load stays findable when the last request is removed that could report it."""
    patcher.replace(requests, "forget_reporter", drop_reporter)


@mutant("flight-loads-again", "COMPUTED-RULE", "KV-READ")
def m_reporter_counts_what_it_still_loads(patcher: Patcher) -> None:
    """A request that reports a failed load counts tokens of its own load that have yet to come."""
    patcher.replace(rewind, "num_loaded", lambda _, request: request.num_computed)


@mutant(
    "flight-loads-rewind",
    "COMPUTED-RULE",
    costs="what a rewind takes back in front of a load was written here, and is right",
)
def m_report_passes_by_what_stands_in_front(patcher: Patcher) -> None:
    """A request that a report cuts to the start of a load still counts the tokens before the load,
    which the report withdraws.
    """

    @patcher.around(rewind, "check_held")
    def check_others(check_held: Any, tx: Transaction, kept: Any, *args: Any) -> None:
        check_held(tx, dict.fromkeys(kept, 0), *args)


@mutant("loads-fail-two", "COMPUTED-RULE", costs="what a report takes too much is computed again")
def m_report_takes_what_stands_before_a_later_load(patcher: Patcher) -> None:
    """A request that rests on the later of two reported loads loses its tokens before it, too."""

    @patcher.around(rewind, "spoilt_requests")
    def spoilt_from_the_count(old: Any, tx: Transaction, ids: Any, num_tokens: int) -> Any:
        return [(name, num_tokens) for name, _ in old(tx, ids, num_tokens)]


@mutant("loads-fail-pairs", "LOAD-FAILED")
def m_load_is_confirmed_at_once(patcher: Patcher) -> None:
    """A load is confirmed when its own batch is taken."""
    patcher.replace(batches, "confirm_loads", lambda *_: ())


@mutant("loads-fail", "UNCONFIRMED", costs="a report takes more tokens than it must")
def m_cut_request_still_counts_a_load(patcher: Patcher) -> None:
    """A request whose count fell still counts the tokens of a load."""
    patcher.replace(free, "lower_counted", nothing)
