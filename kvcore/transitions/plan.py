# SPDX-License-Identifier: Apache-2.0
"""Plans an allocation: checks everything and computes what it takes, before anything changes.

Invariants: a plan that raises or refuses has changed nothing. Slots along a request: computed | hit
| external | new | lookahead. External tokens and lookahead are clipped at the model length, new
tokens are not. Blocks that no query sees from the first external or new token on are trimmed before
the fit is checked. If the step is refused, only the trim that the computed tokens allow is kept
(X-05). The full-sequence gate is checked before that. A write goes to blocks with one owner and no
key: a shared block is replaced (copied if it holds earlier positions), and a keyed block loses its
key unless the write computes exactly the tokens that the key names. Hits in the free queue reduce
the capacity, since they leave the queue; so does what the floors of other tenants keep. The steps
of state groups are planned in `states.py`.
Source: S000-01 to S000-20, S004-07. Twin: rust/src/transitions/plan.rs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from kvcore.state.plan_records import Growth, Lengths, Plan, Refusal, Rewrite, StateStep, Trim
from kvcore.state.state import RequestState
from kvcore.state.transaction import Transaction
from kvcore.transitions.slot_request import check_slot_request, read_slot_request
from kvcore.transitions.tails.rewrites import plan_tailed, writes_same
from kvcore.transitions.window import freed_blocks, plan_trims, visible_from
from kvcore.types.groups import Group, skipped_blocks
from kvcore.types.slot_request import MAX_COUNT, SlotRequest
from kvcore.types.values import Reason, Refused


def plan_allocation(tx: Transaction, slot_request: SlotRequest) -> Plan | Refusal:
    """Return the plan of an allocation, or its refusal. Changes nothing.

    Raises what `allocate_slots` raises.
    """
    request = tx.idle(slot_request.request_id)
    slot_request = read_slot_request(slot_request)
    hits = check_slot_request(tx, request, slot_request)
    lengths = measure(tx, request, slot_request)
    fixed = 0
    if slot_request.hit is not None:
        hits = needed_hits(hits, lengths)
        fixed = sum(tx.device.is_queued(b) for ids in hits for b in ids if not tx.is_null(b))
    rewrites = plan_rewrites(tx, request, hits, lengths)
    reserve = slot_request.reserved_blocks
    if not any(request.tables):
        reserve += tx.config.watermark_blocks
    for_keys = 0
    for rewrite in rewrites:
        fixed += rewrite.shared and not rewrite.for_key
        for_keys += rewrite.for_key
    steps = _plan_states(tx, request, hits, lengths) if tx.config.has_states else ()
    taken = 0
    for step in steps:
        taken += (step.takes and not step.for_key) + step.num_drafts
        for_keys += step.for_key
    if slot_request.full_sequence_must_fit:
        needed, full = gate_need(tx, request, slot_request, hits, lengths)
        available = num_available(tx, request, hits)
        needed += sum(step.replaces and not step.for_key for step in steps)
        refused = refuse(tx, fixed + needed, available, lambda: full, reserve)
        if refused is not None:
            return Refusal(refused=refused, request=request)
    trims = plan_trims(tx, request, lengths.seen_from) if tx.config.has_windows else ()
    available = num_available(tx, request, hits, trims)
    growth = plan_growth(tx, request, slot_request, hits, lengths)
    needed = fixed + taken
    for each in growth:
        needed += each.num_external + each.num_new
    most = partial(step_most, tx, request, slot_request, hits, lengths, steps)
    refused = refuse(tx, needed, available, most, reserve)
    if refused is not None:
        trims = plan_trims(tx, request, visible_from(tx, request, request.num_accepted))
        return Refusal(refused=refused, request=request, trims=trims)
    spare = available - needed - reserve
    if for_keys > max(0, spare):
        steps, for_keys = tuple(step.without_copy() for step in steps), 0
        rewrites = tuple(rewrite.without_copy() for rewrite in rewrites)
    return Plan(
        slot_request=slot_request,
        request=request,
        hits=hits,
        num_local=lengths.local,
        num_loaded=lengths.total,
        num_scheduled=lengths.scheduled,
        trims=trims,
        rewrites=rewrites,
        growth=preallocate(tx, request, hits, growth, spare - for_keys),
        steps=steps,
    )


def plan_rewrites(
    tx: Transaction, request: RequestState, hits: tuple[tuple[int, ...], ...], lengths: Lengths
) -> tuple[Rewrite, ...]:
    """Return the shared or keyed blocks that the new slots will write, in table order."""
    if tx.config.has_tails:
        return plan_tailed(tx, request, hits, lengths)
    rewrites = []
    for group_id, group in enumerate(tx.config.groups):
        if group.is_cross or group.is_state:
            continue
        size, table = group.block_size, request.tables[group_id]
        first = max(lengths.local // size, lengths.skipped[group_id])
        for position in range(first, min(len(table), -(-lengths.slots // size))):
            block = table[position]
            shared = tx.device.ref_counts[block] > 1
            if shared or tx.device.keys[block] is not None:
                copied = shared and lengths.local > position * size
                same = not shared and writes_same(tx, request, (group_id, position), lengths)
                flags = {"shared": shared, "copied": copied, "same": same}
                rewrites.append(Rewrite(group_id=group_id, position=position, **flags))
    return tuple(rewrites)


def num_available(
    tx: Transaction,
    request: RequestState,
    hits: tuple[tuple[int, ...], ...],
    trims: tuple[Trim, ...] = (),
) -> int:
    """Return the free blocks after the trims, less what the floors of others keep once the hits
    have owners.
    """
    freed = freed_blocks(tx, request, trims) if trims else []
    num_free = tx.device.num_free + len(freed)
    if tx.device.floors is None:
        return num_free
    touched = [block for ids in hits for block in ids]
    return num_free - tx.device.num_kept(tx.tenant(request), touched, freed)


def measure(tx: Transaction, request: RequestState, slot_request: SlotRequest) -> Lengths:
    """Compute the lengths of a checked allocation."""
    limit = tx.config.length_limit
    local = request.num_computed + (0 if slot_request.hit is None else slot_request.hit.num_tokens)
    total = min(local + slot_request.num_external_computed_tokens, limit)
    scheduled = total + slot_request.num_new_tokens
    groups, seen_from = tx.config.groups, total
    skipped: tuple[int, ...] = (0,) * len(groups)
    if tx.config.has_windows:
        seen_from = visible_from(tx, request, min(total, request.tokens.length))
        skipped = tuple(skipped_blocks(group, seen_from) for group in groups)
    return Lengths(
        local=local,
        total=total,
        scheduled=scheduled,
        slots=min(scheduled + slot_request.num_lookahead_tokens, limit),
        seen_from=seen_from,
        skipped=skipped,
    )


def needed_hits(hits: tuple[tuple[int, ...], ...], lengths: Lengths) -> tuple[tuple[int, ...], ...]:
    """Return the hit blocks of each group, with the null block for those that no query sees."""
    if not any(lengths.skipped):
        return hits
    skips = (min(len(ids), skip) for ids, skip in zip(hits, lengths.skipped, strict=True))
    return tuple((0,) * skip + ids[skip:] for ids, skip in zip(hits, skips, strict=True))


def plan_growth(
    tx: Transaction,
    request: RequestState,
    slot_request: SlotRequest,
    hits: tuple[tuple[int, ...], ...],
    lengths: Lengths,
) -> tuple[Growth, ...]:
    """Return the growth of each table, without preallocation; empty if none grows."""
    for table, group in zip(request.tables, tx.config.groups, strict=True):
        num_tokens = slot_request.num_encoder_tokens if group.is_cross else lengths.slots
        if len(table) * group.block_size < num_tokens and not group.is_state:
            break
    else:
        return ()
    growth = []
    for group_id, group in enumerate(tx.config.groups):
        size, held = group.block_size, len(request.tables[group_id]) + len(hits[group_id])
        if group.is_cross:
            num_new = max(0, _encoder_blocks(slot_request, group) - held)
            growth.append(Growth(num_nulls=0, num_external=0, num_new=num_new))
            continue
        if group.is_state:
            growth.append(Growth(num_nulls=0, num_external=0, num_new=0))
            continue
        num_total = -(-lengths.total // size)
        num_nulls = max(0, min(lengths.skipped[group_id], num_total) - held)
        num_external = max(0, num_total - held - num_nulls)
        num_new = max(0, -(-lengths.slots // size) - held - num_nulls - num_external)
        growth.append(Growth(num_nulls=num_nulls, num_external=num_external, num_new=num_new))
    return tuple(growth)


def gate_need(
    tx: Transaction,
    request: RequestState,
    slot_request: SlotRequest,
    hits: tuple[tuple[int, ...], ...],
    lengths: Lengths,
) -> tuple[int, int]:
    """Return the fresh blocks for the whole request, and the most that it holds at once in an empty
    pool.

    A windowed group recycles blocks that leave its window, so its need is capped.
    """
    num_full = max(lengths.slots, min(request.tokens.length, tx.config.length_limit))
    needed = most = 0
    to_come = max(0, lengths.scheduled - request.tokens.length)
    for group_id, group in enumerate(tx.config.groups):
        held = [*request.tables[group_id], *hits[group_id]]
        blocks = -(-num_full // group.block_size) + group.draft_states
        cap = tx.config.cap(group_id, to_come)
        blocks = max(_encoder_blocks(slot_request, group), len(held)) if group.is_cross else blocks
        fresh = max(0, blocks - max(len(held), lengths.skipped[group_id]))
        if cap is not None:
            live = sum(not tx.is_null(block) for block in held)
            blocks, fresh = min(blocks, cap), min(fresh, max(0, cap - live))
        needed += fresh
        most += blocks
    return needed, most


def step_most(
    tx: Transaction,
    request: RequestState,
    slot_request: SlotRequest,
    hits: tuple[tuple[int, ...], ...],
    lengths: Lengths,
    steps: tuple[StateStep, ...],
) -> int:
    """Return how many blocks the request would hold after this call."""
    most = 0
    for table, group in zip(request.tables, tx.config.groups, strict=True):
        if group.is_cross:
            most += max(len(table), _encoder_blocks(slot_request, group))
        elif not group.is_state:
            seen_from = min(lengths.total, request.tokens.length)
            skipped = skipped_blocks(group, seen_from) if group.is_windowed else 0
            most += -(-lengths.slots // group.block_size) - skipped
    if tx.config.has_states:
        from kvcore.transitions.states import states_held  # few models have states

        most += states_held(tx, request, hits, lengths.skipped, steps)
    return most


def _encoder_blocks(slot_request: SlotRequest, group: Group) -> int:
    """Return how many blocks the encoder's tokens take."""
    return -(-min(slot_request.num_encoder_tokens, MAX_COUNT) // group.block_size)


def refuse(
    tx: Transaction, needed: int, available: int, most: Callable[[], int], reserve: int
) -> Refused | None:
    """Return the refusal of `needed` blocks if `reserve` blocks must stay free; None if they fit.

    A call that needs no blocks is not refused. most: blocks that the call would hold in an empty
    pool.
    """
    if not needed or needed + reserve <= available:
        return None
    never = most() + reserve > tx.device.num_usable
    reason = Reason.NEVER if never else Reason.LATER
    return Refused(reason, needed, max(0, available - reserve), tx.num_pending())


def preallocate(
    tx: Transaction,
    request: RequestState,
    hits: tuple[tuple[int, ...], ...],
    growth: tuple[Growth, ...],
    spare: int,
) -> tuple[Growth, ...]:
    """Add preallocated blocks to the growth, as far as spare blocks let all groups come (S004-07):
    a group must not take what another one needs for the same token.
    """
    if not (tx.config.num_preallocate_tokens and growth):
        return growth
    held = [
        len(request.tables[index])
        + len(hits[index])
        + each.num_nulls
        + each.num_external
        + each.num_new
        for index, each in enumerate(growth)
    ]

    def needed(num_tokens: int) -> int:
        sizes = zip(tx.config.groups, held, strict=True)
        more = (-(-num_tokens // each.block_size) - had for each, had in sizes if not each.is_cross)
        return sum(max(0, each) for each in more)

    limit = tx.config.length_limit
    reach = bisect_right(range(limit + 1), max(0, spare), key=needed) - 1
    roomier = []
    for index, (group, each) in enumerate(zip(tx.config.groups, growth, strict=True)):
        more = 0
        grows = len(request.tables[index]) == 0 or each.num_new
        if grows and not (group.is_cross or group.is_state):
            extra = -(-tx.config.num_preallocate_tokens // group.block_size)
            more = max(0, min(extra, -(-reach // group.block_size) - held[index]))
        roomier.append(replace(each, num_new=each.num_new + more))
    return tuple(roomier)


def _plan_states(
    tx: Transaction,
    request: RequestState,
    hits: tuple[tuple[int, ...], ...],
    lengths: Lengths,
) -> tuple[StateStep, ...]:
    """Return the steps of the state groups."""
    from kvcore.transitions.states import plan_steps  # few models have states

    num_tokens = (lengths.local, lengths.total, lengths.scheduled)
    return plan_steps(tx, request, hits, lengths.skipped, num_tokens)
