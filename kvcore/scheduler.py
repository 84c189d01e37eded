# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a manager: decides what the next step computes, and which sequences are
preempted.

A step first swaps sequences in, then gives every decoding sequence one slot (one `append` for all),
then continues prompts that are computed in chunks, then admits waiting sequences whose whole prompt
fits, first come first served. All of this happens in the manager's open batch. With batches in
flight, running sequences are served before others are swapped in.

A sequence that is refused a block takes it from the youngest running sequence. So the oldest one
always progresses, and none waits forever:
  * a victim is younger than the sequence that takes its blocks, and not yet scheduled in this step
  (others of the step may have hit blocks that only its forward pass will write);
  * without a victim a sequence skips the step and keeps its blocks;
  * no sequence is admitted while a sequence is swapped out, or in a step that preempted one.

With batches in flight (`Config.max_in_flight`) a step is planned while others are computed. A
sequence whose next token is sampled there runs ahead: it gets the position of that token now and
the token later, so each step holds all decoding sequences. Blocks in use by a batch in flight are
not free until it is completed, so:
  * a sequence that is refused while blocks are pending waits for that batch, and preempts no other;
  * if a plan refused a running sequence, none is swapped in or admitted, since it would take the
  blocks that are pending for the refused one;
  * a preempted sequence keeps its pending output if all its tokens stay computed; otherwise it
  drops the output and samples it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import filterfalse
from typing import Generic, Protocol, TypeVar

import attrs

from kvcore.manager import KVCacheManager
from kvcore.types.values import Hit, Refused, Status


class Scheduled(Protocol):
    """A sequence of tokens that is computed in steps.

    row: in the manager. has_new_token: the newest token was sampled, but the manager does not have
    it yet. sampled_by: the batch that sampled the new token, None if the manager need not check it.
    num_to_come: tokens sampled by planned batches whose output was not read yet.
    """

    has_new_token: bool
    row: int
    sampled_by: int | None
    num_to_come: int

    @property
    def sequence_id(self) -> str:
        """Its request id in the manager."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens, including the new one."""

    @property
    def newest(self) -> int:
        """The token sampled last."""

    @property
    def can_decode(self) -> bool:
        """With batches in flight: whether its new token, or one to come, can get a position."""

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Return the token ids at positions [start, end)."""

    def give(self) -> None:
        """Note that the manager has the new token now."""

    def drop_output(self) -> None:
        """Drop the tokens to come, which are sampled again."""


S = TypeVar("S", bound=Scheduled)


@attrs.frozen(kw_only=True)
class ScheduledChunk(Generic[S]):
    """Positions [start, end) of a sequence, computed in one step.

    drafts: drafts at the last of these positions. is_ahead: the token of its one position is still
    to come. num_wanted: number of last positions whose logits are sampled from.
    """

    sequence: S
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    is_ahead: bool = attrs.field(init=False)
    num_wanted: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        beyond = self.end - len(self.drafts) - self.sequence.num_tokens
        object.__setattr__(self, "is_ahead", beyond > 0)
        object.__setattr__(self, "num_wanted", 1 + len(self.drafts) if beyond >= 0 else 0)

    def tokens(self) -> list[int]:
        """Return the token ids at the chunk's positions, including drafts; 0 for one that is to
        come.
        """
        if self.is_ahead:
            return [0]
        known = self.sequence.tokens(self.start, self.end - len(self.drafts))
        return [*known, *self.drafts]


@attrs.define
class Preemptions:
    """How often a sequence was preempted, by kind."""

    by_swap: int = 0
    by_recompute: int = 0

    @property
    def total(self) -> int:
        """Preemptions of both kinds."""
        return self.by_swap + self.by_recompute


class Scheduler(Generic[S]):
    """Queues of sequences: running ones, oldest first, and the others, next to resume first.

    A subclass defines where sequences come from, and what else happens with them.

    token_budget: most positions that a step computes. swaps: whether preemption swaps to the host
    tier, if that has space; else blocks are freed and computed again. num_waits: plans in which a
    sequence waited for the blocks of a batch in flight. has_moved: whether the last plan swapped,
    preempted or began to load, so that its batch must be taken even if it computes nothing.
    """

    def __init__(self, manager: KVCacheManager, *, token_budget: int, swaps: bool) -> None:
        self._manager = manager
        self._token_budget = token_budget
        self._swaps = swaps
        self.waiting: list[S] = []
        self.running: list[S] = []
        self.swapped: list[S] = []
        self.loading: list[S] = []
        self.preemptions = Preemptions()
        self.num_waits = 0
        self.has_moved = False
        self._runs_ahead = manager.config.max_in_flight > 0
        self._in_flight = False
        self._refused = False
        self._short = False
        self._chunks: list[ScheduledChunk[S]] = []
        self._scheduled: set[S] = set()
        self._budget = 0

    def schedule(self, in_flight: bool = False) -> list[ScheduledChunk[S]]:
        """Fill the open batch with the next step; return what its forward pass computes.

        in_flight: whether batches are in flight.
        """
        preempted_before = self.preemptions.total
        self._chunks, self._scheduled = [], set()
        self._budget = self._token_budget
        self._in_flight = in_flight
        self.has_moved = self._refused = self._short = False
        if not self._runs_ahead:
            self._swap_in()
        self._decode()
        self._continue_prompts()
        if self._runs_ahead and not self._refused:
            self._swap_in()
        keeps_out = self.preemptions.total > preempted_before or (
            self._runs_ahead and self._refused
        )
        if not self.swapped and not keeps_out:
            self._admit()
        self.num_waits += self._short
        return self._chunks

    def give_new_token(self, sequence: S) -> None:
        """Give the manager the newest token of a sequence, without a position for it now."""
        tokens = array("I", [sequence.newest])
        self._manager.add_tokens(sequence.sequence_id, tokens, batch=sequence.sampled_by)
        sequence.give()

    def _place(self, queue: list[S], sequence: S) -> None:
        """Put a sequence into a queue: at the back to run, at the front to resume."""
        queue.insert(len(queue) if queue is self.running else 0, sequence)

    def _num_copied(self, sequence: S) -> int:
        """Return how many blocks a swapped sequence needs to be swapped in."""
        cached = self._manager.get_computed_blocks(sequence.sequence_id).num_tokens
        return self._manager.config.blocks_for(sequence.num_tokens - cached)

    def _swap_in(self) -> None:
        """Swap sequences in, oldest first, while each running one can grow by a block."""
        manager = self._manager
        while self.swapped:
            oldest = self.swapped[0]
            needed = self._num_copied(oldest) + len(self.running) + 1
            if self.running and needed > manager.num_free_blocks:
                return
            if isinstance(manager.swap_in([oldest.sequence_id]), Refused):
                return
            self._place(self.running, self.swapped.pop(0))
            self.has_moved = True
            self._came_back(oldest)

    def _came_back(self, sequence: S) -> None:
        """Note that a swapped sequence runs again."""

    def _ready(self) -> list[S]:
        """Return the sequences that decode in this step, oldest first."""
        if self._runs_ahead:
            return [each for each in self.running if each.can_decode]
        return [each for each in self.running if each.has_new_token]

    def _decode(self) -> None:
        """Schedule one position for every decoding sequence, oldest first."""
        for sequence in self.running if self._runs_ahead else ():
            if sequence.has_new_token and not sequence.can_decode:
                self.give_new_token(sequence)
        ready = self._ready()[: self._budget]
        while ready:
            refused = self._append(ready)
            if refused is not None and not self._make_room(ready[0], refused):
                return
            ready = [each for each in ready if each in self.running]

    def _append(self, ready: list[S]) -> Refused | None:
        """Schedule one position for the sequences at the front whose tokens the same batch sampled,
        or are all to come; remove the scheduled ones from the list.
        """
        new, batch = ready[0].has_new_token, ready[0].sampled_by
        others = (
            place
            for place, each in enumerate(ready)
            if each.sampled_by != batch or each.has_new_token != new
        )
        alike = ready[: next(others, len(ready))]
        rows = array("i", [each.row for each in alike])
        tokens = array("I", [each.newest for each in alike]) if new else None
        appended = self._manager.append(rows, tokens, batch=batch if new else None)
        self._decoded(alike[: appended.done], new)
        del ready[: appended.done]
        return appended.refused

    def _decoded(self, sequences: list[S], given: bool) -> None:
        """Note that each of these got its next position. given: with its new token."""
        for sequence in sequences:
            if given:
                sequence.give()
            end = sequence.num_tokens + sequence.num_to_come
            self._computes(sequence, end - 1, end)

    def _continue_prompts(self) -> None:
        """Schedule the next chunk of every prompt that is not fully computed, oldest first."""
        for sequence in [*filterfalse(self._scheduled.__contains__, self.running)]:
            if sequence not in self.running:
                continue
            if sequence.has_new_token or sequence.num_to_come > 0:
                continue
            start = self._manager.num_computed_tokens(sequence.sequence_id)
            length, kept = self._length(sequence, start)
            if length > 0:
                self._allocate(sequence, start, start + length, kept)

    def _length(self, sequence: S, start: int, hit: Hit | None = None) -> tuple[int, bool]:
        """Return how many positions to compute from here, and whether the state behind them is to
        be kept: what is left of the sequence and of the budget, with states up to where
        `checkpoint_stop` says. hit: the one that ends here.
        """
        length = min(sequence.num_tokens - start, self._budget)
        if length > 0 and self._manager.config.has_states:
            return self._manager.checkpoint_stop(sequence.sequence_id, length, hit)
        return length, False

    def _allocate(self, sequence: S, start: int, end: int, kept: bool = False) -> None:
        """Schedule positions of a running sequence; preempt younger ones if necessary. kept: keep
        the state behind them.
        """
        while True:
            got = self._manager.allocate_slots(sequence.sequence_id, end - start, checkpoint=kept)
            if not isinstance(got, Refused):
                self._computes(sequence, start, end)
                return
            if not self._make_room(sequence, got):
                return

    def _may_admit(self) -> bool:
        """Whether one more sequence may be admitted in this step."""
        return True

    def _next_waiting(self) -> S | None:
        """Move the sequence to be admitted next to the front of the waiting queue, and
        return it.
        """
        return self.waiting[0] if self.waiting else None

    def _admit(self) -> None:
        """Admit waiting sequences, with their first chunk after the hit, while whole
        sequences fit.
        """
        while self._may_admit() and (sequence := self._next_waiting()) is not None:
            name = sequence.sequence_id
            hit = self._manager.get_computed_blocks(name)
            loads = self._begin_load(sequence, hit)
            if isinstance(loads, Refused):
                return
            if loads:
                self.has_moved = True
                self.loading.append(self.waiting.pop(0))
                continue
            start = hit.num_tokens
            length, kept = self._length(sequence, start, hit)
            if length == 0:
                return
            got = self._manager.allocate_slots(
                name,
                length,
                hit,
                full_sequence_must_fit=True,
                reserved_blocks=self._num_reserved(hit),
                checkpoint=kept,
            )
            if isinstance(got, Refused):
                return
            self._admitted(sequence, hit)
            self._place(self.running, self.waiting.pop(0))
            self._computes(sequence, start, start + length)

    def _num_reserved(self, hit: Hit) -> int:
        """Return how many blocks the admission of a sequence must leave free."""
        del hit
        return 0

    def _begin_load(self, sequence: S, hit: Hit) -> int | Refused:
        """Begin to load tokens of a waiting sequence after its hit; return their number."""
        del sequence, hit
        return 0

    def _admitted(self, sequence: S, hit: Hit) -> None:
        """Note that a waiting sequence got its first slots."""

    def _computes(self, sequence: S, start: int, end: int, drafts: tuple[int, ...] = ()) -> None:
        """Note that a sequence got these slots."""
        self._chunks.append(ScheduledChunk(sequence=sequence, start=start, end=end, drafts=drafts))
        self._scheduled.add(sequence)
        self._budget -= end - start

    def _make_room(self, taker: S, refused: Refused) -> bool:
        """Preempt the youngest running sequence that may be preempted for this one.

        No sequence is preempted if waiting brings back enough blocks, or if only waiting does.
        """
        self._refused = True
        in_flight = self._in_flight or (self._runs_ahead and self.has_moved)
        if in_flight and refused.pending:
            self._short = True
            return False
        younger = self.running[self.running.index(taker) + 1 :]
        for victim in reversed(younger):
            if self._may_give_way(victim):
                self._preempt(victim)
                return True
        self._short = self._short or in_flight
        return False

    def _may_give_way(self, victim: S) -> bool:
        """Whether a running sequence may be preempted in this step."""
        return victim not in self._scheduled

    def _preempt(self, victim: S) -> None:
        """Take a running sequence's blocks; move them to the host tier if that has space."""
        self.running.remove(victim)
        self.has_moved = True
        name = victim.sequence_id
        if victim.has_new_token and victim.num_to_come:
            self.give_new_token(victim)
        if self._swaps and not isinstance(self._manager.swap_out([name]), Refused):
            self.preemptions.by_swap += 1
            if self._manager.num_computed_tokens(name) < self._manager.num_tokens(name):
                victim.drop_output()
            is_swapped = self._manager.status(name) is Status.SWAPPED
            self._place(self.swapped if is_swapped else self.waiting, victim)
            return
        self._manager.free(name)
        if victim.has_new_token:
            self.give_new_token(victim)
        victim.drop_output()
        self.preemptions.by_recompute += 1
        self._place(self.waiting, victim)
