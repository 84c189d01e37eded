# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of positions to come: whose output is taken, and what rejected drafts move."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.check.mutants.worlds import (
    AHEAD_COPIED,
    AHEAD_FAMILY,
    AHEAD_REJECTED,
    AHEAD_SWAPPED,
    HASTY,
)
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions import (
    allocate,
    append,
    batches,
    free,
    output,
    plan,
    requests,
    swap,
    window,
)
from kvcore.types.errors import InOpenBatch, OutputOutOfOrder

IN_ORDER = (
    "a request that finds a block early reads it behind its write, and a cancel withdraws the key"
)


@mutant(
    HASTY,
    "COMPUTED-RULE",
    unnamed="no engine appends to a request that the open batch schedules",
)
def m_append_in_open_batch(patcher: Patcher) -> None:
    """A request gets a token that cannot have been sampled: the open batch schedules it."""

    @patcher.around(append, "check_append")
    def check_others(check: Any, tx: Transaction, *args: Any) -> None:
        with suppress(InOpenBatch):
            check(tx, *args)


def publish_guesses(publish: Any, tx: Transaction, request: Any, *_: int, **final: bool) -> None:
    """Publish what is scheduled of a request, as if the tokens of positions to come were 0."""
    guessed = requests.extend(tx, request, [0] * request.num_output_placeholders)
    hashes = guessed.block_hashes
    publish(tx, replace(request, block_hashes=hashes), request.num_computed, **final)
    tx.put(replace(tx.request(request.request_id), block_hashes=request.block_hashes))


@mutant("ahead-drafts", "CACHE-KV", "CACHED-COUNT")
def m_placeholder_hashed(patcher: Patcher) -> None:
    """Positions to come are hashed and published when they are scheduled."""
    patcher.around(allocate, "publish_blocks")(publish_guesses)


@mutant("ahead-drafts-completed", "CACHE-KV", "CACHED-COUNT")
def m_completed_placeholder_hashed(patcher: Patcher) -> None:
    """Positions to come are hashed and published when their batch is completed."""
    patcher.around(batches, "publish_blocks")(publish_guesses)


@mutant("ahead-drafts-completed", "PUBLISHED", costs=IN_ORDER)
def m_late_token_publishes_what_is_in_flight(patcher: Patcher) -> None:
    """A token that fills a block publishes it, though a batch in flight has yet to write it."""
    patcher.replace(output, "num_finished", lambda _, request: request.num_accepted)


@mutant(
    AHEAD_COPIED,
    "PUBLISHED",
    costs=IN_ORDER,
    unnamed="no named world forks and publishes when a batch is completed",
)
def m_copies_from_the_known_tokens_on(patcher: Patcher) -> None:
    """A shared block is copied again though what is planned now stands behind it."""

    @patcher.around(plan, "plan_rewrites")
    def from_known(rewrites: Any, tx: Transaction, request: Any, hits: Any, lengths: Any) -> Any:
        local = min(lengths.local, len(request.tokens))
        return rewrites(tx, request, hits, replace(lengths, local=local))


@mutant("ahead-letters", "OUTPUT-ONCE", rows=(78,))
def m_stale_output_taken(patcher: Patcher) -> None:
    """Output is taken of a batch from before its request was cut or scheduled anew."""
    for module in (append, requests):
        patcher.replace(module, "check_output", lambda *_: None)


@mutant("ahead", "OUTPUT-ONCE")
def m_later_output_taken(patcher: Patcher) -> None:
    """Output is taken of a batch that samples a later token, or none of the request."""
    for module in (append, requests):

        @patcher.around(module, "check_output")
        def check_age(check: Any, *args: Any) -> None:
            with suppress(OutputOutOfOrder):
                check(*args)


@mutant("ahead-two", "OUTPUT-ONCE")
def m_completed_batch_awaited_no_more(patcher: Patcher) -> None:
    """When a batch is completed, it is forgotten that its output is to come."""

    @patcher.around(batches, "release_rows")
    def forgetting(release: Any, tx: Transaction, number: int) -> None:
        release(tx, number)
        for request in map(tx.request, filter(None, tx.rows)):
            left = (each for each in request.samplers if each[0] > number)
            tx.put(replace(request, samplers=tuple(left)))


@mutant("ahead-letters", "OUTPUT-ONCE", rows=(78,))
def m_scheduled_anew_takes_old_output(patcher: Patcher) -> None:
    """A request that computes known tokens again takes what its old pass over them sampled."""

    def scheduled(request: RequestState, number: int, count: int) -> RequestState:
        samplers = (*request.awaited, (number, count))
        return replace(request, num_computed=count).awaiting(samplers)

    patcher.replace(RequestState, "scheduled", scheduled)


@mutant("ahead-letters", "OUTPUT-ONCE")
def m_cut_takes_old_output(patcher: Patcher) -> None:
    """A request that was cut takes what was sampled behind its old text."""
    patcher.replace(RequestState, "awaiting_none", lambda request, _: request)


@mutant("ahead-drafts", "COMPUTED-RULE", shows=AHEAD_REJECTED)
def m_rejected_keeps_count(patcher: Patcher) -> None:
    """A batch that was planned behind drafts is remembered to begin behind rejected ones, too."""
    patcher.replace(requests, "shift_starts", lambda *_: None)


@mutant("ahead-drafts", "COMPUTED-RULE")
def m_rejected_drafts_stay_to_come(patcher: Patcher) -> None:
    """Positions of rejected drafts stay scheduled."""
    patcher.around(requests, "read_count")(
        lambda read, name, value: 0 if name == "num_rejected" else read(name, value)
    )


@mutant("states-ahead-drafts", "COMPUTED-RULE", "STATE-READ")
def m_rejected_state_goes_on(patcher: Patcher) -> None:
    """A request goes on from a state that includes a rejected draft."""
    patcher.replace(requests, "_begin_anew", lambda _, request: request)


@mutant("ahead-window", "NULL-PREFIX", rows=(73,))
def m_window_moves_with_positions_to_come(patcher: Patcher) -> None:
    """A window gives back what the query at the last known token sees, if drafts are rejected."""
    for module in (plan, window, append):

        @patcher.around(module, "visible_from")
        def ahead(visible: Any, tx: Any, request: Any, count: int) -> int:
            found: int = visible(tx, request, max(count, request.num_computed))
            return found


@mutant("ahead-fork", "COMPUTED-RULE", shows=AHEAD_FAMILY)
def m_child_counts_positions_to_come(patcher: Patcher) -> None:
    """A forked child counts positions whose tokens its parent has yet to get."""

    def settled(self: Transaction, request: Any) -> int:
        record = self.scheduled[request.row]
        return int(request.num_computed if record is None else record.num_computed_before)

    patcher.replace(Transaction, "num_settled", settled)


@mutant("ahead-moves", "OUTPUT-ONCE")
def m_leaving_loses_output_to_come(patcher: Patcher) -> None:
    """A request that leaves the open batch awaits only the oldest of the batches before."""
    cut = free.cut_tables

    def without_to_come(
        tx: Transaction, request: RequestState, num_tokens: int, num_to_come: int
    ) -> None:
        del num_to_come
        cut(tx, request, num_tokens)

    patcher.during(free, "leave_open_batch", free, "cut_tables", without_to_come)


@mutant("ahead-swap", "COMPUTED-RULE", shows=AHEAD_SWAPPED)
def m_swap_keeps_to_come(patcher: Patcher) -> None:
    """A request is swapped out with the token that its next one is sampled from."""
    patcher.replace(swap, "num_saved", lambda tx, request: tx.num_settled(request))


@mutant("ahead", "PUBLISHED", costs="less is findable, what is found is right")
def m_fill_publishes_no_block(patcher: Patcher) -> None:
    """A block is not findable whose last token comes after it was scheduled."""
    for module in (append, requests):
        patcher.replace(module, "publish_filled", lambda *_: None)


@mutant("ahead", "CACHED-COUNT", rows=(77,), costs="less is findable, what is found is right")
def m_cursor_passes_positions_to_come(patcher: Patcher) -> None:
    """A block counts as published once it is scheduled, though its last token is to come."""
    for module in (allocate, append):

        @patcher.around(module, "commit")
        def commit_cached(commit: Any, tx: Transaction, planned: Any) -> Any:
            grown = commit(tx, planned)
            request = tx.request(planned.request.request_id)
            counts = (request.num_computed // each.block_size for each in tx.config.groups)
            tx.put(replace(request, num_cached=tuple(counts)))
            return grown
