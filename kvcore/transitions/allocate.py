# SPDX-License-Identifier: Apache-2.0
"""Slots for tokens.

Invariants: the call is planned first (`plan.py`); a refusal changes nothing except the window trim.
All groups' hits are touched before any group allocates, so no allocation evicts a hit. External
blocks of all groups come before new ones. The computed count advances by hits, external and new
tokens. Full blocks are published by the call that schedules their last token, unless delayed.
Source: S000-21 to S000-35, S004-05 to S004-10. Twin: rust/src/transitions/allocate.rs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Unpack

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.state.open_batch import ScheduledRequest
from kvcore.state.plan_records import Plan, Refusal, Rewrite
from kvcore.state.state import NULL_BLOCK, RequestState, State
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction, transition
from kvcore.state.waiting import settle_waiting
from kvcore.transitions.drain import forget_new
from kvcore.transitions.in_flight import note_published_key, note_request
from kvcore.transitions.plan import plan_allocation
from kvcore.transitions.publish import publish_blocks
from kvcore.transitions.slot_request import make_slot_request
from kvcore.transitions.tails.keys import note_delay, note_same, withdraw_past
from kvcore.transitions.unconfirmed_loads import note_load, note_owner, note_rewritten
from kvcore.transitions.window import apply_trims
from kvcore.types.commands import CopyOnWrite
from kvcore.types.slot_request import SlotOptions
from kvcore.types.values import Hit, KVCacheBlocks, Outcome, Refused, Verdict


def allocate_slots(
    state: State,
    request_id: str,
    num_new_tokens: int,
    hit: Hit | None = None,
    **options: Unpack[SlotOptions],
) -> Outcome[State, KVCacheBlocks | Refused]:
    """Schedule the next tokens of a request; value: the new blocks of its tables, or a refusal.

    hit: of `get_computed_blocks`, for a request that holds nothing. With a hit, num_new_tokens may
    be 0: the hit is taken, and the rest is scheduled later. External tokens get blocks that are
    held but not returned. num_output_placeholders: up to this many positions may follow the known
    tokens; their ids come later. delay_cache_blocks: publish nothing now; `cache_blocks` does it
    later. num_encoder_tokens: for the cross-attention groups. full_sequence_must_fit: refuse unless
    all the request's tokens would fit now. reserved_blocks: how many blocks to leave free.
    checkpoint: keep the recurrent states after these tokens, wherever hits can end. A refusal keeps
    the window trim. Raises UnknownRequest, SwappedOut, LoadUnfinished, InvalidCount,
    TooManyTokens, BeyondModelLength, DraftsPending, TooManyDrafts, InOpenBatch, NoEncoderGroup,
    NoStateGroup, UnalignedCheckpoint, WrongHit, StaleHits, UnknownBlock, HitsOnRunningRequest,
    CachingDisabled.
    """
    slot_request = make_slot_request(request_id, num_new_tokens, hit, options)

    def change(tx: Transaction) -> KVCacheBlocks | Refused:
        plan = plan_allocation(tx, slot_request)
        if isinstance(plan, Refusal):
            tx.put(apply_trims(tx, plan.request, plan.trims))
            return plan.refused
        return commit(tx, plan)

    return transition(state, change)


def can_allocate(
    state: State,
    request_id: str,
    num_new_tokens: int,
    hit: Hit | None = None,
    **options: Unpack[SlotOptions],
) -> Verdict:
    """Return how `allocate_slots` would answer the same arguments. Changes nothing."""
    slot_request = make_slot_request(request_id, num_new_tokens, hit, options)
    plan = plan_allocation(Transaction(state), slot_request)
    return Verdict(plan.refused.reason.value) if isinstance(plan, Refusal) else Verdict.OK


def commit(tx: Transaction, plan: Plan) -> KVCacheBlocks:
    """Execute a plan; return the new blocks of the tables."""
    slot_request, request = plan.slot_request, plan.request
    note_scheduled(tx, plan)
    publishes = tx.config.enable_caching and not slot_request.delay_cache_blocks
    before = request.num_computed
    written = tx.config.enable_caching and (publishes or slot_request.loads)
    if tx.config.tracks_batches:
        note_request(tx, request.request_id, before, before, publishes=written)
    if plan.trims:
        request = apply_trims(tx, request, plan.trims)
    if any(plan.hits):
        request = _attach_hits(tx, plan, request)
    if plan.num_loaded > plan.num_local and not slot_request.loads:
        note_load(tx, request.request_id, plan.num_local, plan.num_loaded)
    if slot_request.hit is not None and not any(plan.request.tables):
        queries = 0 if request.skip_reading else request.tokens.length
        tx.note_lookup(queries, slot_request.hit.num_tokens, preempted=request.preempted)
    grown: list[tuple[int, ...]] = [()] * len(request.tables)
    if plan.rewrites or plan.growth or plan.steps:
        request = _take_blocks(tx, plan, request, tx.tenant(request), grown)
    if not before:
        request = replace(request, epoch=tx.epoch)
    request = request.scheduled(tx.batch.number, plan.num_scheduled)
    num_accepted = request.num_accepted
    tx.put(request)
    if publishes and tx.config.publish == "scheduled":
        publish_blocks(tx, request, num_accepted)
    if plan.steps:
        from kvcore.transitions.checkpoints import note_end  # few models have states

        note_end(tx, request, publishes=publishes, marked=slot_request.checkpoint)
    if tx.waiting:  # empty unless a policy uses it
        settle_waiting(tx, request.request_id)
    return KVCacheBlocks(tuple(grown))


def _attach_hits(tx: Transaction, plan: Plan, request: RequestState) -> RequestState:
    """Return the request with the blocks of its hit."""
    edit, num_cached = TableEdit(tx, request), list(request.num_cached)
    for group_id, hits in enumerate(plan.hits):
        if hits:
            edit.share(group_id, pvector(hits))
            num_cached[group_id] = len(hits) - _ends_inside(tx, group_id, plan.num_local)
            if tx.loads:
                note_owner(tx, request.request_id, hits, plan.num_local)
    return replace(request, tables=tuple(edit.tables), num_cached=tuple(num_cached))


def _take_blocks(
    tx: Transaction, plan: Plan, request: RequestState, tenant: int, grown: list[tuple[int, ...]]
) -> RequestState:
    """Return the request with the blocks that the plan takes. grown: receives the new ones."""
    taken = tx.device.take(count_fresh(plan), tenant)
    if tx.config.record_new_blocks:
        forget_new(tx, taken)
    fresh, num_cached = iter(taken), list(request.num_cached)
    edit = TableEdit(tx, request)
    for rewrite in plan.rewrites:
        apply_rewrite(tx, plan, edit, rewrite, fresh)
    loads = plan.slot_request.loads
    for group_id, growth in enumerate(plan.growth):
        if growth.num_nulls or growth.num_external:
            edit.extend(group_id, [NULL_BLOCK] * growth.num_nulls)
            edit.extend(group_id, islice(fresh, growth.num_external), fresh=not loads)
    for group_id, growth in enumerate(plan.growth):
        if growth.num_new:
            blocks = list(islice(fresh, growth.num_new))
            edit.extend(group_id, blocks, fresh=True)
            grown[group_id] = tuple(blocks)
    if plan.steps:
        from kvcore.transitions.states import apply_steps  # few models have states

        apply_steps(tx, plan.request, plan.steps, edit, num_cached, fresh, grown, loads=loads)
    return replace(request, tables=tuple(edit.tables), num_cached=tuple(num_cached))


def _ends_inside(tx: Transaction, group_id: int, num_tokens: int) -> bool:
    """Return whether the last block of a hit is a state, or found under a tail key."""
    group = tx.config.groups[group_id]
    return group.is_state or (tx.config.has_tails and num_tokens % group.block_size > 0)


def count_fresh(plan: Plan) -> int:
    """Count the blocks that a plan takes."""
    num_fresh = 0
    for rewrite in plan.rewrites:
        num_fresh += rewrite.shared
    for growth in plan.growth:
        num_fresh += growth.num_external + growth.num_new
    for step in plan.steps:
        num_fresh += step.takes + step.num_drafts
    return num_fresh


def note_scheduled(tx: Transaction, plan: Plan) -> None:
    """Note what the open batch schedules of a request, and how much of that cannot be taken
    back.
    """
    row, before = plan.request.row, plan.request.num_computed
    record = tx.scheduled[row]
    num_kept = max(before, 1) if record is None else record.num_kept
    if plan.num_loaded > before or plan.slot_request.num_encoder_tokens:
        brings = plan.slot_request.num_encoder_tokens > 0
        num_kept = min(plan.num_loaded + brings, plan.num_scheduled)
    if record is None:
        tx.scheduled = tx.scheduled.set(row, ScheduledRequest(before, num_kept))
    elif record.num_kept != num_kept:
        tx.scheduled = tx.scheduled.set(row, replace(record, num_kept=num_kept))
    if tx.config.has_tails:
        note_delay(tx, plan.request.request_id, delayed=plan.slot_request.delay_cache_blocks)


def apply_rewrite(
    tx: Transaction, plan: Plan, edit: TableEdit, rewrite: Rewrite, fresh: Iterator[int]
) -> None:
    """Make one block of a table writable."""
    request, group_id, position = plan.request, rewrite.group_id, rewrite.position
    block, size = edit.tables[group_id][position], tx.config.groups[group_id].block_size
    if tx.config.has_tails and not rewrite.shared:
        settle = note_same if rewrite.same else withdraw_past
        settle(tx, request, (group_id, position), block, plan.num_local)
        return
    if rewrite.same:
        note_published_key(tx, block, request.key(tx.config, group_id, position))
        note_rewritten(tx, request.request_id, block, (position + 1) * size)
        return
    if not rewrite.shared:
        tx.device.unpublish(block)
        return
    target = next(fresh)
    note_request(tx, request.request_id, request.num_computed, position * size)
    if rewrite.copied:
        tx.effects.commands.append(CopyOnWrite(block, target))
        tx.device.use(block, tx.batch.number)
        tx.device.use(target, tx.batch.number)
    edit.replace(group_id, position, target, fresh=not rewrite.copied)
