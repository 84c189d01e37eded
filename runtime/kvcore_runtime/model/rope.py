# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: a table of angles, and the rotation of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + head_dim / 2) of x [T, H, D] by its position's angle."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def rope_table(head_dim: int, num_positions: int, theta: float, like: Tensor) -> Tensor:
    """Return cosines and sines of all positions, [2, num_positions, head_dim], computed in fp64.

    The sines of the first half are negative: `rotate` multiplies the second half by them.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    positions = torch.arange(num_positions, dtype=torch.float64)
    angles = torch.outer(positions, theta**-exponents).repeat(1, 2)
    sines = angles.sin()
    sines[:, : head_dim // 2].neg_()
    return torch.stack((angles.cos(), sines)).to(like.device, like.dtype)
