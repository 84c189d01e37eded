# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of recurrent states: their copies, keys, and what takes them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from kvcore.check.mutants.seeding import Patcher, mutant, without
from kvcore.check.profiles.profile import FULL, STATE, world
from kvcore.check.world.world import World
from kvcore.pool.block_pool import PoolTransaction
from kvcore.state.state import RequestState, State
from kvcore.state.transaction import Transaction
from kvcore.trace.calls import Call
from kvcore.transitions import checkpoints, states
from kvcore.transitions.publish import stored
from kvcore.transitions.queries import get_computed_blocks
from kvcore.transitions.states import StateStep
from kvcore.types.commands import CopyOnWrite, Zero
from kvcore.types.values import Request


@mutant("states", "STATE-READ")
def m_state_no_copy(patcher: Patcher) -> None:
    """A step at a later position starts from an empty block."""
    without(patcher, CopyOnWrite)


@mutant("states", "STATE-READ")
def m_state_no_zero(patcher: Patcher) -> None:
    """The first state of a request is what its block held before."""
    without(patcher, Zero)


@mutant("states-fork", "STATE-KEY", "STATE-READ")
def m_state_keyed_by_the_call(patcher: Patcher) -> None:
    """A checkpoint is findable before its batch has written it."""

    @patcher.around(checkpoints, "note_end")
    def keyed(note: Any, tx: Transaction, request: RequestState, *, publishes: bool) -> None:
        note(tx, request, publishes=publishes)
        found = checkpoints.checkpoints(tx, request, stored)
        if publishes:
            checkpoints.publish_states(tx, request, found)


@mutant("states-cut", "STATE-OWN", "STATE-KEY")
def m_state_keyed_inside_a_block(patcher: Patcher) -> None:
    """A boundary that the step ran over gives its key to the state at the end of the step."""

    @patcher.around(checkpoints, "checkpoints")
    def rounded(found: Any, tx: Transaction, request: RequestState, stored: Any) -> Any:
        size = tx.config.hit_alignment
        return found(tx, replace(request, num_computed=request.num_computed // size * size), stored)

    patcher.replace(checkpoints, "note_end", note_always)


def note_always(tx: Transaction, request: RequestState, **_: bool) -> None:
    """Note the end of each step as a checkpoint."""
    checkpoints.drop_end(tx, request.request_id)
    tx.batch = replace(tx.batch, ends=tx.batch.ends.append(request.request_id))


def stepping(patcher: Patcher, change: Callable[[StateStep], StateStep]) -> None:
    """Change each step of a state group."""

    @patcher.around(states, "plan_steps")
    def plan_changed(plan: Any, *args: Any) -> Any:
        return tuple(change(step) for step in plan(*args))


@mutant("states-fork", "STATE-READ")
def m_shared_state_in_place(patcher: Patcher) -> None:
    """A state that a fork shares is overwritten."""

    def in_place(step: StateStep) -> StateStep:
        if step.replaces and not step.for_key:
            return replace(step, takes=False, copies=False)
        return step

    stepping(patcher, in_place)


def hitting(_: World, state: State) -> Iterator[Call]:
    """Yield the calls of an engine with one request, which takes its hit alone; the next token then
    takes all other blocks.
    """
    if not state.requests:
        yield Call("add_request", (Request("0", [0, 0, 0]),))
    for request in state.requests.values():
        hit = get_computed_blocks(state, "0")
        if request.num_computed:
            yield Call("allocate_slots", ("0", 1), {"num_lookahead_tokens": 2})
            yield Call("free", ("0",))
        else:
            yield Call("allocate_slots", ("0", 0, hit) if hit.num_tokens else ("0", 2))


HITTING = world(4, 1, 3, 3, groups=(FULL, STATE), moves=hitting, moves_per_batch=2)


@mutant(HITTING, "STATE-KEY", unnamed="no world takes a hit without a token to compute")
def m_keyed_state_in_place(patcher: Patcher) -> None:
    """A state that a full pool gives no copy keeps its key when it is overwritten."""

    @patcher.around(states, "apply_steps")
    def keep_key(apply: Any, *args: Any, **options: Any) -> None:
        with Patcher() as inner:
            inner.replace(PoolTransaction, "unpublish", lambda *_: None)
            apply(*args, **options)


@mutant("states-cut", "STATE-LIVE", "STATE-READ")
def m_truncate_keeps_state(patcher: Patcher) -> None:
    """A request that is cut goes on with the state of the longer prefix."""
    patcher.replace(Transaction, "resumable", lambda _self, _request, num_tokens: num_tokens)


@mutant("states-fork", "STATE-READ")
def m_fork_shares_what_is_written(patcher: Patcher) -> None:
    """A child shares the state that the open batch overwrites."""
    patcher.replace(Transaction, "_keeps_state", lambda *_: True)


@mutant("states-flight", "STATE-READ")
def m_cancel_keeps_state_count(patcher: Patcher) -> None:
    """A cancel takes a request back to a state that its step overwrote in place."""
    patcher.replace(states, "note_request", lambda *_, **__: None)


@mutant("states-flight", "STATE-READ")
def m_state_source_released_at_once(patcher: Patcher) -> None:
    """The state before a step is given back with the step, and cannot be taken back to."""

    @patcher.around(states, "apply_steps")
    def release(apply: Any, *args: Any, **options: Any) -> None:
        apply(*args, **options)
        _, _, steps, edit, num_cached, *_ = args
        for step in steps:
            if step.stays:
                edit.blank(step.group_id, step.source, step.source + 1)
                num_cached[step.group_id] = step.target


@mutant("states-completed", "REF")
def m_batch_holds_no_checkpoint(patcher: Patcher) -> None:
    """A checkpoint that a batch in flight will publish can be overwritten until then."""

    @patcher.around(checkpoints, "settle_ends")
    def settle_unowned(settle: Any, *args: Any) -> None:
        with Patcher() as inner:
            inner.replace(PoolTransaction, "touch", lambda *_: None)
            settle(*args)


@mutant("states-cut", "STATE-LIVE", "STATE-READ")
def m_leaves_with_the_moved_target(patcher: Patcher) -> None:
    """A request that leaves the batch keeps its state where a later call moved it to."""

    @patcher.around(states, "step_back")
    def stay(_: Any, __: Any, request: RequestState, num_tokens: int) -> RequestState:
        return replace(request, num_computed=num_tokens)
