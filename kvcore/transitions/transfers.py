# SPDX-License-Identifier: Apache-2.0
"""Store and load: blocks move to and from an external store by key, as operations that may fail.

Invariants: an operation holds its block, as a pin does, until it is completed (done or failed),
even if the request is freed meanwhile. A load gives its request slots that count as computed. They
become findable when the last of its operations is completed: the blocks before the first failed one
are published, and the count falls back to there. Until then the request is not scheduled. Commands
run before the forward pass, so what the open batch writes cannot be stored yet.
Twin: rust/src/transitions/transfers.rs.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from kvcore.state.plan_records import Refusal
from kvcore.state.state import MAX_OPERATION, Operation, RequestState, State
from kvcore.state.transaction import Transaction, transition
from kvcore.transitions.allocate import commit
from kvcore.transitions.drain import forget_new
from kvcore.transitions.free import cut_tables
from kvcore.transitions.in_flight import num_finished
from kvcore.transitions.plan import plan_allocation
from kvcore.transitions.publish import publish_blocks, stored
from kvcore.transitions.slot_request import read_hit
from kvcore.transitions.tails.keys import cache_tails
from kvcore.transitions.unconfirmed_loads import is_unconfirmed
from kvcore.transitions.window import apply_trims
from kvcore.types.arguments import read_count, read_flag, read_int, read_ints
from kvcore.types.commands import Load, Store
from kvcore.types.errors import (
    BeyondModelLength,
    CachingDisabled,
    InOpenBatch,
    LoadUnconfirmed,
    NotPublished,
    StaleRequest,
    UnknownOperation,
    WrongLoad,
)
from kvcore.types.slot_request import RequestedHit, SlotRequest
from kvcore.types.values import Hit, Outcome, Refused


def store(state: State, block_ids: Iterable[int]) -> Outcome[State, tuple[int, ...]]:
    """Copy blocks to the external store under their keys; value: one operation per block.

    Raises UnknownBlock, NotPublished, InOpenBatch, LoadUnconfirmed.
    """
    blocks = read_ints(block_ids)

    def change(tx: Transaction) -> tuple[int, ...]:
        unwritten = {item.block for record in tx.scheduled if record for item in record.unwritten}
        for block in blocks:
            tx.device.check_block(block)
            if tx.device.keys[block] is None:
                raise NotPublished(block=block)
            if block in unwritten:
                raise InOpenBatch(kind="block", value=block)
            if tx.loads and is_unconfirmed(tx, block):
                raise LoadUnconfirmed(block=block)
        started = []
        for block in blocks:
            key = tx.device.keys[block]
            assert key is not None
            number = start(tx, Operation(block, key, tx.batch.number))
            tx.effects.commands.append(Store(number, block, key))
            started.append(number)
        return tuple(started)

    return transition(state, change)


def load(
    state: State,
    request_id: str,
    num_tokens: int,
    hit: Hit | None = None,
    *,
    reserved_blocks: int = 0,
    full_sequence_must_fit: bool = False,
) -> Outcome[State, tuple[int, ...] | Refused]:
    """Fill slots for the next num_tokens of a request from the external store; value: one operation
    per block, group by group, or a refusal.

    num_tokens: whole blocks of every group, after whole blocks; at least one token is left to
    compute. If no query sees the tokens (a whole chunk), there is no operation, and they count at
    once. The rest is as in `allocate_slots`, with delayed caching. Raises what that raises,
    StaleRequest and WrongLoad.
    """
    slot_request = SlotRequest(
        request_id=request_id,
        num_new_tokens=0,
        hit=read_hit(hit),
        num_external_computed_tokens=num_tokens,
        delay_cache_blocks=True,
        full_sequence_must_fit=read_flag("full_sequence_must_fit", full_sequence_must_fit),
        reserved_blocks=reserved_blocks,
        loads=True,
    )

    def change(tx: Transaction) -> tuple[int, ...] | Refused:
        request = tx.idle(request_id)
        count = read_count("num_tokens", num_tokens, 1)
        if tx.is_stale(request):
            raise StaleRequest(request=request_id, epoch=request.epoch, current=tx.epoch)
        plan = plan_allocation(tx, slot_request)
        check_load(tx, request, count, slot_request.hit)
        if isinstance(plan, Refusal):
            tx.put(apply_trims(tx, plan.request, plan.trims))
            return plan.refused
        first = plan.num_scheduled - count
        commit(tx, plan)
        started = start_loads(tx, tx.request(request_id), first)
        if started:
            loading = tx.request(request_id)
            end = plan.num_scheduled
            tx.put(replace(loading, num_loading=len(started), load_end=end))
        return started

    return transition(state, change)


def check_load(
    tx: Transaction, request: RequestState, count: int, hit: RequestedHit | None
) -> None:
    """Raise unless the load is of whole blocks with keys and leaves a token to compute."""
    name = request.request_id
    if not tx.config.enable_caching:
        raise CachingDisabled(request=name, num_blocks=0)
    first = request.num_computed + (0 if hit is None else hit.num_tokens)
    alignment, end = tx.config.block_alignment, first + count
    if end > tx.config.length_limit:
        raise BeyondModelLength(request=name, requested=end, max_model_len=tx.config.length_limit)
    reason = None
    if first % alignment or count % alignment:
        reason = f"it begins at token {first}, and both must be multiples of {alignment}"
    elif end >= request.tokens.length:
        reason = f"of its {request.tokens.length} tokens one must be left to compute"
    elif end > len(request.block_hashes) * tx.config.hash_block_size:
        reason = f"it has {len(request.block_hashes)} block hashes"
    if reason is not None:
        raise WrongLoad(request=name, num_tokens=count, reason=reason)


def start_loads(tx: Transaction, request: RequestState, first: int) -> tuple[int, ...]:
    """Start one operation per block that holds tokens from `first` on, in table order."""
    started = []
    for index, group in enumerate(tx.config.groups):
        end = request.num_computed // group.block_size
        for position in range(first // group.block_size, end):
            block = request.tables[index][position]
            if tx.is_null(block):
                continue
            key = request.key(tx.config, index, position)
            operation = Operation(
                block, key, tx.batch.number, request.request_id, position * group.block_size
            )
            number = start(tx, operation)
            forget_new(tx, [block])
            tx.effects.commands.append(Load(number, key, block))
            started.append(number)
    return tuple(started)


def start(tx: Transaction, operation: Operation) -> int:
    """Hold an operation's block, and return a number that no unfinished operation has."""
    number = tx.next_operation
    while number in tx.operations:
        number = number + 1 if number < MAX_OPERATION else 0
    tx.next_operation = number + 1 if number < MAX_OPERATION else 0
    tx.operations = tx.operations.set(number, operation)
    tx.device.pin(operation.block)
    tx.device.use(operation.block, tx.batch.number)
    return number


def complete_operation(state: State, operation: int, done: bool) -> Outcome[State, None]:
    """Finish a store or load that is done or failed; its block is no longer held.

    With the last operation of a load the request's loaded blocks are published. Raises
    UnknownOperation, InOpenBatch.
    """
    number = read_int(operation)

    def change(tx: Transaction) -> None:
        found = tx.operations.get(number) if isinstance(number, int) else None
        if found is None:
            raise UnknownOperation(operation=number)
        if found.batch == tx.batch.number:
            raise InOpenBatch(kind="operation", value=number)
        tx.operations = tx.operations.delete(number)
        tx.device.unpin(found.block)
        if found.request_id is not None:
            finish_load(tx, tx.request(found.request_id), found, done)

    return transition(state, change)


def finish_load(tx: Transaction, request: RequestState, operation: Operation, done: bool) -> None:
    """Note that one operation of a request's load ended; with the last one the load is settled."""
    end = request.load_end if done else min(request.load_end, operation.first_token)
    request = replace(request, num_loading=request.num_loading - 1, load_end=end)
    if request.num_loading:
        tx.put(request)
        return
    cut_tables(tx, replace(request, load_end=0), end)
    settled = tx.request(request.request_id)
    count = settled.num_accepted
    if tx.config.publish == "completed":
        count = num_finished(tx, settled)
    publish_blocks(tx, settled, count)
    if tx.config.has_states:
        from kvcore.transitions.checkpoints import cache_state  # few models have states

        cache_state(tx, tx.request(request.request_id), settled.num_computed, stored)
    cache_tails(tx, tx.request(request.request_id), count)
