# SPDX-License-Identifier: Apache-2.0
"""What a step will write and read of block tables, as plain data that needs no table and no tensor.

Why: it can be made where a step is planned, while the step before is computed elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvcore_runtime.attention.ragged import flat_ranges
from kvcore_runtime.attention.visibility import FULL, Visibility


@attrs.frozen(eq=False)
class ReadPlan:
    """The entries of the tables that one kind of layers needs in a step.

    num_rows, num_places: that the tables must have; width: the places that a row has. num_blocks:
    that each layer reads, those of several sequences counted for each. numbers: int64, one behind
    another: the entries, counted through all rows, of all new tokens and of all blocks that are
    read; then of each new token its position, and its offset in its block.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_rows: int
    num_places: int
    width: int
    num_blocks: int
    numbers: npt.NDArray[np.int64]


def plan_reads(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    width: int,
    rows: Sequence[int] | None = None,
    visibility: Visibility = FULL,
) -> ReadPlan:
    """Plan a step of sequences whose last query_lens[i] of seq_lens[i] tokens are new.

    width: places that a row of the tables has. rows: of the tables, one per sequence; 0, 1, 2 and
    so on if not said. visibility: of the layers.
    """
    starts = [seq_len - num for num, seq_len in zip(query_lens, seq_lens, strict=False)]
    spans = [
        range(visibility.first_seen(start) // block_size, -(-seq_len // block_size))
        for start, seq_len in zip(starts, seq_lens, strict=False)
    ]
    row = np.array(range(len(spans)) if rows is None else rows, dtype=np.int64)
    counts = [len(span) for span in spans]
    positions = flat_ranges(starts, query_lens)
    places, offsets = np.divmod(positions, block_size)
    places += (row * width).repeat(query_lens)
    read = flat_ranges([span.start for span in spans], counts) + (row * width).repeat(counts)
    return ReadPlan(
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        num_rows=int(row.max(initial=-1)) + 1,
        num_places=max((span.stop for span in spans), default=0),
        width=width,
        num_blocks=len(read),
        numbers=np.concatenate((places, read, positions, offsets)),
    )
