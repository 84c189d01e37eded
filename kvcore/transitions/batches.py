# SPDX-License-Identifier: Apache-2.0
"""The life of a batch: it is taken and completed.

Invariants: with `max_in_flight=0` a taken batch counts as executed, so its contents are available
to the next one. Otherwise it is in flight until it is completed, in the order of the numbers; then
blocks that only it used join the free queue, and rows held for it become free. With
`publish="completed"` the blocks that a batch wrote become findable when it is completed, up to the
first one that a later batch or the open one writes to. With `duplicates="merge"`, if a block's
content was already findable when the block was filled, it is looked up again at completion: the
commands that move the table to the older block and free the newer one open the next batch.
Twin: rust/src/transitions/batches.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.state.batch_records import BatchInFlight, RequestEntry, in_order
from kvcore.state.open_batch import Merge, make_open_batch
from kvcore.state.state import State
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.in_flight import lower_restored, note_written_key, num_finished
from kvcore.transitions.publish import publish_blocks, stored
from kvcore.transitions.tails.keys import complete_tails, move_tails, settle_tails
from kvcore.transitions.unconfirmed_loads import confirm_loads, note_keyed, note_owner
from kvcore.types.arguments import read_int
from kvcore.types.commands import Batch, close, named_rows
from kvcore.types.errors import BatchOutOfOrder, NotInFlight, TooManyInFlight
from kvcore.types.values import Outcome, Status


def take_batch(state: State) -> Outcome[State, Batch]:
    """Close and number the open batch; value: its commands. Pending merges open the next one.

    Raises TooManyInFlight.
    """
    config, batch = state.config, state.batch
    if config.max_in_flight and len(state.in_flight) >= config.max_in_flight:
        raise TooManyInFlight(
            num_in_flight=len(state.in_flight), max_in_flight=config.max_in_flight
        )
    taken = close(batch.number, batch.commands, state.epoch)
    opened = replace(state, batch=make_open_batch(batch.number + 1, len(state.rows)))
    if state.loads and not config.max_in_flight:
        opened = replace(opened, loads=confirm_loads(state.loads, batch.number - 1))
    tracked = config.tracks_batches or (config.has_tails and any(batch.scheduled))
    if not (tracked or batch.merges or batch.ends or state.held_rows):
        return Outcome(opened, (), taken)

    def change(tx: Transaction) -> Batch:
        if config.max_in_flight:
            tx.in_flight.append(close_entries(state))
        elif config.publish == "completed":
            publish_written(tx, close_entries(state))
        if not config.max_in_flight:
            release_rows(tx, batch.number)
        settle_merges(tx, batch.merges)
        if batch.ends:
            from kvcore.transitions.checkpoints import settle_ends  # few models have states

            settle_ends(tx, batch, stored)
        settle_tails(tx, batch)
        return taken

    return transition(opened, change)


def complete(state: State, batch: int) -> Outcome[State, None]:
    """Finish the oldest batch in flight: its forward pass has run.

    Raises NotInFlight, BatchOutOfOrder.
    """
    number = read_int(batch)

    def change(tx: Transaction) -> None:
        check_in_flight(tx, number)
        oldest = tx.in_flight[0]
        if oldest.number != number:
            raise BatchOutOfOrder(batch=number, oldest=oldest.number)
        del tx.in_flight[0]
        tx.loads = confirm_loads(tx.loads, oldest.number)
        for pool in (tx.device, tx.host):
            if pool is not None:
                pool.end_use(lambda user: user == number)
                pool.end_quarantine()
        release_rows(tx, oldest.number)
        if tx.config.publish == "completed":
            publish_written(tx, oldest)
            if oldest.owed:
                from kvcore.transitions.checkpoints import publish_owed  # few models have states

                publish_owed(tx, oldest)

    return transition(state, change)


def release_rows(tx: Transaction, number: int) -> None:
    """Free the rows that were held until this batch was finished."""
    tx.free_rows = tx.free_rows.extend(row for row, batch in tx.held_rows if batch <= number)
    tx.held_rows = tuple(each for each in tx.held_rows if each[1] > number)


def check_in_flight(tx: Transaction, number: object) -> None:
    """Raise NotInFlight unless a batch with this number is in flight."""
    numbers = [batch.number for batch in tx.in_flight]
    if not isinstance(number, int) or number not in numbers:
        raise NotInFlight(batch=number, in_flight=numbers)


def close_entries(state: State) -> BatchInFlight:
    """Return the records of the open batch as it closes: what its forward pass uses, and
    its rows.
    """
    batch, none = state.batch, (0,) * len(state.config.groups)
    entries = batch.entries.mutate()
    for request_id, made in batch.entries.items():
        held = none
        request = state.requests[request_id]
        if batch.scheduled[request.row] is not None:
            held = tuple(len(table) for table in request.tables)
        entries[request_id] = RequestEntry(
            made.order, made.before, made.restore, made.publishes, held
        )
    return BatchInFlight(
        batch.number,
        entries.finish(),
        batch.published_keys,
        named_rows(batch.commands),
        batch.starts_epoch,
    )


def publish_written(tx: Transaction, batch: BatchInFlight) -> None:
    """Make findable what a finished batch wrote."""
    before = tx.batch.merges
    tx.batch = replace(tx.batch, merges=pvector())
    for request_id, made in in_order(batch.entries):
        request = tx.requests[request_id]
        if made.publishes and request.status is Status.RUNNING and not request.num_loading:
            count = num_finished(tx, request)
            publish_blocks(tx, request, count, final=True)
            complete_tails(tx, tx.request(request_id), made, count)
    merges = tx.batch.merges
    tx.batch = replace(tx.batch, merges=before)
    settle_merges(tx, merges)


def settle_merges(tx: Transaction, merges: Iterable[Merge]) -> None:
    """Look up again the contents that were filled although they were findable."""
    for merge in merges:
        _merge(tx, merge)


def settle_own_merges(tx: Transaction, request_id: str) -> None:
    """Settle the merges of a request that is about to give its blocks back, if they were written
    before the open batch. Else a block behind them would stay cached without its parent.
    """
    if not tx.batch.merges:
        return
    request = tx.request(request_id)
    record = tx.scheduled[request.row]
    num_written = request.num_computed if record is None else record.num_computed_before
    own = [
        each
        for each in tx.batch.merges
        if each.request_id == request_id
        and (each.position + 1) * tx.config.groups[each.group_id].block_size <= num_written
    ]
    others = [each for each in tx.batch.merges if each not in own]
    tx.batch = replace(tx.batch, merges=pvector(others))
    settle_merges(tx, own)


def _merge(tx: Transaction, merge: Merge) -> None:
    """Move a table to the older block of a content, or publish its own block if that is gone.

    Does nothing for a stale request: its own block has content of older weights.
    """
    request = tx.requests.get(merge.request_id)
    if request is None or tx.is_stale(request):
        return
    if len(request.tables[merge.group_id]) <= merge.position:
        return
    table = request.tables[merge.group_id]
    size = tx.config.groups[merge.group_id].block_size
    computed = request.num_accepted >= (merge.position + 1) * size
    same = table[merge.position] == merge.block and tx.device.keys[merge.block] is None
    if not computed or not same or merge.position >= request.num_hashed(tx.config, merge.group_id):
        return
    if request.key(tx.config, merge.group_id, merge.position) != merge.key:
        return
    older = tx.device.index.first(merge.key)
    if older is None:
        end = (merge.position + 1) * size
        tx.device.publish(merge.block, merge.key)
        if tx.loads:
            note_keyed(tx, merge.request_id, [(merge.block, end)])
        if tx.config.publish == "scheduled":
            note_written_key(tx, merge.request_id, end, merge.block, merge.key)
        tx.effects.announce(stored(tx, request, merge.group_id, merge.position, merge.position + 1))
        return
    tx.device.touch(older)
    if tx.loads:
        note_owner(tx, merge.request_id, [older])
    if tx.config.publish == "scheduled":
        lower_restored(tx, merge.request_id, merge.position * size)
    if tx.config.has_tails:
        move_tails(tx, request, (merge.group_id, merge.position), merge.block, older)
    edit = TableEdit(tx, request)
    edit.replace(merge.group_id, merge.position, older)
    tx.put(replace(request, tables=tuple(edit.tables)))
