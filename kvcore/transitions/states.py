# SPDX-License-Identifier: Apache-2.0
"""Steps of state groups: the block to which the next state is written.

Invariants: the state after n tokens stands at position (n - 1) // block_size, the last place of the
table. The forward pass reads the state before the step from the block that it overwrites, so the
commands put it there: a new block is filled by a copy or by zeros. A block that is shared or has a
key is never overwritten. The states after scheduled drafts stand in the places behind, in the order
of the drafts; `accept` moves the one after the last accepted draft to its place. If a step reaches
a later position, its source stays in the table until the next trim, so that the step can be taken
back. All calls of one batch are one step: the later ones move the block that the first one wrote
to. In a state group, `num_cached` counts the null blocks at the start of the table. Twin:
rust/src/transitions/states.rs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from kvcore.state.open_batch import ScheduledRequest
from kvcore.state.plan_records import StateStep
from kvcore.state.state import NULL_BLOCK, RequestState
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction
from kvcore.transitions.in_flight import note_request
from kvcore.types.commands import CopyOnWrite, Zero


def plan_steps(
    tx: Transaction,
    request: RequestState,
    hits: Sequence[Sequence[int]],
    skipped: Sequence[int],
    num_tokens: tuple[int, int, int],
) -> tuple[StateStep, ...]:
    """Return the step of each state group; none if the call only takes a hit. Changes nothing.

    skipped: leading places of each table that are trimmed first. num_tokens: those computed or hit,
    those loaded behind them, and those after the step, drafts included.
    """
    local, total, scheduled = num_tokens
    num_drafts = max(0, scheduled - request.tokens.length) if request.drafts else 0
    steps, in_batch = [], tx.scheduled[request.row] is not None
    for group_id, group in enumerate(tx.config.groups if scheduled > local else ()):
        if not group.is_state:
            continue
        held, hit = request.tables[group_id] or hits[group_id], hits[group_id]
        target = (scheduled - num_drafts - 1) // group.block_size
        if len(held) <= skipped[group_id] or tx.is_null(held[-1]):
            first = StateStep(group_id=group_id, source=None, target=target, num_drafts=num_drafts)
            steps.append(first)
            continue
        source, block = len(held) - 1, held[-1]
        keyed = tx.device.keys[block] is not None
        shared = tx.device.ref_counts[block] + bool(hit) > 1
        stays = target > source and not in_batch
        takes = keyed or shared or stays
        steps.append(
            StateStep(
                group_id=group_id,
                source=source,
                target=target,
                takes=takes,
                copies=takes and local == total,
                stays=stays,
                begun=in_batch and not takes,
                for_key=keyed and not (shared or stays),
                num_drafts=num_drafts,
            )
        )
    return tuple(steps)


def states_held(
    tx: Transaction,
    request: RequestState,
    hits: Sequence[Sequence[int]],
    skipped: Sequence[int],
    steps: Sequence[StateStep],
) -> int:
    """Return how many blocks of state groups the request holds after the trim, at least one of
    each, with those that the steps add.
    """
    most = sum(step.stays + step.num_drafts for step in steps)
    for group_id, group in enumerate(tx.config.groups):
        if group.is_state:
            held = (request.tables[group_id] or hits[group_id])[skipped[group_id] :]
            most += max(1, sum(not tx.is_null(block) for block in held))
    return most


def apply_steps(
    tx: Transaction,
    request: RequestState,
    steps: tuple[StateStep, ...],
    edit: TableEdit,
    num_cached: list[int],
    fresh: Iterator[int],
    grown: list[tuple[int, ...]],
    *,
    loads: bool,
) -> None:
    """Execute the steps; set `num_cached`, and in `grown` the new blocks at new places.

    loads: a load fills new blocks.
    """
    if not all(step.source is None or step.stays or step.begun for step in steps):
        note_request(tx, request.request_id, request.num_computed, 0)
    for step in steps:
        group_id, source, target = step.group_id, step.source, step.target
        block = next(fresh) if step.takes else NULL_BLOCK
        if step.copies and source is not None:
            old = edit.tables[group_id][source]
            tx.effects.commands.append(CopyOnWrite(old, block))
            tx.device.use(old, tx.batch.number)
            tx.device.use(block, tx.batch.number)
        elif step.takes and not loads:
            tx.effects.commands.append(Zero(block))
        if source is None or step.stays:
            gap = target - len(edit.tables[group_id])
            edit.extend(group_id, [*[NULL_BLOCK] * gap, block])
        else:
            if step.takes:
                edit.replace(group_id, source, block)
            else:
                tx.device.unpublish(edit.tables[group_id][source])
            edit.move_last(group_id, target)
        drafts = tuple(islice(fresh, step.num_drafts))
        edit.extend(group_id, drafts)
        if step.takes and target != source:
            drafts = (block, *drafts)
        grown[group_id] = drafts
        if source is None or (num_cached[group_id] == source and not step.stays):
            num_cached[group_id] = target


def step_back(tx: Transaction, request: RequestState, num_tokens: int) -> RequestState:
    """Return the request with its state before the open batch, which does not run, in place.

    num_tokens: its count then, above 0.
    """
    return _moved_back(tx, request, num_tokens, keeps_source=True)


def shorten_step(tx: Transaction, request: RequestState, num_tokens: int) -> RequestState:
    """Return the request whose step in the open batch ends at num_tokens."""
    return _moved_back(tx, request, num_tokens, keeps_source=False)


def _moved_back(
    tx: Transaction, request: RequestState, num_tokens: int, *, keeps_source: bool
) -> RequestState:
    """Move the last block of each state group to the place of the state after num_tokens tokens.

    keeps_source: it is given back instead, if that place has a block.
    """
    edit, num_cached = TableEdit(tx, request), list(request.num_cached)
    for group_id, group in enumerate(tx.config.groups):
        if not group.is_state:
            continue
        place, num_drafts = (num_tokens - 1) // group.block_size, request.num_scheduled_drafts
        if num_drafts:
            edit.cut(group_id, len(edit.tables[group_id]) - num_drafts)
        table = edit.tables[group_id]
        source = place < len(table) - 1 and not tx.is_null(table[place])
        if source and keeps_source:
            edit.cut(group_id, place + 1)
            continue
        if source:
            note_request(tx, request.request_id, request.num_computed, 0)
        edit.move_last(group_id, place)
        num_cached[group_id] = min(num_cached[group_id], place)
    return replace(
        request, tables=tuple(edit.tables), num_computed=num_tokens, num_cached=tuple(num_cached)
    )


def keep_accepted(tx: Transaction, request: RequestState, num_accepted: int) -> RequestState:
    """Return the request with the state after its last accepted draft, and with those before it
    where a block ends; the other states after its tokens are released.
    """
    if not request.num_scheduled_drafts:
        return request
    edit, num_cached = TableEdit(tx, request), list(request.num_cached)
    known = request.tokens.length
    count = known + num_accepted
    for group_id, group in enumerate(tx.config.groups):
        if not group.is_state:
            continue
        size, begun = group.block_size, num_cached[group_id]
        first, last = (known - 1) // size, (count - 1) // size
        if last > first > begun + 1:  # more than a step may keep: its source goes, too
            note_request(tx, request.request_id, request.num_computed, 0)
            edit.blank(group_id, begun, begun + 1)
            num_cached[group_id] = first
        ends = [min((place + 1) * size, count) - known for place in range(first, last + 1)]
        edit.keep_of_end(group_id, first, ends)
    return replace(request, tables=tuple(edit.tables), num_cached=tuple(num_cached))


def num_left(record: ScheduledRequest) -> int:
    """Return the tokens of which a request has the state when it leaves the open batch: those from
    before it, 0 if hits or external tokens came in it.
    """
    before = record.num_computed_before
    return 0 if record.num_kept > max(before, 1) else before
