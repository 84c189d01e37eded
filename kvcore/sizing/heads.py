# SPDX-License-Identifier: Apache-2.0
"""How heads are split over devices."""

from __future__ import annotations

from kvcore.sizing.errors import HeadsDoNotSplit


def heads_per_device(num_heads: int, tensor_parallel: int, heads: str = "key-value heads") -> int:
    """Count the heads that one device keeps: 1, a copy, if there are fewer heads than devices.

    heads: what they are called. Raises HeadsDoNotSplit.
    """
    fewer, more = sorted((num_heads, tensor_parallel))
    if more % fewer:
        raise HeadsDoNotSplit(num_heads=num_heads, heads=heads, tensor_parallel=tensor_parallel)
    return max(num_heads // tensor_parallel, 1)
