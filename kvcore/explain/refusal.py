# SPDX-License-Identifier: Apache-2.0
"""Explains why an allocation does not fit: who holds blocks, and how many each would free.

Invariants: `alone` is exact, also for blocks with several owners. It is measured: the holder leaves
a copy of the state, and the blocks available to the call are counted before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, Unpack

import attrs
from msgspec.structs import replace

from kvcore.state.plan_records import Plan, Refusal, Trim
from kvcore.state.state import NULL_BLOCK, State
from kvcore.state.transaction import Transaction
from kvcore.transitions.allocate import can_allocate
from kvcore.transitions.batches import complete
from kvcore.transitions.free import free
from kvcore.transitions.pins import unpin, unpin_prefix
from kvcore.transitions.plan import measure, needed_hits, num_available, plan_allocation
from kvcore.transitions.slot_request import make_slot_request, read_slot_request
from kvcore.transitions.transfers import complete_operation
from kvcore.transitions.window import plan_trims
from kvcore.types.errors import KvcoreError
from kvcore.types.slot_request import SlotOptions, SlotRequest
from kvcore.types.values import Hit, Outcome, Status, Verdict

HolderKind = Literal[
    "request", "pin", "named_pin", "operation", "batch", "floor", "watermark", "reserve"
]


@attrs.frozen(kw_only=True)
class Holder:
    """A holder of blocks that an allocation lacks.

    name: id of a request, name of a pin of a prefix (named_pin), salt of a floor, or number of a
    block, an operation or a batch. blocks: device blocks that it holds. alone: blocks that become
    available at once if only this holder leaves; 0 if it cannot leave now. A batch leaves when it
    is completed; for a later batch, `alone` counts what it adds to the batches before it. stale: a
    pin of an older epoch, which no request can hit any more.
    """

    kind: HolderKind
    name: str
    blocks: int
    alone: int
    stale: bool = False


@attrs.frozen(kw_only=True)
class ExplainedRefusal:
    """The verdict of `can_allocate`, the block counts of a refusal, and the holders, those with the
    largest `alone` first; no holders if the call fits.
    """

    verdict: Verdict
    needed: int
    available: int
    pending: int
    holders: tuple[Holder, ...] = ()


def explain_refusal(
    state: State,
    request_id: str,
    num_new_tokens: int,
    hit: Hit | None = None,
    **options: Unpack[SlotOptions],
) -> ExplainedRefusal:
    """Explain why `allocate_slots` would refuse these arguments. Changes nothing; O(blocks in use).

    Raises what `allocate_slots` raises.
    """
    call = make_slot_request(request_id, num_new_tokens, hit, options)
    verdict = can_allocate(state, request_id, num_new_tokens, hit, **options)
    tx = Transaction(state)
    plan = plan_allocation(tx, call)
    if isinstance(plan, Plan):
        needed, pending = _num_taken(tx, plan), tx.num_pending()
        available = available_to(state, call)
        return ExplainedRefusal(
            verdict=verdict, needed=needed, available=available, pending=pending
        )
    holders = sorted(_holders(state, call), key=lambda holder: -holder.alone)
    refused = plan.refused
    return ExplainedRefusal(
        verdict=verdict,
        needed=refused.needed,
        available=refused.available,
        pending=refused.pending,
        holders=tuple(holders),
    )


def available_to(state: State, call: SlotRequest) -> int:
    """Return the blocks available to an allocation, less those that it must leave, as in a
    refusal.
    """
    tx = Transaction(state)
    request, call = tx.idle(call.request_id), read_slot_request(call)
    reserve = call.reserved_blocks
    if not any(request.tables):
        reserve += tx.config.watermark_blocks
    lengths = measure(tx, request, call)
    hits = () if call.hit is None else needed_hits(call.hit.blocks, lengths)
    trims: tuple[Trim, ...] = ()
    if tx.config.has_windows and not _is_gated(state, call):
        trims = plan_trims(tx, request, lengths.seen_from)
    return max(0, num_available(tx, request, hits, trims) - reserve)


def _is_gated(state: State, call: SlotRequest) -> bool:
    """Return whether the full-sequence gate refuses the call, before its windows are trimmed."""
    tx = Transaction(state)
    return call.full_sequence_must_fit and isinstance(plan_allocation(tx, call), Refusal)


def _num_taken(tx: Transaction, plan: Plan) -> int:
    """Return how many blocks a plan takes from the free queue, preallocated ones included."""
    lengths = measure(tx, plan.request, plan.slot_request)
    hits = [block for ids in needed_hits(plan.hits, lengths) for block in ids]
    queued = sum(not tx.is_null(block) and tx.device.is_queued(block) for block in hits)
    shared = sum(rewrite.shared for rewrite in plan.rewrites)
    return queued + shared + sum(each.num_external + each.num_new for each in plan.growth)


def _holders(state: State, call: SlotRequest) -> Iterator[Holder]:
    before = available_to(state, call)

    def holder(
        kind: HolderKind,
        name: str,
        blocks: int,
        leave: Callable[[], Outcome[State, Any]],
        *,
        stale: bool = False,
    ) -> Holder:
        try:
            alone = available_to(leave().state, call) - before
        except KvcoreError:
            alone = 0
        return Holder(kind=kind, name=name, blocks=blocks, alone=alone, stale=stale)

    for name, request in sorted(state.requests.items()):
        if request.status is Status.RUNNING and name != call.request_id:
            held = {block for table in request.tables for block in table}
            if state.config.null_block:
                held.discard(NULL_BLOCK)
            yield holder("request", name, len(held), partial(free, state, name))
    named = Counter(block for pin in state.named_pins.values() for block in pin.blocks)
    for name, pin in sorted(state.named_pins.items()):
        stale, leave = pin.epoch < state.epoch, partial(unpin_prefix, state, name)
        yield holder("named_pin", name, len(pin.blocks), leave, stale=stale)
    for block, count in sorted(state.device.pins.items()):
        if count > named[block]:
            leave = partial(unpin, state, [block] * (count - named[block]))
            yield holder("pin", str(block), 1, leave)
    for number in sorted(state.operations):
        leave = partial(complete_operation, state, number, True)
        yield holder("operation", str(number), 1, leave)
    yield from _kept_free(state, call, before)
    for batch in state.in_flight:
        state = complete(state, batch.number).state
        brings = available_to(state, call) - before
        before += brings
        yield Holder(kind="batch", name=str(batch.number), blocks=brings, alone=brings)


def _kept_free(state: State, call: SlotRequest, before: int) -> Iterator[Holder]:
    """Yield, as holders, what a call must leave free: what the floors of others keep, its own
    reserve, and the watermark of an admission.
    """
    for tenant, salt in enumerate(state.config.tenants, 1):
        kept = available_to(_without_floor(state, tenant), call) - before
        if kept:
            yield Holder(kind="floor", name=salt, blocks=kept, alone=kept)
    watermark, reserve = state.config.watermark_blocks, call.reserved_blocks
    is_admission = not any(Transaction(state).request(call.request_id).tables)
    if reserve:
        alone = available_to(state, replace(call, reserved_blocks=0)) - before
        yield Holder(kind="reserve", name="", blocks=reserve, alone=alone)
    if watermark and is_admission:
        without = replace(state, config=attrs.evolve(state.config, watermark_blocks=0))
        alone = available_to(without, call) - before
        yield Holder(kind="watermark", name="", blocks=watermark, alone=alone)


def _without_floor(state: State, tenant: int) -> State:
    """Return the state in which a tenant keeps nothing from the others."""
    floors = state.device.floors
    assert floors is not None
    sizes = enumerate(floors.least, 1)
    least = tuple(0 if each == tenant else size for each, size in sizes)
    return replace(
        state, device=attrs.evolve(state.device, floors=attrs.evolve(floors, least=least))
    )
