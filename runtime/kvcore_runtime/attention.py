# SPDX-License-Identifier: Apache-2.0
"""Attention from blocks, in plain torch.

A step first writes all its new keys and values to their slots, then gathers the blocks of its
sequences, a few sequences at a time, into a scratch buffer that all layers reuse: memory that is
allocated anew for each gather costs more in page faults than the copy itself, and a small buffer
stays in the cache of the processor. A gather is a copy: what attention then reads is bit for bit
what one contiguous tensor would hold.

Slots past a sequence's length (the rest of its last block) are gathered but never read, so
they may hold anything, NaN too.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvcore_runtime.errors import ShapeMismatch
from kvcore_runtime.ragged import RaggedStep

GATHER_BYTES_MAX = 512 * 1024
"""Keys gathered at a time, unless one sequence alone has more."""


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
        num_blocks = [-(-n // self._block_size) for n in self.step.seq_lens]
        block_ids = _listed_blocks(block_tables.to(keys.device), num_blocks)
        block_bytes = keys[0].numel() * keys.element_size()
        self._groups = _groups(num_blocks, max(1, GATHER_BYTES_MAX // block_bytes))
        self._group_ids = torch.split(block_ids, [sum(group) for group in self._groups])
        widest = max((sum(group) for group in self._groups), default=0)
        self._scratch = keys.new_empty((2, widest, *keys.shape[1:]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of the step to their slots of this layer, then attend. See `Attention`."""
        keys, values = self._cache.layer(layer)
        keys.index_put_(self._slots, k)
        values.index_put_(self._slots, v)
        return self.step.attend(q, self._gathered(keys, values))

    def _gathered(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each sequence's keys and values, [seq_len, num_kv_heads, head_dim].

        A pair holds until the next one is asked for: then its memory may be another's.
        """
        seq_lens = iter(self.step.seq_lens)
        for group, ids in zip(self._groups, self._group_ids, strict=True):
            target = self._scratch[:, : ids.shape[0]]
            torch.index_select(keys, 0, ids, out=target[0])
            torch.index_select(values, 0, ids, out=target[1])
            group_keys, group_values = target.flatten(1, 2)
            start = 0
            for num_blocks in group:
                end = start + next(seq_lens)
                yield group_keys[start:end], group_values[start:end]
                start += num_blocks * self._block_size


def _listed_blocks(block_tables: Tensor, num_blocks: Sequence[int]) -> Tensor:
    """Ids of the blocks of all sequences, one sequence after another, [sum] int64."""
    num_seqs, width = len(num_blocks), max(num_blocks, default=0)
    shape = tuple(block_tables.shape)
    if len(shape) != 2 or shape[0] != num_seqs or shape[1] < width:
        raise ShapeMismatch(name="block_tables", expected=(num_seqs, width), actual=shape)
    counts = torch.tensor(num_blocks, device=block_tables.device)
    listed = torch.arange(width, device=block_tables.device) < counts.unsqueeze(1)
    return block_tables[:, :width][listed].to(torch.int64)


def _groups(num_blocks: Sequence[int], num_blocks_max: int) -> list[list[int]]:
    """Cut the sequences, in order, into groups of at most so many blocks, but at least one each."""
    groups: list[list[int]] = []
    room = 0
    for count in num_blocks:
        if not groups or count > room:
            groups.append([])
            room = num_blocks_max
        groups[-1].append(count)
        room -= count
    return groups
