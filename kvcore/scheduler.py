# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a manager: what the next step computes, and which sequences give way.

A step first brings swapped sequences back, then gives every decoding sequence one slot (one
`append` for all), then continues prompts that are computed in chunks, then admits waiting sequences
whose whole prompt fits, first come first served. All of it happens in the manager's open batch.
With batches in flight swapped sequences come back behind those that run.

A sequence that is refused a block takes it from the youngest running sequence. So the oldest one
always gets on, and nothing waits forever:
  * a victim is younger than the one that takes, and not yet scheduled in this step (others of
    the step may have hit blocks that only its forward pass will write);
  * without a victim a sequence skips the step and keeps its blocks;
  * no sequence is admitted while a sequence is swapped out, or in a step that preempted one.

With batches in flight (`Config.max_in_flight`) a step is planned while others are computed. A
sequence whose next token is sampled there runs ahead: it gets the position of that token now and
the token later, so each step holds all that decode. What a batch in flight uses is not free before
it is completed, so:
  * a sequence that is refused while blocks are pending waits for that batch, and preempts none;
  * in a plan that refused a running sequence none comes back and none is admitted: it would take
    the blocks that are pending for the refused one;
  * a preempted sequence keeps the output that is on its way if all its tokens stay computed, and
    otherwise drops it and samples it again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from kvcore.manager import KVCacheManager
from kvcore.types.values import Hit, Refused, Status


class Scheduled(Protocol):
    """A sequence of tokens that is computed in steps.

    row: at the manager. has_new_token: the newest token was sampled, and the manager does not have
    it yet. sampled_by: the batch that sampled the new token, None if the manager need not check
    it. num_to_come: tokens that batches sample that were planned and whose output was not read yet.
    """

    has_new_token: bool
    row: int
    sampled_by: int | None
    num_to_come: int

    @property
    def sequence_id(self) -> str:
        """The manager's name for it."""

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens, the new one too."""

    @property
    def newest(self) -> int:
        """The token that was sampled last."""

    @property
    def can_decode(self) -> bool:
        """With batches in flight: whether its new token, or one to come, can get its position."""

    def tokens(self, start: int, end: int) -> Sequence[int]:
        """Token ids at positions [start, end)."""

    def give(self) -> None:
        """Note that the manager knows the new token now."""

    def drop_output(self) -> None:
        """Note that no token is to come any more: what batches sampled is sampled again."""


S = TypeVar("S", bound=Scheduled)


@attrs.frozen(kw_only=True)
class ScheduledChunk(Generic[S]):
    """Positions [start, end) of a sequence, computed in one step.

    drafts: guesses at the last of these positions. is_ahead: its one position has a token that is
    still to come. num_wanted: last positions of the chunk whose logits are sampled from.
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
        """Token ids at the chunk's positions, drafts too; 0 for one that is to come."""
        if self.is_ahead:
            return [0]
        known = self.sequence.tokens(self.start, self.end - len(self.drafts))
        return [*known, *self.drafts]


@attrs.define
class Preemptions:
    """How often a sequence gave way, and by which way."""

    by_swap: int = 0
    by_recompute: int = 0

    @property
    def total(self) -> int:
        """Preemptions by either way."""
        return self.by_swap + self.by_recompute


class Scheduler(Generic[S]):
    """Queues of sequences: the oldest running one first, and of the others the next to come back.

    A subclass defines where sequences come from, and what happens beside them.

    token_budget: positions that a step computes at most. swaps: whether a sequence gives way to the
    host tier, if that has room; else its blocks are given back and computed again. num_waits: plans
    in which a sequence waited for the blocks of a batch in flight. has_moved: whether the last plan
    swapped, preempted or began to load, so that its batch is to be taken even if it computes
    nothing.
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
        """Fill the open batch with the next step; returns what its forward pass computes.

        in_flight: whether there are batches that are not completed.
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
        """Give the manager the newest token of a sequence, which is not to get a position now."""
        tokens = array("I", [sequence.newest])
        self._manager.add_tokens(sequence.sequence_id, tokens, batch=sequence.sampled_by)
        sequence.give()

    def _place(self, queue: list[S], sequence: S) -> None:
        """Put a sequence into a queue: to run behind all others, to come back before them."""
        queue.insert(len(queue) if queue is self.running else 0, sequence)

    def _num_copied(self, sequence: S) -> int:
        """The blocks that a swapped sequence needs to come back."""
        cached = self._manager.get_computed_blocks(sequence.sequence_id).num_tokens
        return self._manager.config.blocks_for(sequence.num_tokens - cached)

    def _swap_in(self) -> None:
        """Bring back swapped sequences, oldest first, while each that runs can grow by a block."""
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
        """The requests that decode in this step, oldest first."""
        if self._runs_ahead:
            return [each for each in self.running if each.can_decode]
        return [each for each in self.running if each.has_new_token]

    def _decode(self) -> None:
        """One position for every sequence that decodes, oldest first."""
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
        """One position for those at the front whose tokens the same batch sampled, or that all are
        to come; takes those that got it out of the list.
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
        """The next chunk of every prompt that is not wholly computed yet, oldest first."""
        for sequence in list(self.running):
            if sequence in self._scheduled or sequence not in self.running:
                continue
            if sequence.has_new_token or sequence.num_to_come > 0:
                continue
            start = self._manager.num_computed_tokens(sequence.sequence_id)
            length = min(sequence.num_tokens - start, self._budget)
            if length > 0:
                self._allocate(sequence, start, start + length)

    def _allocate(self, sequence: S, start: int, end: int) -> None:
        """Schedule positions of a running sequence, at the cost of younger ones if need be."""
        while True:
            got = self._manager.allocate_slots(sequence.sequence_id, end - start)
            if not isinstance(got, Refused):
                self._computes(sequence, start, end)
                return
            if not self._make_room(sequence, got):
                return

    def _may_admit(self) -> bool:
        """Whether one more sequence may be admitted in this step."""
        return True

    def _next_waiting(self) -> S | None:
        """The sequence that is admitted next; it stands first among those that wait."""
        return self.waiting[0] if self.waiting else None

    def _admit(self) -> None:
        """The first chunk of waiting sequences behind what is cached, while whole sequences fit."""
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
            length = min(sequence.num_tokens - start, self._budget)
            if length == 0:
                return
            reserved = self._num_reserved(hit)
            got = self._manager.allocate_slots(
                name, length, hit, full_sequence_must_fit=True, reserved_blocks=reserved
            )
            if isinstance(got, Refused):
                return
            self._admitted(sequence, hit)
            self._place(self.running, self.waiting.pop(0))
            self._computes(sequence, start, start + length)

    def _num_reserved(self, hit: Hit) -> int:
        """Blocks that the admission of a sequence leaves free."""
        del hit
        return 0

    def _begin_load(self, sequence: S, hit: Hit) -> int | Refused:
        """Begin to load tokens of a waiting sequence behind its hit; how many come."""
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
        """Take the blocks of the youngest running sequence that may be preempted for this one.

        If waiting brings back blocks, or only waiting does, no sequence is preempted.
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
        """Take a running sequence's blocks, to the host tier if that has room."""
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
