# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a step: a model over the blocks of a runtime, group by group.

All groups share one pool and one set of rows, and each has its own block table and slots. A
layer reads the table of its group (layer_groups.py) through its own window; what lies behind is not
read, so the table may hold the null block there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from kvcore import Config
from kvcore_runtime.attention.attention import GroupedAttention, PagedAttention, num_blocks_gathered
from kvcore_runtime.attention.ragged import any_shape
from kvcore_runtime.attention.read_plan import ReadPlan, plan_reads
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
    model: Llama,
    config: Config,
    *,
    max_rows: int,
    max_tokens: int,
    guard: bool = False,
    shared: bool = False,
) -> tuple[Runtime, LayerGroups]:
    """Cache and tables for a model, of the sizes that requests of a configuration can reach.

    max_rows: requests at a time. max_tokens: positions that a step computes at most. shared: on
    a CPU with processes that are forked later. Raises GroupsDoNotHoldModel, UnequalPages.
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
        shared=shared,
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
        shared=shared,
    )
    return Runtime(cache, tables, kept=groups.kept, null_block=config.null_block), groups


@attrs.frozen(eq=False)
class StepInputs:
    """The chunks of a step as plain data, which no later change of their sequences reaches.

    reads: one row per chunk. tokens: at all positions of the chunks, 0 for one to come. to_come:
    the places of these, and the rows whose newest token each is. wanted: the places whose logits
    are sampled from. draws: of each token that is sampled the row of these logits, how (None for
    greedy), and the place in the answer. newest: which of them are the newest token of a row, and
    the rows. plans: what each kind of layer reads and writes.
    """

    reads: Reads
    tokens: tuple[int, ...]
    to_come: tuple[list[int], list[int]]
    wanted: tuple[int, ...]
    draws: tuple[tuple[int, Sampling | None, int], ...]
    newest: tuple[list[int], list[int]]
    plans: tuple[ReadPlan, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return StepInputs, (
            self.reads,
            self.tokens,
            self.to_come,
            self.wanted,
            self.draws,
            self.newest,
            self.plans,
        )


@attrs.frozen(kw_only=True, eq=False)
class Begun:
    """A step as far as it can be computed before its batch is applied: what it reads is set up."""

    inputs: StepInputs
    tokens: Tensor
    to_come: tuple[Tensor, Tensor]
    wanted: Tensor
    newest: tuple[Tensor, Tensor]
    positions: Tensor
    attention: GroupedAttention


@attrs.frozen(kw_only=True, eq=False)
class Computed:
    """What a step gave. tokens: of its draws.

    logits: those that its chunks want, chunk after chunk; None if the engine does not keep them.
    """

    logits: Tensor | None
    tokens: list[int]


class Forward:
    """Computes the chunks of a step with one model over one runtime.

    keep_logits: whether to hand them out.
    """

    def __init__(
        self, model: Llama, runtime: Runtime, groups: LayerGroups, *, keep_logits: bool = False
    ) -> None:
        self._model = model
        self._runtime = runtime
        self._keep_logits = keep_logits
        kinds = list(dict.fromkeys((each.group_id, each.visibility) for each in groups.places))
        self._kinds = kinds
        self._num_blocks_max = [num_blocks_gathered(each) for each in runtime.cache.groups]
        # Of each row, for the next step: it needs no one who reads it first.
        rows = runtime.tables.max_rows
        self._newest = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._places = [
            (kinds.index((each.group_id, each.visibility)), each.layer) for each in groups.places
        ]

    def prepare(self, chunks: Sequence[Chunk], draws: Sequence[Draw]) -> StepInputs:
        """What a forward pass over the chunks needs to know of their sequences, as they are now.

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
                (
                    each.rows[index],
                    each.sampling if each.sampling.temperature > 0 else None,
                    each.place + index,
                )
                for each, index in drawn
            ),
            newest=([place for place, _ in newest], [row for _, row in newest]),
            plans=self._plan(chunks),
        )

    @torch.inference_mode()
    def begin(self, inputs: StepInputs) -> Begun:
        """Set a step up, as far as that needs neither its batch nor the tokens to come."""
        attention = self._attention(inputs.plans)
        parts = (inputs.tokens, *inputs.to_come, inputs.wanted, *inputs.newest)
        joined = self._ints([*itertools.chain(*parts)])
        tokens, places, rows, wanted, *newest = joined.split_with_sizes(
            [len(each) for each in parts]
        )
        return Begun(
            inputs=inputs,
            tokens=tokens,
            to_come=(places, rows),
            wanted=wanted,
            newest=(newest[0], newest[1]),
            positions=attention.positions,
            attention=attention,
        )

    @torch.inference_mode()
    def compute(self, begun: Begun) -> Computed:
        """Compute a step whose batch was applied, and sample from it.

        A token to come is what was sampled last for its row. Raises BeyondTable, in guard mode
        StaleRead.
        """
        reads, tables = begun.inputs.reads, self._runtime.tables
        self._runtime.check_reads(reads)
        for group_id in range(tables.num_groups):
            tables.check_reach(reads.rows, reads.ends, group_id=group_id)
        begun.attention.bind([tables.blocks[group_id] for group_id, _ in self._kinds])
        places, rows = begun.to_come
        if len(places):
            begun.tokens.index_copy_(0, places, self._newest.index_select(0, rows))
        with any_shape(self._model.device):
            logits = self._model.forward(
                begun.tokens, begun.positions, begun.attention, begun.wanted
            )
        self._runtime.check_content(reads)
        tokens = self._draw(begun, logits)
        return Computed(logits=logits if self._keep_logits else None, tokens=tokens)

    def _draw(self, begun: Begun, logits: Tensor) -> list[int]:
        """Sample what a step is to sample, and keep it for the next step."""
        draws = begun.inputs.draws
        if not draws:
            return []
        chosen, samplings, indices = zip(*draws, strict=True)
        if len(chosen) != len(begun.wanted):  # other samples of a prompt read the same row
            logits = logits[self._ints(chosen)]
        tokens = draw(logits, samplings, indices)
        places, rows = begun.newest
        self._newest.index_copy_(0, rows, tokens.index_select(0, places))
        sampled: list[int] = tokens.tolist()
        return sampled

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self._model.device)

    def _plan(self, chunks: Sequence[Chunk]) -> tuple[ReadPlan, ...]:
        """What each kind of layer reads and writes."""
        return tuple(
            plan_reads(
                [each.end - each.start for each in chunks],
                [each.end for each in chunks],
                rows=[each.sequence.row for each in chunks],
                block_size=self._runtime.tables.block_sizes[group_id],
                width=self._runtime.tables.max_blocks,
                num_blocks_max=self._num_blocks_max[group_id],
                visibility=visibility,
            )
            for group_id, visibility in self._kinds
        )

    def _attention(self, plans: Sequence[ReadPlan]) -> GroupedAttention:
        """The attention of a step, which does not know where the blocks are yet."""
        groups, invariant = self._runtime.cache.groups, self._model.invariant
        attentions = [
            PagedAttention(groups[group_id], plan, invariant=invariant, visibility=visibility)
            for plan, (group_id, visibility) in zip(plans, self._kinds, strict=True)
        ]
        return GroupedAttention(attentions, self._places)
