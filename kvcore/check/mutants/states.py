# SPDX-License-Identifier: Apache-2.0
"""Seeded bugs of recurrent states: their copies, keys, and what takes them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from pyrsistent import pvector

from kvcore.check.mutants import worlds
from kvcore.check.mutants.seeding import Patcher, mutant, without
from kvcore.pool.block_pool import PoolTransaction
from kvcore.state.open_batch import OpenBatch
from kvcore.state.plan_records import StateStep
from kvcore.state.state import NULL_BLOCK, RequestState, Table
from kvcore.state.table_edit import TableEdit
from kvcore.state.transaction import Transaction
from kvcore.transitions import (
    allocate,
    append,
    checkpoints,
    fork,
    free,
    plan,
    states,
    swap,
    truncate,
)
from kvcore.transitions.publish import stored
from kvcore.transitions.requests import extend
from kvcore.types import config
from kvcore.types.commands import CopyOnWrite, Zero
from kvcore.types.groups import Group
from kvcore.types.slot_request import SlotRequest


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
    def keyed(
        note: Any, tx: Transaction, request: RequestState, *, publishes: bool, **marked: bool
    ) -> None:
        note(tx, request, publishes=publishes, **marked)
        count = request.num_computed
        found = checkpoints.checkpoints(tx, request, count, stored)
        if publishes:
            checkpoints.publish_states(tx, request, count, found)


@mutant("states-cut", "STATE-OWN", "STATE-KEY")
def m_state_keyed_inside_a_block(patcher: Patcher) -> None:
    """A boundary that the step ran over gives its key to the state at the end of the step."""

    @patcher.around(checkpoints, "checkpoints")
    def rounded(
        found: Any, tx: Transaction, request: RequestState, count: int, made: Any, **marked: bool
    ) -> Any:
        size = tx.config.hit_alignment
        return found(tx, request, count // size * size, made, **marked)

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


@mutant("states-marks", "STATE-KEY")
def m_keyed_state_in_place(patcher: Patcher) -> None:
    """A state that a full pool gives no copy keeps its key when it is overwritten."""

    @patcher.around(states, "apply_steps")
    def keep_key(apply: Any, *args: Any, **options: Any) -> None:
        with Patcher() as inner:
            inner.replace(PoolTransaction, "unpublish", lambda *_: None)
            apply(*args, **options)


@mutant("states-marks", "L-ADMIT")
def m_cache_copies_refuse_for_ever(patcher: Patcher) -> None:
    """A copy that only keeps a cached state is not given up if the pool has no block for it."""
    stepping(patcher, lambda step: replace(step, for_key=False))


@mutant(
    "states-marks",
    "ATOMIC-FAIL",
    costs="when the batch is taken, a mark of a request that has computed nothing is dropped",
)
def m_fit_query_marks(patcher: Patcher) -> None:
    """The question whether a call fits notes its checkpoint, also if the call is then refused."""

    @patcher.around(allocate, "plan_allocation")
    def marking(plan: Any, tx: Transaction, slot_request: SlotRequest) -> Any:
        if slot_request.checkpoint and slot_request.request_id not in tx.batch.ends:
            tx.batch = replace(tx.batch, ends=tx.batch.ends.append(slot_request.request_id))
        return plan(tx, slot_request)


@mutant("states-marks", "STATE-READ", rows=(79,))
def m_state_column_of_another_group(patcher: Patcher) -> None:
    """The place of a state is counted in the tokens of another group's blocks."""

    @patcher.around(states, "plan_steps")
    def misplaced(plan: Any, tx: Transaction, *args: Any) -> tuple[StateStep, ...]:
        place = (args[-1][2] - 1) // tx.config.groups[0].block_size
        return tuple(replace(step, target=place) for step in plan(tx, *args))


@mutant("states-cut", "STATE-KEY", rows=(80,))
def m_state_keyed_by_preempted_request(patcher: Patcher) -> None:
    """A request that leaves the open batch gives its checkpoint a key, though nothing writes it."""
    patcher.during(free, "leave_open_batch", checkpoints, "drop_end", publish_end)


def publish_end(tx: Transaction, request_id: str) -> None:
    """Publish the checkpoint of a request, and forget it."""
    if request_id in tx.batch.ends:
        request, ends = tx.request(request_id), tx.batch.ends.remove(request_id)
        found = checkpoints.checkpoints(tx, request, request.num_computed, stored)
        checkpoints.publish_states(tx, request, request.num_computed, found)
        tx.batch = replace(tx.batch, ends=ends)


@mutant("states-marks", "PUBLISHED", costs="less is findable, what is found is right")
def m_mark_is_forgotten(patcher: Patcher) -> None:
    """A state that a call marks is kept only where its block ends."""

    @patcher.around(checkpoints, "note_end")
    def unmarked(note: Any, *args: Any, **options: bool) -> None:
        note(*args, **{**options, "marked": False})


@mutant(
    "states-marks",
    "EVT-COPY",
    costs="a mirror of the index gets the removal of a key that it never had",
)
def m_marked_state_is_announced(patcher: Patcher) -> None:
    """The removal of a state inside a block is announced, though no event named it."""

    @patcher.around(PoolTransaction, "unpublish")
    def announce(unpublish: Any, self: PoolTransaction, block: int) -> None:
        self.silent = frozenset()
        unpublish(self, block)


@mutant("states-marks-flight", "STATE-READ")
def m_cancel_keeps_replaced_state(patcher: Patcher) -> None:
    """A cancel takes a request back to a state whose block the step replaced in its place."""

    @patcher.around(states, "apply_steps")
    def restorable(apply: Any, tx: Any, request: Any, steps: Any, *args: Any, **loads: Any) -> None:
        with Patcher() as inner:
            if all(step.takes for step in steps):
                inner.replace(states, "note_request", lambda *_, **__: None)
            apply(tx, request, steps, *args, **loads)


@mutant("states-cut", "STATE-LIVE", "STATE-READ")
def m_truncate_keeps_state(patcher: Patcher) -> None:
    """A request that is cut goes on with the state of the longer prefix."""
    patcher.replace(Transaction, "resumable", lambda _self, _request, num_tokens: num_tokens)


@mutant("states-drafts-chunks", "STATE-READ")
def m_truncate_resumes_by_position(patcher: Patcher) -> None:
    """A request that is cut to the end of a block goes on with the state that its last step began
    from, if that stands in this block, though it may be one inside it.
    """
    resumable = Transaction.resumable

    def by_position(tx: Transaction, request: RequestState, num_tokens: int) -> int:
        ends = all(num_tokens % group.block_size == 0 for group in tx.config.groups)
        if ends and tx._keeps_state(request, num_tokens):
            return num_tokens
        return resumable(tx, request, num_tokens)

    patcher.during(truncate, "cut_tables", Transaction, "resumable", by_position)


@mutant("states-fork-flight", "STATE-READ")
def m_fork_shares_the_last_state_alone(patcher: Patcher) -> None:
    """A child has no part in the state that a cancel takes its parent back to."""

    @patcher.around(TableEdit, "share")
    def share_last(share: Any, edit: TableEdit, group_id: int, blocks: Table) -> None:
        if edit.tx.config.groups[group_id].is_state and blocks:
            blocks = pvector([*[NULL_BLOCK] * (len(blocks) - 1), blocks[-1]])
        share(edit, group_id, blocks)

    @patcher.around(fork, "num_cached_after")
    def behind_nulls(
        count: Any, request: RequestState, group_id: int, group: Group, num_tokens: int
    ) -> int:
        found: int = count(request, group_id, group, num_tokens)
        return max(0, num_tokens - 1) // group.block_size if group.is_state else found


@mutant("states-fork", "STATE-READ")
def m_fork_shares_what_is_written(patcher: Patcher) -> None:
    """A child shares the state that the open batch overwrites."""
    patcher.replace(Transaction, "_keeps_state", lambda *_: True)


@mutant("states-flight", "STATE-READ")
def m_cancel_keeps_state_count(patcher: Patcher) -> None:
    """A cancel takes a request back to a state that its step overwrote in place."""
    patcher.replace(states, "note_request", lambda *_, **__: None)


@mutant(
    worlds.STATES_PINNED,
    "STATE-READ",
    unnamed="worlds of pins and chunks beside states are large",
)
def m_cancel_ends_inside_a_step(patcher: Patcher) -> None:
    """A cancel takes a request back to the start of a block that its step copied, where it has no
    state.
    """

    @patcher.around(allocate, "note_request")
    def restorable(
        note: Any, tx: Transaction, name: str, before: int, restore: int, **publishes: bool
    ) -> None:
        note(tx, name, before, restore, **publishes)
        if 0 < restore < before:
            made = replace(tx.entries[name], restore=restore)
            tx.entries = tx.entries.set(name, made)


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


@mutant("states-loads-fail", "LOAD-FAILED")
def m_failed_load_keeps_states(patcher: Patcher) -> None:
    """A state that was computed from what a load left out stays findable when that is reported."""
    patcher.replace(checkpoints, "note_keyed", lambda *_: None)


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


def guessing(settle: Any, tx: Transaction, taken: OpenBatch, stored: Any) -> None:
    """Settle checkpoints as if the tokens to come were 0."""
    known = [tx.request(name) for name in taken.ends]
    for request in known:
        guessed = extend(tx, request, [0] * request.num_output_placeholders)
        tx.put(replace(request, block_hashes=guessed.block_hashes))
    settle(tx, taken, stored)
    for request in known:
        tx.put(request)


@mutant(
    "states-ahead",
    "STATE-KEY",
    costs="a hit also needs the block of attention, which has no such key",
)
def m_state_keyed_before_its_token(patcher: Patcher) -> None:
    """A state gets its key when its batch is taken, though its last token is to come."""
    patcher.around(checkpoints, "settle_ends")(guessing)


@mutant(
    "states-ahead-three",
    "GROUP-AGREE",
    costs="less is findable, and only with three tokens to come, what is found is right",
)
def m_state_trimmed_before_its_token(patcher: Patcher) -> None:
    """A table gives back states whose last token is to come."""
    for module in (plan, append):

        @patcher.around(module, "visible_from")
        def ahead(visible: Any, tx: Any, request: Any, count: int) -> int:
            found: int = visible(tx, request, max(count, request.num_computed))
            return found


@mutant("states-ahead", "PUBLISHED", costs="less is findable, what is found is right")
def m_state_gets_no_late_key(patcher: Patcher) -> None:
    """A state whose last token comes after its batch was taken never gets a key."""
    patcher.replace(checkpoints, "publish_reached", lambda *_: None)


@mutant("states-ahead-three", "OUTPUT-ONCE")
def m_fourth_output_is_forgotten(patcher: Patcher) -> None:
    """Of four outputs to come, a request forgets the oldest."""

    @patcher.around(RequestState, "scheduled")
    def newest(scheduled: Any, request: RequestState, *args: int) -> RequestState:
        made: RequestState = scheduled(request, *args)
        return replace(made, samplers=made.samplers[-3:])


@mutant("states-ahead-completed", "REF")
def m_late_checkpoint_has_no_owner(patcher: Patcher) -> None:
    """A checkpoint whose token comes before its batch is completed can be overwritten until
    then.
    """
    patcher.during(checkpoints, "publish_reached", PoolTransaction, "touch", lambda *_: None)


@mutant("states-ahead-fork", "COMPUTED-RULE", "STATE-READ")
def m_child_begins_without_its_state(patcher: Patcher) -> None:
    """A child counts the known tokens of its parent, which has a state of more."""

    @patcher.around(Transaction, "num_settled")
    def known(settle: Any, self: Transaction, request: RequestState) -> int:
        return len(request.tokens) if request.num_output_placeholders else settle(self, request)


@mutant("states-ahead-swap", "COMPUTED-RULE")
def m_swap_keeps_the_awaited_token(patcher: Patcher) -> None:
    """A request is swapped out with the state that its next token is sampled from, which nothing
    samples again.
    """

    @patcher.around(swap, "num_saved")
    def saved(save: Any, tx: Transaction, request: RequestState) -> int:
        record = tx.scheduled[request.row]
        return save(tx, request) if record is None else states.num_left(record)


@mutant("states-ahead-slots", "CAP", costs="a refused call waits for blocks that never come")
def m_cap_forgets_tokens_to_come(patcher: Patcher) -> None:
    """The cap of a state group does not count states that wait for their last token."""
    patcher.around(config, "most_states")(lambda most, group, _: most(group, 0))
