# SPDX-License-Identifier: Apache-2.0
"""Cancel: batches in flight are undone, whether executed or not.

Invariants: a batch is cancelled together with all later ones and the open one; their numbers are
not used again. The keys of what they write are withdrawn, each request falls back to the lowest
count that they remember, and the blocks after it are released. Evicted contents stay evicted, and
freed blocks stay freed. The new open batch begins with the released blocks and the whole tables of
every row that the cancelled commands name, so it is right whether or not these were applied. If an
epoch began in one of the batches, it stays begun, and its `EvictAll` follows: a block whose `Touch`
was cancelled has its owner by the tables alone. What waits to be merged, and stays, goes on
waiting. A row held for a cancelled batch becomes free, unless a remaining batch has it.
Twin: rust/src/transitions/cancel.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvcore.state.batch_records import BatchInFlight, in_order
from kvcore.state.open_batch import Merge, make_open_batch
from kvcore.state.state import RequestState, State
from kvcore.state.table_edit import rebuild
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.batches import check_in_flight
from kvcore.transitions.free import cut_tables, drop_host
from kvcore.transitions.in_flight import note_request
from kvcore.types.arguments import read_int
from kvcore.types.commands import EvictAll, named_rows
from kvcore.types.values import Outcome


def cancel(state: State, batch: int) -> Outcome[State, None]:
    """Undo a batch in flight, all later ones and the open one. Raises NotInFlight."""
    number = read_int(batch)

    def change(tx: Transaction) -> None:
        check_in_flight(tx, number)
        assert isinstance(number, int)
        opened = state.batch
        cancelled = [each for each in state.in_flight if each.number >= number]
        rows = named_rows(opened.commands)
        cancelled.append(BatchInFlight(opened.number, opened.entries, opened.published_keys, rows))
        tx.in_flight = [each for each in state.in_flight if each.number < number]
        started = opened.starts_epoch or any(each.starts_epoch for each in cancelled)
        tx.batch = make_open_batch(opened.number + 1, len(tx.rows), starts_epoch=started)
        tx.scheduled, tx.entries = tx.batch.scheduled, tx.batch.entries
        tx.published_keys = tx.batch.published_keys
        hold_rows(tx, number)
        tx.loads = tuple(load for load in tx.loads if load.batch < number)
        lost = take_back(tx, cancelled, number)
        uncount(tx, lost)
        keep_merges(tx, opened.merges)
        for row in sorted({row for each in cancelled for row in each.rows}):
            rebuild(tx, row)
        if started:
            tx.effects.commands.append(EvictAll())

    return transition(state, change)


def take_back(tx: Transaction, cancelled: list[BatchInFlight], number: int) -> set[int]:
    """Withdraw keys, end uses, and lower each request to its remaining count. Returns the blocks
    whose keys were withdrawn.
    """
    lost = set()
    pools = [pool for pool in (tx.device, tx.host) if pool is not None]
    for pool in pools:
        pool.end_use(lambda user: user >= number)
    for batch in cancelled:
        for block, key in batch.published_keys:
            if tx.device.keys[block] == key:
                tx.device.unpublish_full(block)
                lost.add(block)
            elif key in tx.device.tail_keys(block):
                tx.device.withdraw_tails(block, [key])
        tx.device.release([owed.block for owed in batch.owed])
    for pool in pools:
        pool.end_quarantine()
    counts: dict[str, int] = {}
    for batch in cancelled:
        for request_id, entry in in_order(batch.entries):
            counts[request_id] = min(counts.get(request_id, entry.restore), entry.restore)
    for request_id, count in counts.items():
        fall(tx, request_id, count, number)
    return lost


def uncount(tx: Transaction, lost: set[int]) -> None:
    """Let requests that go on counting blocks whose keys were withdrawn publish them again: they
    share what a request that fell had published.
    """
    lost = {block for block in lost if tx.device.ref_counts[block] > 0}
    for name in tx.rows if lost else ():
        if name is None:
            continue
        request = tx.request(name)
        counted = zip(request.tables, request.num_cached, strict=True)
        blocks = [enumerate(table[:count]) for table, count in counted]
        first = [next((at for at, block in each if block in lost), None) for each in blocks]
        if any(at is not None for at in first):
            pairs = zip(first, request.num_cached, strict=True)
            kept = tuple(count if at is None else at for at, count in pairs)
            tx.put(replace(request, num_cached=kept))


def keep_merges(tx: Transaction, merges: Iterable[Merge]) -> None:
    """Let blocks that waited to be merged in the open batch wait in the new one, if their requests
    go on counting them.
    """
    for merge in merges:
        request = tx.requests.get(merge.request_id)
        if request is None or merge.position >= request.num_cached[merge.group_id]:
            continue
        tx.batch = replace(tx.batch, merges=tx.batch.merges.append(merge))
        if tx.config.publish == "scheduled":
            note_request(tx, merge.request_id, request.num_computed, request.num_computed)


def hold_rows(tx: Transaction, number: int) -> None:
    """Free the rows that were held for cancelled batches and that no other batch has."""
    held = []
    for row, batch in tx.held_rows:
        if batch < number:
            held.append((row, batch))
        elif any(row in each.rows for each in tx.in_flight):
            held.append((row, tx.in_flight[-1].number))
        else:
            tx.free_rows = tx.free_rows.append(row)
    tx.held_rows = tuple(held)


def fall(tx: Transaction, request_id: str, num_tokens: int, number: int) -> None:
    """Lower a request to `num_tokens` tokens, without the cancelled loads.

    Positions to come may be lost with the copy of their block, though older batches computed them.
    Then the last known token is computed again, since the device has gone on from the lost ones.
    """
    request = known = tx.request(request_id)
    if _loses_computed(request, num_tokens, number):
        num_tokens = request.tokens.length - 1
    for operation, found in sorted(tx.operations.items()):
        if found.request_id == request_id and found.batch >= number:
            left = replace(found, request_id=None)
            tx.operations = tx.operations.set(operation, left)
            request = replace(request, num_loading=0, load_end=0)
    if tx.config.has_states and not request.host_tables:
        request = replace(request, num_computed=min(request.state_count, num_tokens))
    if not request.host_tables:
        cut_tables(tx, request, num_tokens, request.num_output_placeholders)
    elif num_tokens < request.num_computed:
        drop_host(tx, request)
    tx.put(tx.request(request_id).awaiting_before(number, known))


def _loses_computed(request: RequestState, num_tokens: int, number: int) -> bool:
    """Return whether a request that keeps these tokens loses only positions to come, some of which
    batches before this one have computed.
    """
    ends = [end for batch, end in request.awaited if batch < number]
    return request.tokens.length <= num_tokens < max(ends, default=0)
