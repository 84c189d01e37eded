# SPDX-License-Identifier: Apache-2.0
"""The memory layout of one block: sizes, element type and the order of strides.

The logical shape is always [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
(2: keys, values); an order only decides which of these axes is outermost in memory. Block-major
makes a block one contiguous page, so that a copy, a fill or a swap is one transfer; layer-major is
for kernels that want each layer's pages side by side. No order may split the inner [block_size,
heads, dim].
"""

from __future__ import annotations

import math
from typing import Literal

import attrs
import torch

from kvcore_runtime.cache.errors import InvalidLayout

Order = Literal["block_major", "layer_major"]

# Axes of the logical shape from outermost to innermost in memory.
STRIDE_ORDERS: dict[str, tuple[int, ...]] = {
    "block_major": (0, 1, 2, 3, 4, 5),
    "layer_major": (1, 2, 0, 3, 4, 5),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
BLOCK_AXIS = 0


@attrs.frozen
class StatePart:
    """One tensor of the state that a layer keeps for a sequence: its shape and element type."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class CacheLayout:
    """The sizes of one page and its layout in memory.

    block_size: tokens per block. dtype: one of DTYPES. Raises InvalidLayout.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    order: Order = "block_major"

    def __attrs_post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise InvalidLayout(field=field, value=value, reason="must be an integer >= 1")
        if self.dtype not in DTYPES:
            names = ", ".join(str(each) for each in DTYPES)
            raise InvalidLayout(field="dtype", value=self.dtype, reason=f"must be one of {names}")
        if self.order not in STRIDE_ORDERS:
            names = ", ".join(STRIDE_ORDERS)
            raise InvalidLayout(field="order", value=self.order, reason=f"must be one of {names}")

    @property
    def stride_order(self) -> tuple[int, ...]:
        """Axes of the logical shape, outermost in memory first."""
        return STRIDE_ORDERS[self.order]

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Logical shape of one block: [num_layers, 2, block_size, num_kv_heads, head_dim]."""
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return math.prod(self.page_shape) * self.dtype.itemsize

    @property
    def num_pieces(self) -> int:
        """Number of contiguous pieces of one block in memory."""
        outer = self.stride_order[: self.stride_order.index(BLOCK_AXIS)]
        return math.prod(self.page_shape[axis - 1] for axis in outer)

    @property
    def piece_size_bytes(self) -> int:
        """Bytes of one contiguous piece of a block."""
        return self.page_size_bytes // self.num_pieces

    def regrouped(self, num_layers: int, block_size: int) -> CacheLayout:
        """Return the layout of the same pages for a group with other numbers of layers and tokens.

        Raises InvalidLayout unless the page size is unchanged, and pages are contiguous if the
        numbers change.
        """
        other = attrs.evolve(self, num_layers=num_layers, block_size=block_size)
        if other.page_size_bytes != self.page_size_bytes:
            reason = f"pages of {other.page_size_bytes} bytes, expected {self.page_size_bytes}"
            raise InvalidLayout(
                field="num_layers",
                value=num_layers,
                reason=reason,
                page_size_bytes=other.page_size_bytes,
                expected_bytes=self.page_size_bytes,
            )
        if other != self and self.num_pieces > 1:
            reason = "groups of unlike blocks need pages in one piece: block_major"
            raise InvalidLayout(field="order", value=self.order, reason=reason)
        return other

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return the logical shape of a tensor of this many blocks."""
        return (num_blocks, *self.page_shape)
