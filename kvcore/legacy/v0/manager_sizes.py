# SPDX-License-Identifier: Apache-2.0
"""The sizes that V0's manager is made with, read and turned into blocks.

Source: S002-69, 72.
"""

from __future__ import annotations

import math
from typing import Any

from kvcore.legacy.v0.errors import WrongValue, require
from kvcore.types.arguments import read_count


def blocks_of_window(sliding_window: Any, block_size: int) -> int | None:
    """Blocks that a window lies in at most, and one more that is being filled; None for none.

    Raises InvalidCount.
    """
    if sliding_window is None:
        return None
    return read_count("sliding_window", sliding_window) // block_size + 2


def blocks_of_watermark(watermark: Any, num_gpu_blocks: Any) -> int:
    """Blocks that admission leaves free. Raises WrongCall below 0, WrongValue, InvalidCount."""
    total = read_count("num_gpu_blocks", num_gpu_blocks)
    try:
        share = float(watermark)
    except (TypeError, ValueError):
        share = math.nan
    if not math.isfinite(share):
        raise WrongValue(reason=f"watermark is {watermark!r}, must be a share of the blocks")
    require(share >= 0.0, "watermark {watermark} is below 0", watermark=watermark)
    return int(share * total)
