# SPDX-License-Identifier: Apache-2.0
"""The moves of batches: taken, carried out late, finished, taken back.

As in moves.py: A batch that the device did not carry out cannot be finished.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.simulate.play import Play
from kvcore.trace.calls import Misuse
from kvcore.types.errors import InvariantViolation


def take(play: Play) -> Any:
    """The open batch is closed and issued; if too many are in flight, nothing happens."""
    if play.most_in_flight and len(play.unfinished) == play.most_in_flight:
        return None
    batch = play.call("take_batch")
    if isinstance(batch, Misuse):
        raise InvariantViolation("NOCRASH", f"take_batch raises {batch}")
    play.issue(batch)
    return batch


def execute(play: Play) -> Any:
    """The device carries out the oldest batch that it has not."""
    if play.waiting:
        play.run(play.waiting.pop(0))


def complete(play: Play) -> Any:
    """The oldest batch in flight is finished, if the device carried it out."""
    if not play.unfinished or not play.unfinished[0].ran:
        return None
    value = play.call("complete", play.unfinished[0].number)
    if not isinstance(value, Misuse):
        play.unfinished.pop(0)
    return value


def cancel(play: Play, index: int) -> Any:
    """A batch in flight, and all behind it, are taken back."""
    if not play.unfinished:
        return None
    first = play.unfinished[index % len(play.unfinished)].number
    value = play.call("cancel", first)
    if not isinstance(value, Misuse):
        play.forget(first)
    return value
