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

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcore_runtime.attention.ragged import RaggedStep, flat_ranges, heads_first
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
        *,
        block_tables: Tensor,
        slot_mapping: Tensor,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        invariant: bool = False,
        visibility: Visibility = FULL,
    ) -> None:
        """Prepare the indices of the step.

        block_tables: [num_seqs, >= blocks of the longest] ints, a row per sequence, in the batch's
        order; entries past a sequence's blocks, or before the first that a query of the step sees,
        are ignored. slot_mapping: [T] ints, block_id * block_size + offset of each new token.
        seq_lens count this step's tokens too. visibility: of the layers that this is for.
        Raises ShapeMismatch, TooLong. Copies the indices: later changes of the tables are not seen.
        """
        keys, _ = cache.layer(0)
        self._cache = cache
        self._block_size = keys.shape[1]
        self.step = RaggedStep(
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            invariant=invariant,
            device=keys.device,
            visibility=visibility,
        )
        slots = slot_mapping.to(keys.device, torch.int64)
        if slots.shape != (self.step.num_tokens,):
            raise ShapeMismatch(
                name="slot_mapping", expected=(self.step.num_tokens,), actual=slots.shape
            )
        self._slots = (slots // self._block_size, slots % self._block_size)
        spans = [
            range(first // self._block_size, -(-seq_len // self._block_size))
            for first, seq_len in zip(self.step.first_keys, self.step.seq_lens, strict=True)
        ]
        block_ids = _listed_blocks(block_tables.to(keys.device), spans)
        block_bytes = keys[0].numel() * keys.element_size()
        parts = _parts(spans, max(1, GATHER_BYTES_MAX // block_bytes))
        sizes = [sum(len(span) for span in part) for part in parts]
        scratch = keys.new_empty((2, max(sizes, default=0), *keys.shape[1:]))
        seen = list(zip(spans, self.step.first_keys, self.step.seq_lens, strict=True))
        self._parts = []
        for part, size, ids in zip(parts, sizes, block_ids.split(sizes), strict=True):
            pairs = self._views(scratch[:, :size], seen[: len(part)])
            self._parts.append((ids, scratch[0, :size], scratch[1, :size], pairs))
            del seen[: len(part)]

    @property
    def num_blocks_read(self) -> int:
        """Blocks that each layer reads, those of several sequences counted for each."""
        return sum(len(ids) for ids, *_ in self._parts)

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
        for ids, part_keys, part_values, pairs in self._parts:
            torch.index_select(keys, 0, ids, out=part_keys)
            torch.index_select(values, 0, ids, out=part_values)
            yield from pairs

    def _views(
        self, scratch: Tensor, seen: Sequence[tuple[range, int, int]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Where the keys and values of the sequences of a part will be, the same for all layers.

        seen: of each sequence its blocks, its first key, and its length.
        """
        sizes = []
        for span, first, seq_len in seen:
            start, stop = span.start * self._block_size, span.stop * self._block_size
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
        self.step = self._attentions[0].step

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention`."""
        attention, place = self._places[layer]
        return self._attentions[attention].attend(place, q, k, v)


def _listed_blocks(block_tables: Tensor, spans: Sequence[range]) -> Tensor:
    """Ids of the blocks at these positions of each row, one row after another, [sum] ints."""
    num_seqs, width = len(spans), max((span.stop for span in spans), default=0)
    shape = tuple(block_tables.shape)
    if len(shape) != 2 or shape[0] != num_seqs or shape[1] < width:
        raise ShapeMismatch(name="block_tables", expected=(num_seqs, width), actual=shape)
    starts = [row * shape[1] + span.start for row, span in enumerate(spans)]
    places = torch.from_numpy(flat_ranges(starts, [len(span) for span in spans]))
    return block_tables.reshape(-1).index_select(0, places.to(block_tables.device))


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
