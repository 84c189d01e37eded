# SPDX-License-Identifier: Apache-2.0
"""Makes the calls of a record again, and collects what happened to each block."""

from __future__ import annotations

import os

import attrs

from kvcore.record.errors import InvalidRecorder
from kvcore.record.reader import RecordedCall
from kvcore.record.segment import Segment
from kvcore.replay.records.rerun import Backend, Player, Rerun, rerun
from kvcore.types.config import Config
from kvcore.types.errors import KvcoreError
from kvcore.view.history import History


@attrs.frozen
class Viewed:
    """The part of a record that a page shows."""

    done: Rerun
    config: Config
    history: History


class Watched(Player):
    """Makes recorded calls, and adds those from `first` on to the history."""

    def __init__(self, segment: Segment, backend: Backend, history: History, first: int) -> None:
        self.history, self.first = history, first
        self._is_begun = False
        super().__init__(segment, backend)

    def begin(self, segment: Segment) -> None:
        """Start from a segment's state."""
        super().begin(segment)
        if segment.header.first_call >= self.first:
            self._begin()

    def make(self, call: RecordedCall) -> bytes:
        """Make a call, and return its outcome in recorded form."""
        if not self._is_begun and call.number >= self.first:
            self._begin()
        num_free = self.manager.num_free_blocks
        outcome = super().make(call)
        if self._is_begun:
            self.history.call(call)
            if call.name == "take_batch" and self.value is not None:
                self.history.batch(self.value, call.number, self.manager, num_free)
        return outcome

    def finish(self) -> None:
        """Add what the calls after the last batch changed, if a batch can be taken."""
        if not self._is_begun:
            self._begin()
        if self.history.is_open:
            num_free = self.manager.num_free_blocks
            try:
                batch = self.manager.take_batch()
            except KvcoreError:
                return
            self.history.batch(batch, 0, self.manager, num_free)

    def _begin(self) -> None:
        self._is_begun = True
        self.history.begin(self.manager)


def watch(
    path: str | os.PathLike[str], backend: Backend, first: int | None, last: int | None
) -> Viewed:
    """Make the calls of a record again, from `first` to `last`.

    Raises InvalidRecorder for calls before the record, and what `rerun` raises.
    """
    history, made = History(), list[Watched]()

    def make_player(segment: Segment, backend: Backend) -> Player:
        made.append(Watched(segment, backend, history, first or 0))
        return made[0]

    done = rerun(path, [backend], first=first, last=last, make_player=make_player)
    if not made:
        reason = "the record begins after it"
        raise InvalidRecorder(name="last call", value=last, reason=reason)
    made[0].finish()
    return Viewed(done, made[0].manager.config, history)
