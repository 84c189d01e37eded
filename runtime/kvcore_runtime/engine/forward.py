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
from kvcore_runtime.attention.ragged import any_shape
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layer_groups import LayerGroups, place_layers
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.engine.sample_step import Draw
from kvcore_runtime.engine.scheduler import Chunk
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import Sampling, draw


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

    reads: one row per chunk. tokens: at all positions of the chunks, 0 for one to come. to_come:
    the places of these, and the rows whose newest token each is. wanted: the places whose logits
    are sampled from. draws: of each token that is sampled the row of these logits, how, and the
    place in the answer. newest: which of them are the newest token of a row, and the rows.
    """

    reads: Reads
    tokens: tuple[int, ...]
    to_come: tuple[list[int], list[int]]
    wanted: tuple[int, ...]
    draws: tuple[tuple[int, Sampling, int], ...]
    newest: tuple[list[int], list[int]]


@attrs.frozen(kw_only=True, eq=False)
class Computed:
    """What a step gave. logits: that its chunks want, chunk after chunk. tokens: of its draws."""

    logits: Tensor
    tokens: list[int]


class Forward:
    """Computes the chunks of a step with one model over one runtime."""

    def __init__(self, model: Llama, runtime: Runtime, groups: LayerGroups) -> None:
        self._model = model
        self._runtime = runtime
        kinds = list(dict.fromkeys((each.group_id, each.visibility) for each in groups.places))
        self._kinds = kinds
        # Of each row, for the next step: it needs no one who reads it first.
        rows = runtime.tables.max_rows
        self._newest = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._places = [
            (kinds.index((each.group_id, each.visibility)), each.layer) for each in groups.places
        ]

    def prepare(self, chunks: Sequence[Chunk], draws: Sequence[Draw]) -> StepInputs:
        """What computing the chunks needs to know of their sequences, as it is now.

        draws: what is sampled from them (sample_step.py).
        """
        stops = list(itertools.accumulate(each.end - each.start for each in chunks))
        ahead = [
            (stop - 1, each.sequence.row)
            for stop, each in zip(stops, chunks, strict=True)
            if each.is_ahead
        ]
        drawn = [(each, index) for each in draws for index in range(len(each.rows))]
        newest = [
            (place, each.sequence.row)
            for place, (each, _) in enumerate(drawn)
            if each.sample == each.sequence.sample and not each.drafts
        ]
        return StepInputs(
            reads=Reads(
                rows=[each.sequence.row for each in chunks],
                starts=[each.start for each in chunks],
                ends=[each.end for each in chunks],
                requests=[each.sequence.sequence_id for each in chunks],
            ),
            tokens=tuple(token for each in chunks for token in each.tokens()),
            to_come=([place for place, _ in ahead], [row for _, row in ahead]),
            wanted=tuple(
                place
                for stop, each in zip(stops, chunks, strict=True)
                for place in range(stop - each.num_wanted, stop)
            ),
            draws=tuple(
                (each.rows[index], each.sampling, each.place + index) for each, index in drawn
            ),
            newest=([place for place, _ in newest], [row for _, row in newest]),
        )

    def compute(self, inputs: StepInputs) -> Computed:
        """Compute a step and sample from it.

        A token to come is what was sampled last for its row. In guard mode raises StaleRead.
        """
        device = self._model.device
        self._runtime.check_reads(inputs.reads)
        attention = self._attention(inputs.reads)
        tokens = torch.tensor(inputs.tokens, device=device)
        places, rows = inputs.to_come
        if places:
            tokens[places] = self._newest[rows]
        wanted = torch.tensor(inputs.wanted, dtype=torch.int64, device=device)
        with any_shape(device):
            logits = self._model.forward(tokens, attention.step.positions(), attention, wanted)
        self._runtime.check_content(inputs.reads)
        return Computed(logits=logits, tokens=self._draw(inputs, logits))

    def _draw(self, inputs: StepInputs, logits: Tensor) -> list[int]:
        """Sample what a step is to sample, and keep it for the next step."""
        if not inputs.draws:
            return []
        chosen, samplings, indices = zip(*inputs.draws, strict=True)
        if len(chosen) != len(inputs.wanted):  # other samples of a prompt read the same row
            logits = logits[torch.tensor(chosen, device=logits.device)]
        tokens = draw(logits, samplings, indices)
        places, rows = inputs.newest
        self._newest[rows] = tokens[places]
        sampled: list[int] = tokens.tolist()
        return sampled

    def _attention(self, reads: Reads) -> GroupedAttention:
        """The attention of a step."""
        cache, tables = self._runtime.cache, self._runtime.tables
        rows, starts, ends = reads.rows, reads.starts, reads.ends
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
