# SPDX-License-Identifier: Apache-2.0
"""The cache tensors: one device tier, one host tier, both in one layout.

Blocks of all cache groups come from one pool; a block's page holds the layers and tokens that its
group defines, which take the same number of bytes in every group. A tier is allocated once and
never moves, so that views, graphs and transfers may keep its address. The host tier is pinned if
the device is a GPU. In guard mode, storage starts as NaN (see guard.py); otherwise it starts as
zeros. Block 0 may be kvcore's null block, which is no special case here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import Tensor

from kvcore_runtime.cache.errors import GroupOutOfRange, InvalidLayout, InvalidSize, LayerOutOfRange
from kvcore_runtime.cache.host_memory import allocate
from kvcore_runtime.cache.layout import CacheLayout, StatePart


@attrs.frozen(eq=False, kw_only=True)
class Tier:
    """Blocks that lie in one memory.

    name: "device" or "host". data: logical view, CacheLayout.shape(num_blocks).
    pieces: [num_pieces, num_blocks, words] view of the same memory, innermost contiguous; words are
    int64 if a piece is a multiple of 8 bytes, else int16.
    """

    name: str
    data: Tensor
    pieces: Tensor

    @property
    def num_blocks(self) -> int:
        """Number of blocks of this tier."""
        return self.data.shape[0]

    @property
    def piece_size_bytes(self) -> int:
        """Bytes of one contiguous piece of a block."""
        return self.pieces.shape[2] * self.pieces.element_size()


class GroupLayers:
    """The device blocks as one cache group sees them.

    data: [num_blocks, *layout.page_shape], a view. layout: of the group's blocks.
    """

    def __init__(self, blocks: Tensor, layout: CacheLayout) -> None:
        self.layout = layout
        shape = layout.shape(blocks.shape[0])
        self.data = blocks if tuple(blocks.shape) == shape else blocks.view(shape)
        self._layers = [(each[:, 0], each[:, 1]) for each in self.data.unbind(1)]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, as strided views that may be written.

        Each is [num_blocks, block_size, num_kv_heads, head_dim]. Raises LayerOutOfRange.
        """
        if not 0 <= layer < self.layout.num_layers:
            count = self.layout.num_layers
            raise LayerOutOfRange(layer=layer, num_layers=count, last=count - 1)
        return self._layers[layer]


class Cache:
    """Device and host tier of one pool of blocks.

    layout: of the blocks of group 0. num_blocks: device blocks, including the null block.
    num_host_blocks: 0 for no host tier. groups: (layers, tokens per block) of every group; default:
    one group with all the layout's layers. states: by group of states, its number of layers and the
    parts of the state of one, which lie layer by layer from the start of a page; `groups` gives
    such a group the layout's own numbers. shared: on a CPU, share the memory with processes forked
    later.
    Raises InvalidSize, InvalidLayout.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        num_host_blocks: int = 0,
        device: torch.device | str = "cpu",
        guard: bool = False,
        *,
        groups: Sequence[tuple[int, int]] = (),
        states: Mapping[int, tuple[int, Sequence[StatePart]]] | None = None,
        shared: bool = False,
    ) -> None:
        check_size("num_blocks", num_blocks)
        check_size("num_host_blocks", num_host_blocks, 0)
        self.layout = layout
        self.device = torch.device(device)
        self.guard = guard
        on_gpu = self.device.type == "cuda"
        fill = math.nan if guard else 0.0
        self.blocks = _make_tier("device", layout, num_blocks, self.device, False, fill, shared)
        host = torch.device("cpu")
        pin = on_gpu and num_host_blocks > 0
        self.host_blocks = _make_tier("host", layout, num_host_blocks, host, pin, fill, shared)
        self._side_stream: torch.cuda.Stream | None = None
        shapes = groups or [(layout.num_layers, layout.block_size)]
        layouts = [layout.regrouped(*each) for each in shapes]
        self.groups = tuple(GroupLayers(self.blocks.data, each) for each in layouts)
        self.states = {
            group_id: _view_states(self.blocks, *each) for group_id, each in (states or {}).items()
        }

    @property
    def num_blocks(self) -> int:
        """Device blocks."""
        return self.blocks.num_blocks

    @property
    def num_host_blocks(self) -> int:
        """Host blocks."""
        return self.host_blocks.num_blocks

    def layer(self, layer: int, group_id: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer of a group; see `GroupLayers.layer`.

        Raises GroupOutOfRange, LayerOutOfRange.
        """
        if not 0 <= group_id < len(self.groups):
            count = len(self.groups)
            raise GroupOutOfRange(group_id=group_id, num_groups=count, last=count - 1)
        return self.groups[group_id].layer(layer)

    def side_stream(self) -> torch.cuda.Stream:
        """Return the CUDA stream for swaps, which is not the current one; requires a GPU."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self.device)
        return self._side_stream

    def synchronize(self) -> None:
        """Wait until everything enqueued on the device is done; does nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _make_tier(
    name: str,
    layout: CacheLayout,
    num_blocks: int,
    device: torch.device,
    pin: bool,
    fill: float,
    shared: bool,
) -> Tier:
    shape = layout.shape(num_blocks)
    physical = tuple(shape[axis] for axis in layout.stride_order)
    storage = allocate(physical, layout.dtype, device, pin=pin, fill=fill, shared=shared)
    places = [layout.stride_order.index(axis) for axis in range(len(shape))]
    word = torch.int64 if layout.piece_size_bytes % 8 == 0 else torch.int16
    num_words = layout.piece_size_bytes // word.itemsize
    pieces = storage.view(-1).view(word).view(layout.num_pieces, num_blocks, num_words)
    return Tier(name=name, data=storage.permute(places), pieces=pieces)


def _view_states(tier: Tier, num_layers: int, parts: Sequence[StatePart]) -> tuple[Tensor, ...]:
    """Return the pages of a tier as states, one tensor [num_blocks, num_layers, *part.shape] for
    each part. Raises InvalidLayout.
    """
    sizes = [each.size_bytes for each in parts]
    needed, page_bytes = num_layers * sum(sizes), tier.piece_size_bytes
    starts = [sum(sizes[:place]) for place in range(len(parts))]
    is_aligned = not any(
        number % part.dtype.itemsize
        for start, part in zip(starts, parts, strict=True)
        for number in (start, sum(sizes), page_bytes)
    )
    if len(tier.pieces) > 1 or not is_aligned or needed > page_bytes:
        pages = f"{len(tier.pieces)} pieces of {page_bytes} bytes"
        reason = f"{needed} bytes of {num_layers} layers do not fit into pages of {pages}"
        raise InvalidLayout(field="states", value=[each.shape for each in parts], reason=reason)
    layers = tier.pieces[0].view(torch.uint8)[:, :needed].unflatten(1, (num_layers, sum(sizes)))
    return tuple(
        layers[:, :, start : start + part.size_bytes].view(part.dtype).unflatten(2, part.shape)
        for start, part in zip(starts, parts, strict=True)
    )


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raise InvalidSize unless a size is an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise InvalidSize(name=name, value=value, least=least)
