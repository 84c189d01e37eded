# SPDX-License-Identifier: Apache-2.0
"""Read the sizes that V0's manager is made with, and convert them to blocks.

Source: S002-69, 72.
"""

from __future__ import annotations

import math
from typing import Any

from kvcore.legacy.v0.errors import WrongValue, require
from kvcore.types.arguments import read_count


def blocks_of_window(sliding_window: Any, block_size: int) -> int | None:
    """Return the most blocks that a window spans, plus one that is being filled; None for none.

    Raises InvalidCount.
    """
    if sliding_window is None:
        return None
    return read_count("sliding_window", sliding_window) // block_size + 2


def blocks_of_watermark(watermark: Any, num_gpu_blocks: Any) -> int:
    """Return how many blocks admission leaves free.

    Raises WrongCall for a watermark below 0, WrongValue, InvalidCount.
    """
    total = read_count("num_gpu_blocks", num_gpu_blocks)
    try:
        share = float(watermark)
    except (TypeError, ValueError):
        share = math.nan
    if not math.isfinite(share):
        raise WrongValue(reason=f"watermark is {watermark!r}, must be a share of the blocks")
    require(share >= 0.0, "watermark {watermark} is below 0", watermark=watermark)
    return int(share * total)
