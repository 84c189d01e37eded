# SPDX-License-Identifier: Apache-2.0
"""A manager with another configuration that follows a recorded one, call by call.

It makes the calls as recorded up to the first whose hit, refusal or error differs. From there on it
takes each request as far as the recorded manager does, with its own hits:

    covered    an allocation up to a place that a longer hit has reached already
    delayed    a call that is refused, or meets its request in the open batch, only here; later
    calls of that request queue after it
    preempted  the youngest request, if a batch would be empty while a request is delayed
    avoided    a free or swap that made space there: its request was allocated again
    dropped    calls that need more than the whole pool, name blocks that are not cached here, or
    are misuse here

A queued request makes at most one step of its own in a batch, as in an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from kvcore.manager import KVCacheManager
from kvcore.replay.records.counterpart import STEPS, Counterpart, Made, request_of
from kvcore.replay.records.filled import NONE, give_hashes
from kvcore.types.errors import InOpenBatch, KvcoreError
from kvcore.types.values import Appended, Hit, Reason, Refused, Verdict

RETURNS = {
    *("free", "remove_request", "swap_out", "truncate", "complete", "cancel", "unpin"),
    "unpin_prefix",
    *("complete_operation", "remove_skipped_blocks", "rewind", "unschedule"),
}
"""Calls that may free blocks."""


class Follower(Counterpart):
    """A manager that follows a recorded one. `parted_at`: the first call that differs."""

    def __init__(self, manager: KVCacheManager, running: Iterable[str], *, same: bool) -> None:
        super().__init__(manager, running, same=same)
        self.parted_at: int | None = None
        self.most_in_flight = manager.config.max_in_flight
        self.num_compared = self.appended = self.num_taken = 0
        self.queues: dict[str, deque[Made]] = {}
        """The delayed requests, oldest first, each with its queued calls."""
        self.refused: dict[str, tuple[int, int]] = {}
        """Delayed request -> blocks that its last refusal needed, and blocks free then."""
        self.stepped: set[str] = set()
        """The delayed requests that the open batch has scheduled or preempted."""
        self.gone: set[str] = set()
        """The dropped requests, until their ids are added again."""

    @property
    def fidelity(self) -> float:
        """The share of the calls that were made at their own place."""
        return self.tally.in_place / self.num_compared if self.num_compared else 1.0

    def make_as_recorded(self, call: Made) -> bool:
        """Make a call as it was recorded; False: the runs differ from here on, and the call is
        still to be made.

        Of an `append`, `appended` requests have their tokens. A call that is refused only in the
        record is not made.
        """
        if isinstance(call.value, Appended) and call.value.refused is not None:
            return self._append_as_recorded(call)
        refused = isinstance(call.value, Refused)
        if refused and call.name == "allocate_slots" and self._fits(call.arguments):
            self.parted_at = call.number
            return True
        undo = self._undo() if refused and call.name != "allocate_slots" else None
        value = self.make(call)
        if _is_same(value, call.value):
            self.num_compared += 1
            self.tally.in_place += 1
            return True
        self.parted_at = call.number
        if undo is not None:
            undo()
            return True
        self.appended = value.done if isinstance(value, Appended) else 0
        return not isinstance(value, KvcoreError | Refused | Appended)

    def _append_as_recorded(self, call: Made) -> bool:
        """Make an `append` as recorded that did not reach all of its requests."""
        done, arguments = call.value.done, call.arguments
        for part in (slice(done), slice(done, None))[done == 0 :]:
            named, tokens = arguments["requests"][part], arguments.get("tokens")
            one_more = {"num_new_tokens": 1, "num_output_placeholders": 1}
            if part.start == done and self._fits({"request_id": named[0]} | one_more):
                break
            tokens = None if tokens is None else tokens[part]
            made = arguments | {"requests": named, "tokens": tokens}
            value = self.run("append", made, filled=call.filled)
            if isinstance(value, KvcoreError):
                break
            self.appended += value.done
            if (value.refused is None) is (part.start == done):
                break
        else:
            self.num_compared, self.appended = self.num_compared + 1, 0
            self.tally.in_place += 1
            return True
        self.parted_at = call.number
        return False

    def _fits(self, arguments: dict[str, Any]) -> bool:
        """Return whether an allocation would fit."""
        try:
            return self.manager.can_allocate(**self._with_hit(arguments)) is Verdict.OK
        except KvcoreError:
            return False

    def _undo(self) -> Callable[[], None]:
        """Return a function that undoes the next call."""
        state, tally, is_idle = self.manager.encode(), attrs.evolve(self.tally), self.is_idle
        running = {name: list(places) for name, places in self.running.items()}

        def undo() -> None:
            self.manager.restore(state)
            self.tally, self.running, self.is_idle = tally, running, is_idle

        return undo

    def follow(self, calls: Iterable[Made]) -> None:
        """Make the parts of a recorded call, each at its place if possible."""
        in_place = True
        self.num_compared += 1
        for call in calls:
            in_place &= self._follow(call)
            if call.name in RETURNS:
                self._go_on()
        self.tally.in_place += in_place

    def append_at_once(self, call: Made) -> bool:
        """Make an `append` by its rows if none of its requests is delayed; False: some are still to
        be given their tokens, after `appended` ones.
        """
        is_whole = not self.appended and call.value.refused is None
        if not (is_whole and self.has_same_rows) or self.queues or self.gone:
            return False
        arguments = call.arguments
        if call.filled:
            give_hashes(self.manager, call.filled)
        try:
            value = self.manager.append(arguments["requests"], arguments.get("tokens"))
        except KvcoreError:
            return False
        self.note_append(value)
        if value.refused is not None:
            self.appended = value.done
            return False
        self.num_compared, self.tally.in_place = self.num_compared + 1, self.tally.in_place + 1
        return True

    def follow_append(
        self, made: Made, request_ids: list[str], tokens: Sequence[int] | None
    ) -> None:
        """Give requests their next tokens. Waiting requests get theirs later."""
        self.num_compared += 1
        now: Sequence[int] = range(len(request_ids))
        in_place = True

        def one(place: int) -> Made:
            request_id = request_ids[place]
            token = None if tokens is None else [tokens[place]]
            filled = made.filled
            if filled:
                filled = {request_id: filled[request_id]} if request_id in filled else NONE
            arguments = {"requests": [request_id], "tokens": token}
            return Made(made.number, "append", arguments, filled=filled)

        if self.queues or self.gone:
            left = list[int]()
            for place, request_id in enumerate(request_ids):
                if request_id in self.queues or request_id in self.gone:
                    in_place &= self._follow(one(place))
                else:
                    left.append(place)
            now = left
        while now:
            named = {"requests": request_ids, "tokens": tokens}
            if len(now) < len(request_ids):
                mine = None if tokens is None else [tokens[place] for place in now]
                named = {"requests": [request_ids[place] for place in now], "tokens": mine}
            try:
                value = self.call("append", named, made.filled)
            except KvcoreError:
                for place in now:
                    in_place &= self._follow(one(place))
                break
            self.note_append(value)
            if value.refused is None:
                break
            place = now[value.done]
            self._wait(request_ids[place], one(place), value.refused)
            now, in_place = now[value.done + 1 :], False
        self.tally.in_place += in_place

    def follow_batch(self, call: Made) -> None:
        """Take a batch where one was taken."""
        self._take_batch()
        self.first_batch = call.value.number - self.num_taken + 1
        self.num_compared, self.tally.in_place = self.num_compared + 1, self.tally.in_place + 1

    def finish(self) -> None:
        """Take batches until no request is delayed; requests without remaining calls leave."""
        while self.queues:
            for request_id in [each for each in self.running if each not in self.queues]:
                self.perform(Made(0, "free", {"request_id": request_id}))
            for batch in self.manager.in_flight:
                self.perform(Made(0, "complete", {"batch": batch + self.first_batch}))
            if not self._take_batch():
                break
        self.tally.dropped += sum(map(len, self.queues.values()))

    def _follow(self, call: Made) -> bool:
        """Make a call now, or queue it; return whether it was made now."""
        request_id = request_of(call)
        if call.name == "add_request" and request_id not in self.queues:
            self.gone.discard(request_id)
        if request_id in self.gone:
            self.tally.dropped += 1
            return False
        if request_id in self.queues:
            self.queues[request_id].append(call)
            if call.name == "fork":
                child = call.arguments["child_id"]
                self.unborn.add(child)
                self.queues[child] = deque()
            return False
        return self._do(call, request_id)

    def _wait(self, request_id: str, call: Made, refused: Refused) -> None:
        """Queue a refused call; later ones of its request queue after it."""
        self.tally.delayed += 1
        self.queues[request_id] = deque([call])
        self._note_refusal(request_id, call, refused)
        if refused.reason is Reason.NEVER:
            self._drop(request_id)

    def _do(self, call: Made, request_id: str) -> bool:
        """Make a call at its place; return whether it was made."""
        before = self.tally.covered + self.tally.avoided
        value = self.perform(call)
        if isinstance(value, Refused):
            self._wait(request_id, call, value)
            return False
        if isinstance(value, InOpenBatch) and request_id:
            self.tally.delayed += 1  # it was scheduled later than in the record
            self.queues[request_id] = deque([call])
            return False
        if isinstance(value, KvcoreError):
            self.tally.dropped += 1
            return False
        return self.tally.covered + self.tally.avoided == before

    def _take_batch(self) -> bool:
        """Close the batch; return whether it has content. It is empty only if no request is
        delayed, or none can be preempted.
        """
        if self.queues:
            self._go_on(all_of_them=self.is_idle)
        while self.is_idle and self.queues and self._make_room():
            self._go_on(all_of_them=True)
        is_idle, self.is_idle = self.is_idle, True
        running = self.manager.in_flight if self.most_in_flight else ()
        if running and len(running) >= self.most_in_flight:
            # What would have completed it was misuse here.
            self.perform(Made(0, "complete", {"batch": running[0] + self.first_batch}))
        batch = self.manager.take_batch()
        self.num_taken = batch.number + 1
        self.note_batch(batch)
        self.stepped.clear()
        if self.queues:
            self._go_on()
        return not is_idle

    def _make_room(self) -> bool:
        """Preempt the youngest request; a refused request that is alone in the pool is dropped.
        False: none can be preempted, or blocks come back by themselves.
        """
        if self.manager.in_flight:
            return False
        if not self.running and self.stepped:
            self.stepped.clear()  # all were preempted in this batch: any may be admitted again
            return True
        if len(self.running) <= 1:
            alone = next(iter(self.running), None) or next(iter(self.queues))
            if alone in self.queues:
                self._drop(alone)
                return True
        return any(self._preempt(each) for each in reversed(list(self.running)))

    def _preempt(self, request_id: str) -> bool:
        """Free a request's blocks, and queue its calls from its admission on again."""
        reached = self.manager.num_computed_tokens(request_id)
        try:
            self.manager.free(request_id)
        except KvcoreError:
            return False
        places = [place for place in self.running.pop(request_id) if place < reached]
        again = [_again(request_id, place) for place in [*places, reached]]
        self.queues.setdefault(request_id, deque()).extendleft(reversed(again))
        self.refused.pop(request_id, None)
        self.stepped.add(request_id)  # others first: its blocks may be hits, so nothing is free
        self.tally.preempted += 1
        return True

    def _go_on(self, *, all_of_them: bool = False) -> None:
        """Try the delayed requests again: running ones, oldest first, then waiting ones.

        all_of_them: also try a request whose last refusal needed more blocks than are free now, if
        no more are free than then.
        """
        for request_id in [*filter(self.queues.__contains__, self.running), *self.queues]:
            if request_id not in self.queues or request_id in self.unborn:
                continue
            needed, free = self.refused.get(request_id, (0, 0))
            now = self.manager.num_free_blocks
            if all_of_them or not needed or now >= needed or now > free:
                self._catch_up(request_id)

    def _note_refusal(self, request_id: str, call: Made, refused: Refused) -> None:
        """Record why a call for device blocks was refused."""
        if call.name != "swap_out":
            self.refused[request_id] = refused.needed, self.manager.num_free_blocks

    def _catch_up(self, request_id: str) -> None:
        """Make the queued calls of a request, up to one that is refused or must wait for a
        batch.
        """
        queue = self.queues[request_id]
        while queue:
            call = queue[0]
            steps = call.name in STEPS
            if steps and request_id in self.stepped:
                return
            covered = self.tally.covered
            value = self.perform(call)
            self.refused.pop(request_id, None)
            if isinstance(value, Refused):
                self._note_refusal(request_id, call, value)
                if value.reason is Reason.NEVER:
                    self._drop(request_id)
                return
            if isinstance(value, InOpenBatch):
                return
            queue.popleft()
            if isinstance(value, KvcoreError):
                self.tally.dropped += 1
            elif steps and self.tally.covered == covered:
                self.stepped.add(request_id)
        del self.queues[request_id]

    def _drop(self, request_id: str) -> None:
        """Drop a request with all its queued calls."""
        queue = self.queues.pop(request_id)
        self.refused.pop(request_id, None)
        self.tally.dropped += len(queue)
        self.gone.add(request_id)
        for call in queue:
            if call.name == "fork" and call.arguments["child_id"] in self.queues:
                self._drop(call.arguments["child_id"])
        for name in ("free", "remove_request"):
            try:
                getattr(self.manager, name)(request_id)
            except KvcoreError:
                continue
        self.running.pop(request_id, None)


def _again(request_id: str, target: int) -> Made:
    arguments = {"request_id": request_id, "num_new_tokens": 0, "hit": True}
    return Made(0, "allocate_slots", arguments, target)


def _is_same(mine: Any, other: Any) -> bool:
    """Return whether the values of two runs are equal where they must be."""
    if type(mine) is not type(other):
        return False
    if isinstance(mine, Appended):
        return (mine.done, mine.refused is None) == (other.done, other.refused is None)
    if isinstance(mine, Hit):
        return bool(mine.num_tokens == other.num_tokens)
    return not isinstance(mine, bool) or mine is other
