# SPDX-License-Identifier: Apache-2.0
"""Attention from blocks, in plain torch.

A step first writes all its new keys and values to their slots, then gathers the blocks that the
queries of its sequences see, a few sequences at a time, into a scratch buffer that all layers and
steps reuse: allocating memory for each gather costs more in page faults than the copy itself, and a
small buffer stays in the CPU cache. A gather is a copy, so attention reads bit for bit what one
contiguous tensor would hold.

Slots past a sequence's length (the rest of its last block) are gathered but never read, so they may
hold anything, even NaN. Blocks that have left a window are not even gathered: their table entries
may be the null block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from kvcore_runtime.attention.ragged import RaggedStep, heads_first
from kvcore_runtime.attention.read_plan import ReadPlan
from kvcore_runtime.attention.recurrence import PagedStates, Rule
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.errors import ShapeMismatch

GATHER_BYTES_MAX = 512 * 1024
"""Keys gathered at a time, unless one sequence alone has more."""


class BlockLayers(Protocol):
    """The layers of one cache group, as attention sees them."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one of the group's layers, counted inside the group, as views.

        Each is [num_blocks, block_size, num_kv_heads, head_dim].
        """
        ...


class PagedAttention:
    """Attention of one step over the blocks of one group; created for each step."""

    def __init__(
        self,
        cache: BlockLayers,
        plan: ReadPlan,
        *,
        invariant: bool = False,
        visibility: Visibility = FULL,
        numbers: Sequence[Tensor] = (),
        scratch: Scratch | None = None,
    ) -> None:
        """Set up everything that needs no block table; `bind` comes next.

        plan: for the same block size and visibility. numbers: the plan's numbers, split as by
        `number_sizes`, if they are already on the cache's device. scratch: of earlier steps, which
        must have finished. Raises ShapeMismatch, TooLong.
        """
        keys, _ = cache.layer(0)
        self._cache = cache
        self._plan = plan
        self.step = RaggedStep(
            query_lens=plan.query_lens,
            seq_lens=plan.seq_lens,
            invariant=invariant,
            device=keys.device,
            visibility=visibility,
        )
        if not numbers:
            given = torch.from_numpy(plan.numbers).to(keys.device)
            numbers = given.split_with_sizes(plan.number_sizes)
        self._entries, self.positions, self._offsets = numbers
        self._split_sizes = [len(self.positions), *(num_blocks for num_blocks, _ in plan.parts)]
        # The views are the same for all layers.
        self._parts = (scratch or Scratch()).cut(keys, plan.parts)

    def bind(self, block_tables: Tensor) -> PagedAttention:
        """Set the block tables; return self.

        block_tables: [rows, the plan's width] ints, contiguous; entries past a sequence's blocks,
        or before the first that a query of the step sees, are ignored. Raises ShapeMismatch. Copies
        what it needs: later changes of the tables are not seen.
        """
        plan, shape = self._plan, tuple(block_tables.shape)
        fits = len(shape) == 2 and shape[0] >= plan.num_rows and shape[1] == plan.width
        if not fits or plan.width < plan.num_places:
            expected = (plan.num_rows, max(plan.width, plan.num_places))
            raise ShapeMismatch(name="block_tables", expected=expected, actual=shape)
        entries = self._entries.to(block_tables.device)
        found = block_tables.view(-1).index_select(0, entries).to(self._offsets.device, torch.int64)
        written, *self._ids = found.split_with_sizes(self._split_sizes)
        self._slots = (written, self._offsets)
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step to their slots of this layer, then attend. See `Attention`."""
        keys, values = self._cache.layer(layer)
        keys.index_put_(self._slots, k)
        values.index_put_(self._slots, v)
        return self.step.attend(q, self._gathered(keys, values))

    def _gathered(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each sequence's keys and values from its first key on, for `RaggedStep.attend`.

        A pair is valid until the next one is requested, which may reuse its memory.
        """
        for ids, (part_keys, part_values, pairs) in zip(self._ids, self._parts, strict=True):
            torch.index_select(keys, 0, ids, out=part_keys)
            torch.index_select(values, 0, ids, out=part_values)
            yield from pairs


class Scratch:
    """Memory that gathers reuse, for blocks of one shape."""

    def __init__(self) -> None:
        self._num_blocks = 0

    def cut(
        self, like: Tensor, parts: Sequence[tuple[int, tuple[int, ...]]]
    ) -> list[tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]]:
        """Return for each part its keys and values, as blocks, and those of each sequence, heads
        first.

        like: [any, *the shape of a block]. parts: as in `ReadPlan`.
        """
        most = max((num_blocks for num_blocks, _ in parts), default=0)
        if most > self._num_blocks:
            self._num_blocks = max(most, 2 * self._num_blocks)
            buffer = like.new_empty((2 * self._num_blocks, *like.shape[1:]))
            self._keys, self._values = buffer.chunk(2)
            self._flat = heads_first(buffer.flatten(0, 1))
        found = []
        for num_blocks, sizes in parts:
            unused = (self._num_blocks - num_blocks) * like.shape[1]
            half = (*sizes[:-1], sizes[-1] + unused)
            views = self._flat.split_with_sizes(half * 2, dim=2)
            pairs = list(zip(views[1 : len(half) : 2], views[len(half) + 1 :: 2], strict=True))
            found.append((self._keys[:num_blocks], self._values[:num_blocks], pairs))
        return found


class GroupedAttention:
    """One `PagedAttention` for each group and visibility, or `PagedStates` for a group of states; a
    layer goes to its own.
    """

    def __init__(
        self,
        attentions: Sequence[PagedAttention | PagedStates],
        places: Sequence[tuple[int, int]],
    ):
        """places: for each layer, the index of its attention, and the layer's place in its
        group.
        """
        self._attentions = tuple(attentions)
        self._places = tuple(places)
        self.positions = self._attentions[0].positions

    def bind(self, block_tables: Sequence[Tensor]) -> None:
        """Set the block tables, one per attention: see `PagedAttention.bind`."""
        for attention, tables in zip(self._attentions, block_tables, strict=True):
            attention.bind(tables)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        attention, place = self._places[layer]
        return cast(PagedAttention, self._attentions[attention]).attend(place, q, k, v)

    def recur(self, layer: int, like: Tensor, rule: Rule) -> Tensor:
        """See `Attention`."""
        attention, place = self._places[layer]
        return cast(PagedStates, self._attentions[attention]).recur(place, like, rule)


def num_blocks_gathered(cache: BlockLayers) -> int:
    """Return how many blocks of a group are gathered at a time, for `plan_reads`."""
    keys, _ = cache.layer(0)
    return max(1, GATHER_BYTES_MAX // (keys[0].numel() * keys.element_size()))
