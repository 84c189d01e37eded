# SPDX-License-Identifier: Apache-2.0
"""The moves on batches: they are shortened, taken, executed late, completed or cancelled.

They follow moves.py. A batch that the device has not executed cannot be completed.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.check.simulate.kept import forget_pinned
from kvcore.check.simulate.play import Play
from kvcore.oracle.content_oracle import Pass
from kvcore.trace.calls import Misuse
from kvcore.types.errors import InvariantViolation


def shorten(play: Play, name: str, num_tokens: int) -> Any:
    """Let the open batch compute a request only up to this many tokens, or as far as it must.
    Drafts to come are computed all or not at all.
    """
    mine = [each for each in play.passes if each.request_id == name]
    if not mine or play.known[name].drafts:
        return None
    known, count = play.known[name], play.manager.num_computed_tokens(name)
    kept = max((each.loaded for each in mine if each.loaded > each.start), default=mine[0].start)
    guess = next((each for each in known.guesses if each.batch is None), None)
    num_before = known.num_rejected - (0 if guess is None else guess.rejected)
    if guess is not None:
        num_tokens = 0
    num_tokens, kept = min(num_tokens, count), kept + num_before
    if num_tokens < kept and not isinstance(play.careful("unschedule", name, kept - 1), Misuse):
        raise InvariantViolation("COMPUTED-RULE", f"{play.calls[-1]} takes hits back")
    num_tokens = max(num_tokens, kept)
    value = play.careful("unschedule", name, num_tokens)
    if isinstance(value, Misuse):
        if value.error == "HitInOpenBatch" or kept == 0 or play.config.groups[-1].is_cross:
            return value
        raise InvariantViolation("COMPUTED-RULE", f"{play.calls[-1]} gives {value}")
    if play.manager.num_computed_tokens(name) != num_tokens:
        raise InvariantViolation("COMPUTED-RULE", f"{play.calls[-1]} leaves another count")
    end = num_tokens - num_before
    known.guesses = [each for each in known.guesses if each.batch is not None]
    known.future = known.future[: max(0, end - len(known.tokens))]
    others = (each for each in play.passes if each.request_id != name or each.start < end)
    play.passes = [_cut(each, end) if each.request_id == name else each for each in others]
    return value


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
    forget_pinned(play)
    first = play.unfinished[index % len(play.unfinished)].number
    value = play.call("cancel", first)
    if not isinstance(value, Misuse):
        play.forget(first)
    return value


def _cut(each: Pass, end: int) -> Pass:
    """Return a pass without the positions from `end` on."""
    return attrs.evolve(each, end=min(each.end, end), num_slots=min(each.num_slots, end))
