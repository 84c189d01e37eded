# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a step: a model over the blocks of a runtime, group by group.

All groups share one pool and one set of rows, and each has its own block table and slots. A
layer reads the table of its group (layer_groups.py) through its own window; what lies behind is not
read, so the table may hold the null block there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvcore import Config
from kvcore_runtime.attention.attention import GroupedAttention, PagedAttention
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layer_groups import LayerGroups, place_layers
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.engine.scheduler import Chunk
from kvcore_runtime.model.model import Llama


def make_runtime(
    model: Llama, config: Config, *, max_rows: int, max_tokens: int, guard: bool = False
) -> tuple[Runtime, LayerGroups]:
    """Cache and tables for a model, of the sizes that requests of a configuration can reach.

    max_rows: requests at a time. max_tokens: positions that a step computes at most. Raises
    GroupsDoNotHoldModel, UnequalPages.
    """
    shape = model.config
    groups = place_layers(shape.layer_visibilities, config.groups)
    layout = CacheLayout(
        num_layers=groups.num_layers[0],
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=groups.block_sizes[0],
        dtype=model.dtype,
    )
    cache = Cache(
        layout,
        config.num_blocks,
        config.num_host_blocks,
        device=model.device,
        guard=guard,
        groups=list(zip(groups.num_layers, groups.block_sizes, strict=True)),
    )
    longest = -(-(shape.max_model_len + config.num_preallocate_tokens) // min(groups.block_sizes))
    if all(each.window is None for each in groups.kept):
        longest = min(longest, config.num_usable_blocks)
    tables = BlockTables(
        max_rows=max_rows,
        max_blocks=longest,
        max_tokens=max_tokens,
        block_size=groups.block_sizes,
        num_groups=groups.num_groups,
        device=model.device,
    )
    return Runtime(cache, tables, kept=groups.kept, null_block=config.null_block), groups


@attrs.frozen(kw_only=True)
class StepInputs:
    """The chunks of a step as plain data, which no later change of their sequences reaches.

    reads: one row per chunk. tokens: at all positions of the chunks. wanted: of these, the places
    whose logits are sampled from.
    """

    reads: Reads
    tokens: tuple[int, ...]
    wanted: tuple[int, ...]


class Forward:
    """Computes the chunks of a step with one model over one runtime."""

    def __init__(self, model: Llama, runtime: Runtime, groups: LayerGroups) -> None:
        self._model = model
        self._runtime = runtime
        kinds = list(dict.fromkeys((each.group_id, each.visibility) for each in groups.places))
        self._kinds = kinds
        self._places = [
            (kinds.index((each.group_id, each.visibility)), each.layer) for each in groups.places
        ]

    def prepare(self, chunks: Sequence[Chunk]) -> StepInputs:
        """What computing the chunks needs to know of their sequences, as it is now."""
        stops = itertools.accumulate(each.end - each.start for each in chunks)
        return StepInputs(
            reads=Reads(
                rows=[each.sequence.row for each in chunks],
                starts=[each.start for each in chunks],
                ends=[each.end for each in chunks],
                requests=[each.sequence.sequence_id for each in chunks],
            ),
            tokens=tuple(token for each in chunks for token in each.tokens()),
            wanted=tuple(
                place
                for stop, each in zip(stops, chunks, strict=True)
                for place in range(stop - each.num_wanted, stop)
            ),
        )

    def compute(self, inputs: StepInputs) -> Tensor:
        """Compute a step; returns the logits that its chunks want, chunk after chunk.

        In guard mode raises StaleRead.
        """
        device = self._model.device
        self._runtime.check_reads(inputs.reads)
        attention = self._attention(inputs.reads)
        logits = self._model.forward(
            torch.tensor(inputs.tokens, device=device),
            attention.step.positions(),
            attention,
            torch.tensor(inputs.wanted, dtype=torch.int64, device=device),
        )
        self._runtime.check_content(inputs.reads)
        return logits

    def _attention(self, reads: Reads) -> GroupedAttention:
        """The attention of a step."""
        cache, tables = self._runtime.cache, self._runtime.tables
        rows, starts, ends, _ = reads
        query_lens = [end - start for start, end in zip(starts, ends, strict=True)]
        on_device = torch.tensor(rows, device=self._model.device)
        slots = {
            group_id: tables.slot_mapping(rows, starts, query_lens, group_id=group_id)
            for group_id in range(tables.num_groups)
        }
        attentions = [
            PagedAttention(
                cache.groups[group_id],
                block_tables=tables.blocks[group_id][on_device],
                slot_mapping=slots[group_id],
                query_lens=query_lens,
                seq_lens=ends,
                invariant=self._model.invariant,
                visibility=visibility,
            )
            for group_id, visibility in self._kinds
        ]
        return GroupedAttention(attentions, self._places)
