# SPDX-License-Identifier: Apache-2.0
"""Retention wishes: how long a request wants its content to stay cached.

Invariants: levels are 0 to 100, by default 35; blocks of a higher level leave later. A wish has
three parts: `base`, without end; `level`, and the ms for which it holds. Wishes are joined by
taking the maximum of each part. The wish of a position is the join of the request's wishes from
there on, so a token never has less than those after it.
Source: names are those of TensorRT-LLM; there a level is a priority.
Twin: rust/src/types/retention.rs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import index

import attrs

from kvcore.types.policies import DEFAULT_LEVEL, DEFAULT_STEPS, Step, Wish
from kvcore.types.pool_errors import InvalidRetention

LEVEL_MAX = 100
DURATION_MAX = 2**40
TIME_MAX = 2**53
POSITION_MAX = 2**31 - 1

Piece = tuple[int, int | None, Wish]
"""First position, end (None: the end of the tokens), wish."""


@attrs.frozen
class TokenRangeRetentionConfig:
    """The level of a range of tokens.

    token_start, token_end: positions, end exclusive; None: the end of the prompt. priority: level,
    0 to 100. duration_ms: how long it holds after each release; afterwards the level is at most 35.
    None: without end. Raises InvalidRetention.
    """

    token_start: int
    token_end: int | None
    priority: int
    duration_ms: int | None = None

    def __attrs_post_init__(self) -> None:
        _check_wish(self, "priority", "duration_ms")
        _check_number(self, "token_start", 0, POSITION_MAX - 1)
        if self.token_end is not None:
            _check_number(self, "token_end", self.token_start + 1, POSITION_MAX)


@attrs.frozen
class KvCacheRetentionConfig:
    """The levels of a request's tokens: of ranges of its prompt, and of the tokens that it decodes.

    Ranges must ascend and not overlap. Tokens outside all ranges have level 35, and parts of ranges
    after the prompt have no effect. decode_retention_priority, decode_duration_ms: as for a range.
    Raises InvalidRetention.
    """

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_LEVEL
    decode_duration_ms: int | None = None
    pieces: tuple[Piece, ...] = attrs.field(init=False, eq=False, repr=False)
    """The wish of each range, then that of decoded tokens."""

    def __attrs_post_init__(self) -> None:
        _check_wish(self, "decode_retention_priority", "decode_duration_ms")
        ranges, last = self.token_range_retention_configs, 0
        if not isinstance(ranges, list | tuple):
            raise InvalidRetention(value=ranges, reason="ranges must be a list or tuple")
        for each in ranges:
            if not isinstance(each, TokenRangeRetentionConfig):
                reason = "a range must be a TokenRangeRetentionConfig"
                raise InvalidRetention(value=each, reason=reason)
            if each.token_start < last:
                reason = f"a range begins at {each.token_start}, the one before ends at {last}"
                raise InvalidRetention(value=[last, each.token_start], reason=reason)
            last = POSITION_MAX if each.token_end is None else each.token_end
        object.__setattr__(self, "token_range_retention_configs", tuple(ranges))
        pieces = [(r.token_start, r.token_end, _wish(r.priority, r.duration_ms)) for r in ranges]
        decoded = _wish(self.decode_retention_priority, self.decode_duration_ms)
        object.__setattr__(self, "pieces", (*pieces, (POSITION_MAX, None, decoded)))


def steps_of(pieces: Sequence[Piece], num_tokens: int) -> tuple[Step, ...]:
    """Return the wishes of a request at its positions, of which `num_tokens` have tokens."""
    *ranges, (_, _, decoded) = pieces
    known, at = list[Step](), 0
    for first, end, wish in ranges:
        first, end = min(first, num_tokens), min(num_tokens if end is None else end, num_tokens)
        if at < first:
            known.append((at, DEFAULT_STEPS[0][1]))
        if first < end:
            known.append((first, wish))
        at = max(at, end)
    if at < num_tokens:
        known.append((at, DEFAULT_STEPS[0][1]))
    known.append((num_tokens, decoded))
    behind, steps = (0, 0, 0), list[Step]()
    for first, wish in reversed(known):
        behind = join(behind, wish)
        steps.append((first, behind))
    return _shortest(steps[::-1])


def join_steps(mine: Sequence[Step], theirs: Sequence[Step]) -> tuple[Step, ...]:
    """Join two requests' wishes at each position."""
    firsts = sorted({first for first, _ in (*mine, *theirs)})
    return _shortest([(at, join(wish_at(mine, at), wish_at(theirs, at))) for at in firsts])


def wish_at(steps: Sequence[Step], position: int) -> Wish:
    """Return the wish of a position."""
    return steps[bisect_right(steps, position, key=lambda step: step[0]) - 1][1]


def join(one: Wish, other: Wish) -> Wish:
    """Return the maximum of each part."""
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])


def _shortest(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Drop steps that change nothing."""
    changes = steps[:1]
    for step in steps[1:]:
        if step[1] != changes[-1][1]:
            changes = [*changes, step]
    return tuple(changes)


def _wish(priority: int, duration_ms: int | None) -> Wish:
    """Make the wish for one level."""
    if duration_ms is None:
        return priority, 0, 0
    return min(priority, DEFAULT_LEVEL), priority, duration_ms


def _check_wish(value: object, priority: str, duration: str) -> None:
    _check_number(value, priority, 0, LEVEL_MAX)
    if getattr(value, duration) is not None:
        _check_number(value, duration, 1, DURATION_MAX)


def _check_number(value: object, name: str, least: int, most: int) -> None:
    number = getattr(value, name)
    if not isinstance(number, int) and hasattr(number, "__index__"):
        number = index(number)
        object.__setattr__(value, name, number)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise InvalidRetention(value=number, reason=f"{name} must be from {least} to {most}")
