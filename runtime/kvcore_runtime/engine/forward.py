# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a step: a model over the blocks of a runtime, group by group.

All groups share one pool and one set of rows, and each has its own block table and slots. A layer
reads the table of its group (layer_groups.py) through its own window; positions that have left the
window are not read, so the table may hold the null block there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import attrs
import numpy as np
import torch
from torch import Tensor

from kvcore import Config
from kvcore_runtime.attention.attention import (
    GroupedAttention,
    PagedAttention,
    Scratch,
    num_blocks_gathered,
)
from kvcore_runtime.attention.ragged import any_shape
from kvcore_runtime.attention.read_plan import ReadPlan, plan_reads
from kvcore_runtime.attention.recurrence import PagedStates
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layer_groups import LayerGroups, place_layers
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.engine.sample_step import Draw
from kvcore_runtime.engine.scheduler import ScheduledChunk
from kvcore_runtime.model.model import Llama
from kvcore_runtime.model.sampling import Sampling, draw

_NOTHING = np.empty(0, dtype=np.int64)
_ReadLists: TypeAlias = tuple[list[int], list[int], list[int], list[str], list[int]]
_DrawLists: TypeAlias = tuple[list[int], list[dict[str, Any] | None], list[int]]


def make_runtime(
    model: Llama,
    config: Config,
    *,
    max_rows: int,
    max_tokens: int,
    guard: bool = False,
    shared: bool = False,
) -> tuple[Runtime, LayerGroups]:
    """Make cache and tables for a model, in the sizes that requests of a configuration can reach.

    max_rows: most requests at a time. max_tokens: most positions that a step computes. shared: on a
    CPU, share them with processes forked later. Raises GroupsDoNotHoldModel, UnequalPages,
    InvalidLayout, NoMemory.
    """
    shape = model.config
    groups = place_layers(shape.layer_visibilities, config.groups)
    shapes = list(zip(groups.num_layers, groups.block_sizes, strict=True))
    own = next(shapes[index] for index, each in enumerate(groups.kept) if not each.is_state)
    layout = CacheLayout(
        num_layers=own[0],
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=own[1],
        dtype=model.dtype,
    )
    states = {
        index: (groups.num_layers[index], shape.state_parts(model.dtype))
        for index, each in enumerate(groups.kept)
        if each.is_state
    }
    cache = Cache(
        layout,
        config.num_blocks,
        config.num_host_blocks,
        device=model.device,
        guard=guard,
        groups=[own if index in states else each for index, each in enumerate(shapes)],
        states=states,
        shared=shared,
    )
    longest = -(-(shape.max_model_len + config.num_preallocate_tokens) // min(groups.block_sizes))
    if not any(each.is_state or each.window is not None for each in groups.kept):  # no null blocks
        longest = min(longest, config.num_usable_blocks)
    longest += max(each.draft_states for each in config.groups)
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


class StepInputs(NamedTuple):
    """The chunks of a step as plain data, unaffected by later changes of their sequences.

    numbers: int64, concatenated: the tokens at all positions of the chunks, 0 for one to come; the
    indices of those to come, and the rows whose newest token each is; the indices whose logits are
    sampled from; which sampled tokens are the newest of a row, and the rows; then the numbers of
    the plans. sizes: the length of each of these parts. reads: as in `Reads`, one row per chunk.
    draws: for each sampled token the row of its logits, its `Sampling` fields (None for greedy),
    and its index in the answer. plans: the reads and writes of each kind of layer: each `ReadPlan`
    without its numbers.
    """

    numbers: bytes
    sizes: tuple[int, ...]
    reads: _ReadLists
    draws: _DrawLists
    plans: tuple[tuple[Any, ...], ...]


@attrs.frozen(kw_only=True, eq=False)
class Begun:
    """A step set up as far as possible before its batch is applied."""

    inputs: StepInputs
    reads: Reads
    samplings: list[Sampling | None]
    tokens: Tensor
    to_come: tuple[Tensor, Tensor]
    wanted: Tensor
    newest: tuple[Tensor, Tensor]
    attention: GroupedAttention


@attrs.frozen(kw_only=True, eq=False)
class Computed:
    """The results of a step. tokens: of its draws.

    logits: those that its chunks need, chunk by chunk; None if the engine does not keep them.
    """

    logits: Tensor | None
    tokens: list[int]


class Forward:
    """Computes the chunks of a step with one model over one runtime; in torch's inference mode.

    keep_logits: whether to return them.
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
        self._scratches = [Scratch() for _ in kinds]
        self._tables = [runtime.tables.blocks[group_id] for group_id, _ in kinds]
        # The newest token of each row, so the next step need not wait for a reader.
        rows = runtime.tables.max_rows
        self._sizes: tuple[int, ...] | None = None
        self.on_pass: Callable[[Begun, Tensor], None] | None = None
        """Called before each pass with the tokens at all its positions; what it raises is raised.
        """
        self.on_passed: Callable[[], None] | None = None
        """Called after each pass, before its samples are drawn; what it raises is raised."""
        self._newest = torch.zeros(rows, dtype=torch.int64, device=model.device)
        self._places = [
            (kinds.index((each.group_id, each.visibility)), each.layer) for each in groups.places
        ]

    def prepare(self, chunks: Sequence[ScheduledChunk], draws: Sequence[Draw]) -> StepInputs:
        """Prepare a forward pass over the chunks, from the current state of their sequences.

        draws: the samples to draw (sample_step.py).
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
        wanted = [
            place
            for stop, each in zip(stops, chunks, strict=True)
            for place in range(stop - each.num_wanted, stop)
        ]
        parts = (
            [token for each in chunks for token in each.tokens()],
            [place for place, _ in ahead],
            [row for _, row in ahead],
            wanted,
            [place for place, _ in newest],
            [row for _, row in newest],
        )
        reads = (
            [each.sequence.row for each in chunks],
            [each.start for each in chunks],
            [each.end for each in chunks],
            [each.sequence.sequence_id for each in chunks],
            [len(each.drafts) for each in chunks],
        )
        draws_as_data = (
            [each.rows[index] for each, index in drawn],
            [_plain(each.sampling) for each, _ in drawn],
            [each.place + index for each, index in drawn],
        )
        return self._inputs(parts, reads, draws_as_data)

    def prepare_rows(
        self,
        rows: list[int],
        starts: list[int],
        ends: list[int],
        *,
        tokens: list[int],
    ) -> StepInputs:
        """Prepare a forward pass that another rank planned and samples from: no logits are wanted.

        rows, starts, ends: of each sequence. tokens: at all positions.
        """
        names = [f"row {row}" for row in rows]
        parts: list[list[int]] = [tokens, [], [], [], [], []]
        return self._inputs(parts, (rows, starts, ends, names, [0] * len(rows)), ([], [], []))

    def begin(self, inputs: StepInputs) -> Begun:
        """Set up a step, as far as it needs neither its batch nor the tokens to come.

        The previous step must be done, since both share their memory.
        """
        if inputs.sizes != self._sizes:  # otherwise the views of the last step can be reused
            self._sizes = inputs.sizes
            self._numbers = self._newest.new_empty(sum(inputs.sizes))
            self._views = self._numbers.split_with_sizes(inputs.sizes)
        self._numbers.copy_(torch.frombuffer(bytearray(inputs.numbers), dtype=torch.int64))
        tokens, places, rows, wanted, newest, newest_rows, *rest = self._views
        return Begun(
            inputs=inputs,
            reads=Reads(*inputs.reads),
            samplings=[None if each is None else Sampling(**each) for each in inputs.draws[1]],
            tokens=tokens,
            to_come=(places, rows),
            wanted=wanted,
            newest=(newest, newest_rows),
            attention=self._attention(inputs.plans, rest),
        )

    def compute(self, begun: Begun) -> Computed:
        """Compute a step whose batch was applied, and sample from it.

        A token to come is the one sampled last for its row. Raises BeyondTable, in guard mode
        StaleRead.
        """
        reads, tables = begun.reads, self._runtime.tables
        self._runtime.check_reads(reads)
        for group_id in range(tables.num_groups):
            tables.check_reach(reads.rows, reads.ends, group_id=group_id)
        begun.attention.bind(self._tables)
        places, rows = begun.to_come
        tokens = begun.tokens
        if len(rows):
            newest = self._newest.index_select(0, rows)
            is_all = len(rows) == len(tokens)
            tokens = newest if is_all else tokens.index_copy(0, places, newest)
        if self.on_pass is not None:
            self.on_pass(begun, tokens)
        with any_shape(self._model.device):
            logits = self._model.forward(
                tokens, begun.attention.positions, begun.attention, begun.wanted
            )
        if self.on_passed is not None:
            self.on_passed()
        self._runtime.check_content(reads)
        sampled = self._draw(begun, logits)
        return Computed(logits=logits if self._keep_logits else None, tokens=sampled)

    def _draw(self, begun: Begun, logits: Tensor) -> list[int]:
        """Draw a step's samples, and keep them for the next step."""
        chosen, _, indices = begun.inputs.draws
        if not chosen:
            return []
        if len(chosen) != len(begun.wanted):  # other samples of a prompt read the same row
            logits = logits[chosen]
        tokens = draw(logits, begun.samplings, indices)
        places, rows = begun.newest
        newest = tokens if len(places) == len(tokens) else tokens.index_select(0, places)
        self._newest.index_copy_(0, rows, newest)
        sampled: list[int] = tokens.tolist()
        return sampled

    def _inputs(
        self, parts: Sequence[list[int]], reads: _ReadLists, draws: _DrawLists
    ) -> StepInputs:
        """Convert a step to plain data: its own numbers and those of its plans."""
        rows, starts, ends, _, num_drafts = reads
        plans = self._plan(rows, starts, ends, num_drafts)
        own = np.array([*itertools.chain(*parts)], dtype=np.int64)
        plan_sizes = (each.number_sizes for each in plans)
        return StepInputs(
            numbers=np.concatenate([own, *(each.numbers for each in plans)]).tobytes(),
            sizes=(*map(len, parts), *itertools.chain(*plan_sizes)),
            reads=reads,
            draws=draws,
            plans=tuple(each[:-1] for each in plans),
        )

    def _plan(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        num_drafts: Sequence[int],
    ) -> tuple[ReadPlan, ...]:
        """Plan the reads and writes of each kind of layer."""
        return tuple(
            plan_reads(
                [end - start for start, end in zip(starts, ends, strict=True)],
                ends,
                rows=rows,
                block_size=self._runtime.tables.block_sizes[group_id],
                width=self._runtime.tables.max_blocks,
                num_blocks_max=self._num_blocks_max[group_id],
                visibility=visibility,
                num_drafts=num_drafts,
            )
            for group_id, visibility in self._kinds
        )

    def _attention(
        self, plans: Sequence[tuple[Any, ...]], numbers: Sequence[Tensor]
    ) -> GroupedAttention:
        """Make the attention of a step, not yet bound to block tables."""
        cache = self._runtime.cache
        attentions: list[PagedAttention | PagedStates] = []
        for index, (fields, (group_id, visibility)) in enumerate(
            zip(plans, self._kinds, strict=True)
        ):
            plan = ReadPlan._make((*fields, _NOTHING))
            own = numbers[3 * index : 3 * index + 3]
            if visibility.is_state:
                attentions.append(PagedStates(cache.states[group_id], plan, own))
                continue
            attentions.append(
                PagedAttention(
                    cache.groups[group_id],
                    plan,
                    invariant=self._model.invariant,
                    visibility=visibility,
                    numbers=own,
                    scratch=self._scratches[index],
                )
            )
        return GroupedAttention(attentions, self._places)


def _plain(sampling: Sampling) -> dict[str, Any] | None:
    return attrs.asdict(sampling, recurse=False) if sampling.temperature > 0 else None
