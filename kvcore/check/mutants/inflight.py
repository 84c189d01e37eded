# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of timing: batches in flight, quarantine, publication at completion, cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, after, mutant
from kvcore.check.mutants.worlds import (
    COMPLETED,
    FLYING,
    FLYING_FAMILY,
    FLYING_SWAPPED,
    FLYING_WINDOW,
)
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.quarantine import QuarantineTransaction
from kvcore.state.plan_records import Plan
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction
from kvcore.transitions import (
    allocate,
    append,
    batches,
    cancel,
    fork,
    in_flight,
    publish,
    requests,
    swap,
)
from kvcore.transitions.publish import publish_blocks

IN_ORDER = "batches that run one after the other hide it"


@mutant("flight", "CMD-INFLIGHT", rows=(56, 93), costs=IN_ORDER)
def m_freed_under_a_batch(patcher: Patcher) -> None:
    """A block that leaves a table can be taken at once, though a batch in flight still uses it."""
    patcher.replace(TableEdit, "_keep_in_use", lambda *_: None)


@mutant("flight-window", "CMD-INFLIGHT", rows=(73,), costs=IN_ORDER)
def m_window_block_freed_under_a_batch(patcher: Patcher) -> None:
    """A block that falls behind a window can be taken while a batch in flight still reads it."""
    patcher.during(TableEdit, "blank", TableEdit, "_keep_in_use", lambda *_: None)


@mutant("flight-fork", "CMD-INFLIGHT", rows=(58,), costs=IN_ORDER)
def m_copy_in_flight_holds_nothing(patcher: Patcher) -> None:
    """The source of a copy that has not run yet can be taken and written."""

    patcher.during(allocate, "apply_rewrite", PoolTransaction, "use", lambda *_: None)


@mutant("flight-swap", "CMD-INFLIGHT", rows=(59,), costs=IN_ORDER)
def m_host_block_reused_in_flight(patcher: Patcher) -> None:
    """A host block that a batch in flight copies from or to can be taken at once."""

    class Forgetful(PoolTransaction):
        __slots__ = ()

        def use(self, block: int, number: int) -> None:
            pass

    @patcher.around(Transaction, "host_tier")
    def forgetful_host(host_tier: Any, self: Transaction) -> Any:
        pool = host_tier(self)
        pool.__class__ = Forgetful
        return pool


@mutant("flight-swap", "CMD-INFLIGHT", rows=(90,), costs=IN_ORDER)
def m_swapped_out_before_its_copy(patcher: Patcher) -> None:
    """A block of a request that is swapped out can be taken before its copy to the host ran."""

    @patcher.around(swap, "move_out")
    def move_out_idle(move_out: Any, tx: Transaction, *args: Any) -> None:
        tx.device.end_use(lambda number: number == tx.batch.number)
        move_out(tx, *args)


@mutant("flight-two", "CMD-INFLIGHT", costs=IN_ORDER)
def m_first_batch_ends_all_uses(patcher: Patcher) -> None:
    """A block that two batches in flight use is free when the first of them is completed."""

    def end_all(self: QuarantineTransaction, ended: Callable[[int], bool]) -> None:
        for block, numbers in self.busy.items():
            if any(map(ended, numbers)):
                self.busy = self.busy.delete(block)

    patcher.replace(QuarantineTransaction, "end_use", end_all)


@mutant("flight", "QUARANTINE", "DRAIN")
def m_quarantine_never_ends(patcher: Patcher) -> None:
    """Blocks that no batch uses any more stay where they waited."""

    def end_nothing(_: QuarantineTransaction) -> Iterator[int]:
        return iter(())

    patcher.replace(QuarantineTransaction, "end", end_nothing)


@mutant("flight", "PARTITION", "PREEMPT-GAIN", rows=(68,))
def m_deferred_block_is_nowhere(patcher: Patcher) -> None:
    """A block that is released while a batch uses it is in no queue: preempting gains nothing."""

    @patcher.around(PoolTransaction, "release")
    def release_idle(release_all: Any, self: PoolTransaction, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.is_busy(block):
                self.ref_counts[block] -= 1
            else:
                release_all(self, [block])


@mutant("flight-hits", "CACHE-KV", "KV-READ", rows=(34,))
def m_cancel_keeps_keys(patcher: Patcher) -> None:
    """What a batch published before it ran stays findable when the batch is cancelled."""

    @patcher.around(cancel, "take_back")
    def unpublished(take_back: Any, tx: Any, cancelled: list[Any], number: int) -> Any:
        return take_back(tx, [replace(each, published_keys=()) for each in cancelled], number)


@mutant("flight-merge-late", "PUBLISHED", costs="what was written is not found again")
def m_cancel_drops_merges(patcher: Patcher) -> None:
    """A cancel forgets which blocks wait to be merged for requests that go on counting them."""
    patcher.replace(cancel, "keep_merges", lambda *_: None)


@mutant("ahead-drafts", "PUBLISHED", costs="what was written is not found again")
def m_cancel_withdraws_older_keys(patcher: Patcher) -> None:
    """A cancel takes the key of a block that an older batch wrote, if it was given later."""

    def note_in_open(tx: Transaction, *noted: Any) -> None:
        in_flight.note_published_key(tx, *noted[-2:])

    patcher.replace(publish, "note_written_key", note_in_open)


@mutant("flight-two-completed", "CACHE-KV", shows=COMPLETED)
def m_completion_publishes_what_is_in_flight(patcher: Patcher) -> None:
    """A batch's completion publishes what later batches have yet to write, too."""
    patcher.replace(batches, "num_finished", lambda _, request: request.num_accepted)


@mutant("flight-two-completed", "CACHE-KV", shows=COMPLETED)
def m_published_for_good_when_scheduled(patcher: Patcher) -> None:
    """Blocks are published when they are scheduled, as if their batch had run."""

    @patcher.around(allocate, "commit")
    def commit_published(commit: Any, tx: Transaction, planned: Plan) -> Any:
        grown = commit(tx, planned)
        request = tx.request(planned.request.request_id)
        publish_blocks(tx, request, request.num_accepted, final=True)
        return grown


@mutant("flight-completed", "CACHE-KV", rows=(80,))
def m_next_step_publishes_what_is_in_flight(patcher: Patcher) -> None:
    """A request's next step publishes what the step before computes, though it may still run."""

    for module in (allocate, append):

        @patcher.around(module, "commit")
        def commit_behind(commit: Any, tx: Transaction, planned: Plan) -> Any:
            request = planned.request
            publish_blocks(tx, request, request.num_accepted, final=True)
            return commit(tx, replace(planned, request=tx.request(request.request_id)))


@mutant("flight-fork", "KV-READ")
def m_cancel_forgets_forks(patcher: Patcher) -> None:
    """A fork keeps what its parent was scheduled in a batch that is cancelled."""
    patcher.replace(fork, "inherit_entries", lambda *_: None)


@mutant("flight-fork", "KV-READ")
def m_cancel_forgets_copies(patcher: Patcher) -> None:
    """A request still counts what stands in a copy that was cancelled."""

    @patcher.around(allocate, "note_request")
    def note_counts(note: Any, tx: Any, name: str, before: int, _: int, **options: Any) -> None:
        note(tx, name, before, before, **options)


@mutant("flight-swap", "KV-READ")
def m_cancel_forgets_swaps(patcher: Patcher) -> None:
    """A request stays in the tier to which a cancelled batch was to copy it."""
    patcher.replace(swap, "note_request", lambda *_: None)


@mutant("flight", "COMPUTED-RULE", "KV-READ", rows=(72,))
def m_cancel_keeps_counts(patcher: Patcher) -> None:
    """Requests still count what a cancelled batch was to compute."""
    patcher.replace(cancel, "fall", lambda *_: None)


@mutant("flight", "TABLE-MIRROR", shows=FLYING)
def m_cancel_leaves_tables(patcher: Patcher) -> None:
    """After a cancel, the worker's tables stay as the batch left them, whether it ran or not."""
    patcher.replace(cancel, "rebuild", lambda *_: None)


@mutant("flight", "QUARANTINE")
def m_cancelled_batch_still_uses(patcher: Patcher) -> None:
    """Blocks of a cancelled batch wait for its end."""

    patcher.during(cancel, "take_back", PoolTransaction, "end_use", lambda *_: None)


@mutant("flight", "IN-FLIGHT", costs="a batch remembers a name that is never used again")
def m_removed_request_stays_marked(patcher: Patcher) -> None:
    """Batches in flight remember a request that has gone."""
    patcher.replace(requests, "forget_entries", lambda *_: None)


@mutant(
    "flight",
    "ROW-LIFE",
    rows=(89,),
    costs="tables change in order; no engine here keeps rows of a batch",
)
def m_row_given_at_once(patcher: Patcher) -> None:
    """The row of a request that has gone is given again while unfinished batches name it."""

    def give(before: Any, removed: Any, name: str) -> Any:
        rows = before.free_rows.append(before.requests[name].row)
        return replace(removed, free_rows=rows, held_rows=before.held_rows)

    after(patcher, "remove_request", give)


@mutant(FLYING_SWAPPED, "KV-READ", unnamed="no named world has swaps with two batches in flight")
def m_fork_forgets_the_open_batch(patcher: Patcher) -> None:
    """A fork counts what the open batch copies for its parent, also if that batch is cancelled."""

    @patcher.around(fork, "inherit_entries")
    def inherit_taken(inherit: Any, tx: Transaction, parent_id: str, child_id: str) -> None:
        opened = tx.entries
        inherit(tx, parent_id, child_id)
        tx.entries = opened


@mutant(
    FLYING_FAMILY,
    "IN-FLIGHT",
    costs="a cancel gives blocks back in another order",
    unnamed="no named world has three batches in flight",
)
def m_removed_request_keeps_its_place(patcher: Patcher) -> None:
    """The marks behind that of a removed request keep their places, which later ones get again."""
    patcher.replace(in_flight, "_without", lambda entries, name: entries.delete(name))


@mutant(
    FLYING_WINDOW,
    "IN-FLIGHT",
    costs="places that are not used are never looked at",
    unnamed="no named world has a window with two batches in flight",
)
def m_lost_places_stay(patcher: Patcher) -> None:
    """A batch in flight remembers places that were lost in a table which was cut since."""

    @patcher.around(TableEdit, "_shorten")
    def shorten_held(shorten: Any, self: TableEdit, group_id: int, length: int) -> None:
        name = self.request_id
        marked = [batch.entries.get(name) for batch in self.tx.in_flight]
        shorten(self, group_id, length)
        for index, known in enumerate(marked):
            if known is not None:
                made = self.tx.in_flight[index].entries[name]
                self._set_entry(index, replace(made, replaced=known.replaced))


@mutant("flight-merge-late", "KV-READ")
def m_late_merge_survives_a_cancel(patcher: Patcher) -> None:
    """A request that `cache_blocks` merged keeps a block that the cancelled batch was to write."""
    patcher.replace(publish, "note_request", lambda *_: None)
