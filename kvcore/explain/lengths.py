# SPDX-License-Identifier: Apache-2.0
"""Derives the lengths and spans of an explanation from the marks of known tokens.

The look-up is the core's own, on marks instead of an index. Each length is at most the one before
and at least the hits: what was found was known, computed and findable, even if the observer did not
see it. So the spans tile the tokens between hits and ideal, each with one cause.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import attrs

from kvcore.explain.explanation import CAUSES, TAKERS, Removal, Span
from kvcore.explain.lost_keys import FINDABLE, NEVER, REMOVED
from kvcore.transitions.prefix_lookup import aligned, common_length, group_length
from kvcore.types.config import Config

Marks: TypeAlias = "Sequence[array[int]]"
_KEYED = (*CAUSES[:8], "", "groups_disagree", "unused")
"""The cause between two lengths; that of the ninth comes from the removals."""


@attrs.frozen
class _Tails:
    """The marks of keys that find a part of a block."""

    findable: range

    def blocks(self, mark: int) -> tuple[int, ...]:
        """Return a number if a part of a block is findable."""
        return (0,) if mark in self.findable else ()


@attrs.frozen
class _Pool:
    """index: the marks of keys that find a block."""

    index: range
    tails: _Tails | None


@attrs.frozen
class _Looked:
    """The part of a state and of a request that the core's look-up reads. A key is its mark."""

    config: Config
    device: _Pool
    marks: Marks
    scales: tuple[int, ...]

    @property
    def block_hashes(self) -> Sequence[int]:
        """Return one element per hash, if hits may end inside blocks."""
        return self.marks[0]

    def num_hashed(self, _: Config, group_id: int) -> int:
        return len(self.marks[group_id]) // self.scales[group_id]

    def key(self, _: Config, group_id: int, position: int) -> int:
        return self.marks[group_id][(position + 1) * self.scales[group_id] - 1]

    def key_at(self, config: Config, group_id: int, num_tokens: int) -> int:
        place = num_tokens // mark_size(config, group_id) - 1
        return self.marks[group_id][place] if place < len(self.marks[group_id]) else NEVER


def mark_size(config: Config, group_id: int) -> int:
    """Return the tokens per mark of a group: those of a block, or of a hash if its keys may end
    inside blocks.
    """
    group = config.groups[group_id]
    is_fine = config.has_tails or group.is_state
    return config.hash_block_size if is_fine else group.block_size


def _scale(config: Config, group_id: int) -> int:
    """Return the number of marks of a block."""
    return config.groups[group_id].block_size // mark_size(config, group_id)


def _looked(config: Config, marks: Marks, most: int) -> Any:
    """Return what the look-up reads if the marks from FINDABLE to `most` are findable."""
    index = range(FINDABLE, most + 1)
    scales = tuple(_scale(config, g) for g in range(len(config.groups)))
    pool = _Pool(index, _Tails(index) if config.has_tails else None)
    return _Looked(config, pool, marks, scales)


def published_lengths(
    config: Config, marks: Marks, num_tokens: int, computed: int
) -> tuple[list[int], int]:
    """Return the lengths from whole_blocks to found, and the group with the shortest hit of its
    own.

    marks: of the request's blocks. computed: tokens that any request computed.
    """
    whole, most = aligned(config, computed), num_tokens - 1
    left = aligned(config, min(whole, most))
    groups = [g for g, group in enumerate(config.groups) if not group.is_cross]
    kept = left
    for g in (g for g in groups if not config.groups[g].is_state):
        size, dropped = mark_size(config, g), int(config.drops_last_hit(g))
        kept = min(kept, aligned(config, (min(computed, most) // size - dropped) * size))
    if not config.enable_caching:
        return [whole, left, kept, 0, 0, 0, 0], groups[0]
    special = config.has_windows or config.has_tails or config.has_states or config.use_eagle
    if len(config.groups) == 1 and not special:
        size = config.groups[0].block_size
        once = _first(marks[0], NEVER, kept // size) * size
        found = next((i for i, m in enumerate(marks[0][: once // size]) if m != FINDABLE), None)
        own = once if found is None else found * size
        return [whole, left, kept, once, once, own, own], 0
    ever, now = _looked(config, marks, 2**32), _looked(config, marks, FINDABLE)
    once = attended = common_length(ever, ever, kept, most)
    if config.has_states:
        attended = common_length(ever, ever, kept, most, states=False)
    lengths = {g: group_length(now, now, g, once, most) for g in groups}
    least = min(groups, key=lengths.__getitem__)
    found = common_length(now, now, lengths[least], most)
    return [whole, left, kept, attended, once, lengths[least], found], least


def needed_marks(
    config: Config, marks: Marks, group_id: int, length: int
) -> tuple[array[int], int]:
    """Return the marks of what a group needs to resume at a length, and the tokens of each.

    Where hits end inside blocks, these are whole blocks, then a part of one; then what a group
    needs besides that drops its last hit.
    """
    each, size = marks[group_id], mark_size(config, group_id)
    if not config.has_tails or config.groups[group_id].is_state:
        return each, size
    scale, ends = _scale(config, group_id), [length // size]
    if config.drops_last_hit(group_id):
        ends.append(length // size + 1)
    needed = each[scale - 1 : length // size : scale]
    rest = [end for end in ends if end % scale or end > length // size]
    needed.extend([each[end - 1] for end in rest if end <= len(each)])
    return needed, size * scale


def cut(lengths: list[int], hits: int) -> tuple[int, ...]:
    """Limit each length to the one before and to at least the hits, and append the hits."""
    done: list[int] = []
    for each in lengths:
        value = max(each, hits)
        done.append(min(value, done[-1]) if done else value)
    return (*done, hits)


def spans_of(
    lengths: Sequence[int],
    lost: Iterator[Span],
    external: int,
    causes: Sequence[str] = _KEYED,
) -> tuple[Span, ...]:
    """Return spans that tile the tokens from the hits to the first length.

    lost: spans of lost keys. external: tokens after the hits that another process computed.
    causes: between the lengths.
    """
    spans: list[Span] = []
    for (above, below), cause in reversed(list(zip(pairwise(lengths), causes, strict=True))):
        if above > below:
            spans.extend(lost if not cause else [Span(below, above, cause)])
    end = min(lengths[0], lengths[-1] + external)
    if end > lengths[-1]:
        rest = [attrs.evolve(each, start=max(each.start, end)) for each in spans if each.end > end]
        return (Span(lengths[-1], end, "external"), *rest)
    return tuple(spans)


def lost_spans(
    marks: array[int], size: int, start: int, end: int, removals: Sequence[Removal]
) -> Iterator[Span]:
    """Yield, run by run, why the blocks at tokens [start, end) of a group are not findable.

    A findable block gets the cause of the missing one before it, or else after it.
    """
    first = start // size
    before = (each for each in reversed(marks[:first]) if each >= REMOVED)
    behind = (each for each in marks[first:] if each >= REMOVED)
    mark = marks[first] if first < len(marks) and marks[first] >= REMOVED else NEVER
    mark = mark or next(before, NEVER) or next(behind, NEVER)
    position = first
    for each, run in groupby(marks[first : -(-end // size)]):
        if each >= REMOVED:
            if each != mark and position > first:
                yield _lost(start, position * size, mark, removals)
                start = position * size
            mark = each
        position += len(list(run))
    yield _lost(start, end, mark, removals)


def _lost(start: int, end: int, mark: int, removals: Sequence[Removal]) -> Span:
    removal = removals[mark - REMOVED] if mark >= REMOVED else Removal(None, 0, "unknown", 0, 0)
    cause = "evicted" if removal.kind in TAKERS else "withdrawn"
    return Span(start, end, cause, removal)


def _first(marks: array[int], mark: int, end: int) -> int:
    """Return the first index of a mark before `end`, or `end`."""
    try:
        return marks.index(mark, 0, end)
    except ValueError:
        return min(end, len(marks))
