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


@attrs.frozen(kw_only=True, eq=False)
class ReadPlan:
    """The entries of the tables that one group's layers need in a step.

    spans: of each sequence the places of the blocks that its queries see. numbers: int64, one
    behind another: the rows, then the places, of the entries of all new tokens and of all spans;
    then of each new token its position, and its offset in its block.
    """

    rows: tuple[int, ...]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int
    visibility: Visibility
    spans: list[range]
    numbers: npt.NDArray[np.int64]

    @property
    def num_blocks(self) -> int:
        """Blocks that each layer reads, those of several sequences counted for each."""
        return sum(len(span) for span in self.spans)

    @property
    def num_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.query_lens)


def plan_reads(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    block_size: int,
    rows: Sequence[int] | None = None,
    visibility: Visibility = FULL,
) -> ReadPlan:
    """Plan a step of sequences whose last query_lens[i] of seq_lens[i] tokens are new.

    rows: of the tables, one per sequence; 0, 1, 2 and so on if not said. visibility: of the layers.
    """
    starts = [seq_len - num for num, seq_len in zip(query_lens, seq_lens, strict=False)]
    spans = [
        range(visibility.first_seen(start) // block_size, -(-seq_len // block_size))
        for start, seq_len in zip(starts, seq_lens, strict=False)
    ]
    used = tuple(range(len(spans)) if rows is None else rows)
    counts = [len(span) for span in spans]
    places, offsets = np.divmod(positions := flat_ranges(starts, query_lens), block_size)
    row = np.array(used, dtype=np.int64)
    read = flat_ranges([span.start for span in spans], counts)
    return ReadPlan(
        rows=used,
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        block_size=block_size,
        visibility=visibility,
        spans=spans,
        numbers=np.concatenate(
            (row.repeat(query_lens), row.repeat(counts), places, read, positions, offsets)
        ),
    )
