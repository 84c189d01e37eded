# SPDX-License-Identifier: Apache-2.0
"""The moves on what stays cached: epochs of weights, levels and time, pins of prefixes.

The prefix that a pin covers must be found as long as the epoch lasts and nobody withdraws keys.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvcore.check.simulate.play import Pinned, Play
from kvcore.check.simulate.prefixes import retention
from kvcore.state.state import State
from kvcore.trace.calls import Call, Misuse, perform
from kvcore.transitions.queries import get_computed_blocks
from kvcore.types.errors import InvariantViolation

PROBE = "probe"


def advance(play: Play, by: int) -> Any:
    """Begin an epoch of new weights, unless the open batch computes, stores or loads."""
    args = () if by == 1 else (play.epoch + by,)
    value = play.careful("advance_epoch", *args)
    opens = [each for each in play.transfers.values() if each.batch == play.number]
    if isinstance(value, Misuse):
        return value
    if play.passes or opens:
        raise InvariantViolation("EPOCH-KV", "an epoch begins in a batch that computes")
    play.epoch = value
    play.goals["stale request"] += len(play.manager.stale_requests())
    return value


def tick(play: Play, ms: int) -> Any:
    """Let time pass."""
    play.now_ms += ms
    return play.call("tick", play.now_ms)


def wish(play: Play, name: str, end: int | None, level: int, ms: int | None) -> Any:
    """Wish that the first tokens of a request stay longer."""
    if name not in play.known:
        return None
    return play.call("extend_retention", name, retention(0, end, level, ms))


def pin_prefix(play: Play, pin: str, name: str, num_tokens: int) -> Any:
    """Pin what a hit on the first tokens of a request needs."""
    known = play.known.get(name)
    if known is None:
        return None
    value = play.careful("pin_prefix", pin, name, num_tokens)
    if not isinstance(value, Misuse):
        if not 0 < value <= min(num_tokens, play.manager.num_computed_tokens(name)):
            raise InvariantViolation("PIN-HIT", f"{play.calls[-1]} covers {value} tokens")
        kept = None
        if not known.own:
            request = attrs.evolve(
                known.request,
                request_id=PROBE,
                tokens=[*known.tokens, 0],
                skip_reading_prefix_cache=False,
                retention=None,
            )
            kept = Pinned(request, value, play.epoch)
        play.pinned[pin] = kept
    return value


def unpin_prefix(play: Play, index: int) -> Any:
    """End a pin of a prefix."""
    if not play.pinned:
        return None
    name = sorted(play.pinned)[index % len(play.pinned)]
    value = play.call("unpin_prefix", name)
    del play.pinned[name]
    return value


def check_pinned(play: Play, state: State) -> None:
    """Raise InvariantViolation (PIN-HIT) unless each pinned prefix of this epoch is found."""
    for name, kept in play.pinned.items():
        if kept is None or kept.epoch != play.epoch:
            continue
        added = perform(state, Call("add_request", (kept.request,))).state
        found = get_computed_blocks(added, PROBE).num_tokens
        if found < kept.num_tokens:
            detail = f"of the {kept.num_tokens} tokens that pin {name!r} covers, {found} are found"
            raise InvariantViolation("PIN-HIT", detail)


def forget_pinned(play: Play) -> None:
    """Note that keys were withdrawn, so that pinned prefixes may not be found any more."""
    play.pinned = dict.fromkeys(play.pinned)


def check_stale(play: Play) -> None:
    """Raise InvariantViolation (EPOCH-HIT) unless the requests of older epochs are known."""
    older = {
        name
        for name, known in play.known.items()
        if known.epoch != play.epoch and play.manager.num_computed_tokens(name)
    }
    stale = set(play.manager.stale_requests())
    if stale != older:
        raise InvariantViolation("EPOCH-HIT", f"{sorted(stale)} are stale, not {sorted(older)}")
