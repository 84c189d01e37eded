# SPDX-License-Identifier: Apache-2.0
"""The moves on batches: they are taken, executed late, completed or cancelled.

They follow moves.py. A batch that the device has not executed cannot be completed.
"""

from __future__ import annotations

from typing import Any

from kvcore.check.simulate.play import Play
from kvcore.trace.calls import Misuse
from kvcore.types.errors import InvariantViolation


def take(play: Play) -> Any:
    """Close and issue the open batch; if too many are in flight, do nothing."""
    if play.most_in_flight and len(play.unfinished) == play.most_in_flight:
        return None
    batch = play.call("take_batch")
    if isinstance(batch, Misuse):
        raise InvariantViolation("NOCRASH", f"take_batch raises {batch}")
    play.issue(batch)
    return batch


def execute(play: Play) -> Any:
    """Let the device execute its oldest batch."""
    if play.waiting:
        play.run(play.waiting.pop(0))


def complete(play: Play) -> Any:
    """Complete the oldest batch in flight, if the device has executed it."""
    if not play.unfinished or not play.unfinished[0].ran:
        return None
    value = play.call("complete", play.unfinished[0].number)
    if not isinstance(value, Misuse):
        play.unfinished.pop(0)
    return value


def cancel(play: Play, index: int) -> Any:
    """Cancel a batch in flight, and all later ones."""
    if not play.unfinished:
        return None
    first = play.unfinished[index % len(play.unfinished)].number
    value = play.call("cancel", first)
    if not isinstance(value, Misuse):
        play.forget(first)
    return value
