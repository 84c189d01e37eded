# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of positions to come: whose output is taken, and what rejected drafts move."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant
from kvcore.check.mutants.worlds import AHEAD_FAMILY, AHEAD_SWAPPED
from kvcore.state.transaction import Transaction
from kvcore.transitions import allocate, append, plan, requests, swap, truncate, window


def keep_output(patcher: Patcher, module: Any, name: str) -> None:
    """Let a function of a module leave the batch from which on a request takes output."""

    @patcher.around(module, name)
    def keeping(change: Any, request: Any, **fields: Any) -> Any:
        fields.pop("output_from", None)
        return change(request, **fields)


@mutant("ahead-letters", "OUTPUT-ONCE", rows=(78,))
def m_stale_output_taken(patcher: Patcher) -> None:
    """Output is taken of a batch from before its request was cut or scheduled anew."""
    for module in (append, requests):
        patcher.replace(module, "check_output", lambda *_: None)


@mutant("ahead-letters", "OUTPUT-ONCE", rows=(78,))
def m_scheduled_anew_takes_old_output(patcher: Patcher) -> None:
    """A request that computes known tokens again takes what its old pass over them sampled."""
    keep_output(patcher, allocate, "replace")


@mutant("ahead-letters", "OUTPUT-ONCE")
def m_cut_takes_old_output(patcher: Patcher) -> None:
    """A request that was cut takes what was sampled behind its old text."""
    keep_output(patcher, truncate, "replace")


@mutant("ahead-drafts", "COMPUTED-RULE")
def m_rejected_keeps_count(patcher: Patcher) -> None:
    """A batch that was planned behind drafts is remembered to begin behind rejected ones, too."""
    patcher.replace(requests, "shift_starts", lambda *_: None)


@mutant("ahead-drafts", "COMPUTED-RULE")
def m_rejected_drafts_stay_to_come(patcher: Patcher) -> None:
    """Positions of rejected drafts stay scheduled."""
    patcher.around(requests, "read_count")(
        lambda read, name, value: 0 if name == "num_rejected" else read(name, value)
    )


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
        record = self.scheduled.get(request.request_id)
        return int(request.num_computed if record is None else record.num_computed_before)

    patcher.replace(Transaction, "num_settled", settled)


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
