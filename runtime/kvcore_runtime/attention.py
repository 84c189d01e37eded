# SPDX-License-Identifier: Apache-2.0
"""Attention from blocks, in plain torch.

A step first writes all its new keys and values to their slots, then gathers the blocks of all
sequences, one `index_select` for keys and one for values in each layer. A gather is a copy: what
attention then reads is bit for bit what one contiguous tensor would hold.

Slots past a sequence's length (the rest of its last block) are gathered but never read, so
they may hold anything, NaN too.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcore_runtime.errors import ShapeMismatch
from kvcore_runtime.ragged import RaggedStep


class BlockLayers(Protocol):
    """Where the blocks are: the cache, as attention sees it."""

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [num_blocks, block_size, num_kv_heads, head_dim], views."""
        ...


class PagedAttention:
    """Attention of one step over blocks; made anew each step, used by all layers."""

    def __init__(
        self,
        cache: BlockLayers,
        *,
        block_tables: Tensor,
        slot_mapping: Tensor,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        invariant: bool = False,
    ) -> None:
        """Prepare the indices of the step.

        block_tables: [num_seqs, >= blocks of the longest] ints, a row a sequence, in the batch's
        order; entries past a sequence's blocks are ignored. slot_mapping: [T] ints,
        block_id * block_size + offset of each new token. seq_lens count this step's tokens too.
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
        )
        slots = slot_mapping.to(keys.device, torch.int64)
        if slots.shape != (self.step.num_tokens,):
            raise ShapeMismatch(
                name="slot_mapping", expected=(self.step.num_tokens,), actual=slots.shape
            )
        block_ids = slots.div(self._block_size, rounding_mode="floor")
        self._slots = (block_ids, slots - block_ids * self._block_size)
        self._num_blocks = [-(-n // self._block_size) for n in self.step.seq_lens]
        self._block_ids = self._listed_blocks(block_tables.to(keys.device))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step to their slots of this layer, then attend. See `Attention`."""
        keys, values = self._cache.layer(layer)
        keys.index_put_(self._slots, k)
        values.index_put_(self._slots, v)
        return self.step.attend(q, list(zip(self._gather(keys), self._gather(values), strict=True)))

    def _listed_blocks(self, block_tables: Tensor) -> Tensor:
        """Ids of the blocks of all sequences, one sequence after another, [sum] int64."""
        num_seqs, width = len(self._num_blocks), max(self._num_blocks, default=0)
        if block_tables.dim() != 2 or block_tables.shape[0] != num_seqs:
            raise ShapeMismatch(
                name="block_tables", expected=(num_seqs, width), actual=block_tables.shape
            )
        if block_tables.shape[1] < width:
            raise ShapeMismatch(
                name="block_tables", expected=(num_seqs, width), actual=block_tables.shape
            )
        counts = torch.tensor(self._num_blocks, device=block_tables.device)
        listed = torch.arange(width, device=block_tables.device) < counts.unsqueeze(1)
        return block_tables[:, :width][listed].to(torch.int64)

    def _gather(self, blocks: Tensor) -> list[Tensor]:
        """Each sequence's keys (or values) as [seq_len, num_kv_heads, head_dim]."""
        rows = blocks.index_select(0, self._block_ids).flatten(0, 1)
        sequences, start = [], 0
        for seq_len, num_blocks in zip(self.step.seq_lens, self._num_blocks, strict=True):
            sequences.append(rows[start : start + seq_len])
            start += num_blocks * self._block_size
        return sequences
