# SPDX-License-Identifier: Apache-2.0
"""Plans a step's writes and reads through block tables, without tables or tensors.

Why: the planner of a step can make it while another process computes the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore_runtime.attention.ragged import flat_ranges
from kvcore_runtime.attention.visibility import FULL, Visibility


class ReadPlan(NamedTuple):
    """The entries of the tables that one kind of layers needs in a step.

    num_rows, num_places: required size of the tables; width: places per row. num_blocks: blocks
    that each layer reads, counted once per sequence. parts: how these are gathered: for each part
    its blocks, and how many of their slots, alternately, are unused and belong to a sequence.
    numbers: int64, concatenated: the entries, counted through all rows, of all new tokens and of
    all blocks to read; then each new token's position, and its offset in its block.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_drafts: tuple[int, ...]
    num_rows: int
    num_places: int
    width: int
    num_blocks: int
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    numbers: npt.NDArray[np.int64]

    @property
    def number_sizes(self) -> tuple[int, int, int]:
        """Return how many of the numbers are entries, positions and offsets."""
        num_tokens = sum(self.query_lens)
        return num_tokens + self.num_blocks, num_tokens, num_tokens


def plan_reads(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    width: int,
    rows: Sequence[int] | None = None,
    num_blocks_max: int | None = None,
    visibility: Visibility = FULL,
    num_drafts: Sequence[int] | None = None,
) -> ReadPlan:
    """Plan a step of sequences whose last query_lens[i] of seq_lens[i] tokens are new.

    num_drafts: how many of these are drafts; default: none.

    width: places per row of the tables. rows: of the tables, one per sequence; default: 0, 1, 2 and
    so on. num_blocks_max: blocks gathered at a time, unless a single sequence has more; None for
    all. visibility: of the layers.
    """
    starts = [seq_len - num for num, seq_len in zip(query_lens, seq_lens, strict=False)]
    drafts = [0] * len(starts) if num_drafts is None else num_drafts
    columns = [*zip(starts, seq_lens, drafts, strict=False)]
    spans = [visibility.blocks(start, end, block_size, count) for start, end, count in columns]
    seen = [visibility.seen(start, end) for start, end, _ in columns]
    row = np.array(range(len(spans)) if rows is None else rows, dtype=np.int64)
    counts = [len(span) for span in spans]
    positions = flat_ranges(starts, query_lens)
    places, offsets = np.divmod(positions, block_size)
    places += (row * width).repeat(query_lens)
    read = flat_ranges([span.start for span in spans], counts) + (row * width).repeat(counts)
    return ReadPlan(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_drafts=tuple(drafts),
        num_rows=int(row.max(initial=-1)) + 1,
        num_places=max((span.stop for span in spans), default=0),
        width=width,
        num_blocks=len(read),
        parts=()
        if visibility.is_state
        else _gathers(spans, seen, block_size, num_blocks_max or len(read)),
        numbers=np.concatenate((places, read, positions, offsets)),
    )


def _gathers(
    spans: Sequence[range], seen: Sequence[range], block_size: int, num_blocks_max: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return `ReadPlan.parts`. seen: the positions that each sequence reads or writes."""
    gathers, rest = [], iter(seen)
    for part in _parts(spans, num_blocks_max):
        sizes = [0]
        for span, each in zip(part, rest, strict=False):
            sizes[-1] += each.start - span.start * block_size
            sizes += [len(each), span.stop * block_size - each.stop]
        gathers.append((sum(len(span) for span in part), tuple(sizes)))
    return tuple(gathers)


def _parts(spans: Sequence[range], num_blocks_max: int) -> list[list[range]]:
    """Cut the sequences, in order, into parts of at most this many blocks, at least one each."""
    parts: list[list[range]] = []
    room = 0
    for span in spans:
        if not parts or len(span) > room:
            parts.append([])
            room = num_blocks_max
        parts[-1].append(span)
        room -= len(span)
    return parts
