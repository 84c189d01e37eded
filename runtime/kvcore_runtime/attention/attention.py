# SPDX-License-Identifier: Apache-2.0
"""Attention from blocks, in plain torch.

A step first writes all its new keys and values to their slots, then gathers the blocks that the
queries of its sequences see, a few sequences at a time, into a scratch buffer that all layers
reuse: memory that is allocated anew for each gather costs more in page faults than the copy itself,
and a small buffer stays in the cache of the processor. A gather is a copy: what attention then
reads is bit for bit what one contiguous tensor would hold.

Slots past a sequence's length (the rest of its last block) are gathered but never read, so
they may hold anything, NaN too. Blocks behind a window are not even gathered: their table entries
may be the null block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcore_runtime.attention.ragged import RaggedStep, heads_first
from kvcore_runtime.attention.read_plan import ReadPlan
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.errors import ShapeMismatch

GATHER_BYTES_MAX = 512 * 1024
"""Keys gathered at a time, unless one sequence alone has more."""


class BlockLayers(Protocol):
    """Where the blocks of one cache group are, as attention sees it."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one of the group's layers, counted inside the group, as views.

        Each is [num_blocks, block_size, num_kv_heads, head_dim].
        """
        ...


class PagedAttention:
    """Attention of one step over the blocks of one group; made anew each step, for its layers."""

    def __init__(
        self,
        cache: BlockLayers,
        plan: ReadPlan,
        *,
        invariant: bool = False,
        visibility: Visibility = FULL,
    ) -> None:
        """Set up all that needs no block table; `bind` is next.

        plan: for the same block size and visibility. Raises ShapeMismatch, TooLong.
        """
        keys, _ = cache.layer(0)
        self._cache = cache
        self._plan = plan
        self._block_size = size = keys.shape[1]
        self.step = RaggedStep(
            query_lens=plan.query_lens,
            seq_lens=plan.seq_lens,
            invariant=invariant,
            device=keys.device,
            visibility=visibility,
        )
        num_tokens = self.step.num_tokens
        numbers = torch.from_numpy(plan.numbers).to(keys.device)
        self._entries, self.positions, self._offsets = numbers.split(
            (num_tokens + plan.num_blocks, num_tokens, num_tokens)
        )
        spans = [
            range(first // size, -(-seq_len // size))
            for first, seq_len in zip(self.step.first_keys, plan.seq_lens, strict=True)
        ]
        block_bytes = keys[0].numel() * keys.element_size()
        parts = _parts(spans, max(1, GATHER_BYTES_MAX // block_bytes))
        sizes = [sum(len(span) for span in part) for part in parts]
        self._split_sizes = [num_tokens, *sizes]
        scratch = keys.new_empty((2, max(sizes, default=0), *keys.shape[1:]))
        seen = list(zip(spans, self.step.first_keys, plan.seq_lens, strict=True))
        self._parts = []
        for part, part_size in zip(parts, sizes, strict=True):
            pairs = self._views(scratch[:, :part_size], seen[: len(part)])
            self._parts.append((scratch[0, :part_size], scratch[1, :part_size], pairs))
            del seen[: len(part)]

    def bind(self, block_tables: Tensor) -> PagedAttention:
        """Say where the blocks are; returns itself.

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
        written, *self._ids = found.split(self._split_sizes)
        self._slots = (written, self._offsets)
        return self

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step to their slots of this layer, then attend. See `Attention`."""
        keys, values = self._cache.layer(layer)
        keys.index_put_(self._slots, k)
        values.index_put_(self._slots, v)
        return self.step.attend(q, self._gathered(keys, values))

    def _gathered(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each sequence's keys and values from its first key on, as `RaggedStep.attend` takes them.

        A pair holds until the next one is requested: then its memory may be another's.
        """
        for ids, (part_keys, part_values, pairs) in zip(self._ids, self._parts, strict=True):
            torch.index_select(keys, 0, ids, out=part_keys)
            torch.index_select(values, 0, ids, out=part_values)
            yield from pairs

    def _views(
        self, scratch: Tensor, seen: Sequence[tuple[range, int, int]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Where the keys and values of the sequences of a part will be, the same for all layers.

        seen: of each sequence its blocks, its first key, and its length.
        """
        sizes, size = [], self._block_size
        for span, first, seq_len in seen:
            start, stop = span.start * size, span.stop * size
            sizes += [first - start, seq_len - first, stop - seq_len]
        keys, values = (
            heads_first(each).split_with_sizes(sizes, dim=2)[1::3] for each in scratch.flatten(1, 2)
        )
        return list(zip(keys, values, strict=True))


class GroupedAttention:
    """One `PagedAttention` for each group and visibility; a layer goes to its own."""

    def __init__(self, attentions: Sequence[PagedAttention], places: Sequence[tuple[int, int]]):
        """places: of each layer, the index of its attention, and the layer's place in its group."""
        self._attentions = tuple(attentions)
        self._places = tuple(places)
        self.positions = self._attentions[0].positions

    def bind(self, block_tables: Sequence[Tensor]) -> None:
        """Say where the blocks are, one table per attention: see `PagedAttention.bind`."""
        for attention, tables in zip(self._attentions, block_tables, strict=True):
            attention.bind(tables)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        attention, place = self._places[layer]
        return self._attentions[attention].attend(place, q, k, v)


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
