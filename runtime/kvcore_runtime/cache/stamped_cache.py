# SPDX-License-Identifier: Apache-2.0
"""A small real cache for a simulated engine: applies its batches and checks its reads.

Tensors are tiny (one number per slot and layer) but real, and the commands are executed by the
runtime that serves models, in guard mode. Instead of a model, a forward pass writes a stamp into
each slot, a number derived from all tokens up to it, and compares what it reads: so a block that is
shared, copied, swapped, hit or reused wrongly holds an unexpected number. A batch that is never
applied (cancelled) is skipped by `skip`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvcore import Config
from kvcore.oracle.content_oracle import Pass
from kvcore.types.commands import Batch
from kvcore.types.groups import skipped_tokens
from kvcore_runtime.attention.visibility import FULL
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.errors import (
    BlockMissing,
    GroupsDoNotHoldModel,
    TablesDiffer,
    TierFailed,
    WrongContent,
)
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layer_groups import kept_by
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from kvcore_runtime.cache.transfers import Finished, write_page

Stamps = TypeVar("Stamps", int, Tensor)
SPOILT, RUBBISH = -1, -2
"""Stamps of slots that hold no token: after a failed load, and behind the last token."""


class MemoryTier:
    """Pages by key. failing: keys whose next store or load fails, once."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Tensor] = {}
        self.failing: set[bytes] = set()

    def store(self, key: bytes, page: Tensor) -> None:
        """See `ExternalTier`."""
        self._fail(key)
        self.pages[key] = page.clone()

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """See `ExternalTier`."""
        self._fail(key)
        if key not in self.pages:
            raise BlockMissing(key=key.hex(), place="memory")
        return self.pages[key][:num_bytes]

    def _fail(self, key: bytes) -> None:
        if key in self.failing:
            self.failing.discard(key)
            raise TierFailed(key=key.hex(), place="memory", reason="told to fail")


class StampedCache:
    """The tensors of one manager's pool and the tables of its rows.

    max_rows: most requests at a time. max_len: tokens of the longest request, including lookahead.
    max_tokens: most positions that a step writes, over all requests. tier: for stores and loads.
    Raises GroupsDoNotHoldModel for cross-attention and states, which hold no request's tokens.
    """

    def __init__(
        self,
        config: Config,
        *,
        max_rows: int,
        max_len: int,
        max_tokens: int,
        tier: MemoryTier | None = None,
    ) -> None:
        sizes = [group.block_size for group in config.groups]
        largest = math.lcm(*sizes)
        kept = [
            FULL if group.kind == "mla" else kept_by(index, group)
            for index, group in enumerate(config.groups)
        ]
        if config.has_states:
            raise GroupsDoNotHoldModel(reason="stamps stand for tokens, which states do not hold")
        shapes = [(largest // size, size) for size in sizes]
        layout = CacheLayout(
            num_layers=shapes[0][0],
            num_kv_heads=1,
            head_dim=1,
            block_size=sizes[0],
            dtype=torch.float64,
        )
        cache = Cache(layout, config.num_blocks, config.num_host_blocks, guard=True, groups=shapes)
        tables = BlockTables(
            max_rows, -(-max_len // min(sizes)), max_tokens, sizes, num_groups=len(sizes)
        )
        self.tier = MemoryTier() if tier is None else tier
        self.runtime = Runtime(
            cache, tables, kept=kept, external=self.tier, null_block=config.null_block
        )
        self._groups = config.groups

    def run(self, batch: Batch, steps: Sequence[Pass]) -> list[Finished]:
        """Apply a batch in guard mode, then its forward pass; return the ended stores and loads.

        Raises what `apply` and `forward` raise.
        """
        finished = self.apply(batch)
        self.forward(steps)
        return finished

    def apply(self, batch: Batch) -> list[Finished]:
        """Execute the commands of a batch; return the ended stores and loads, done or failed.

        Raises what `Runtime.apply` raises.
        """
        self.runtime.apply(batch)
        return self.runtime.take_finished()

    def skip(self, next_number: int) -> None:
        """Set the number of the next batch; earlier ones not applied yet are cancelled."""
        self.runtime.skip(next_number)

    def forward(self, steps: Sequence[Pass]) -> None:
        """Write the slots that the batch just applied schedules, then read what its queries see.

        Raises StaleRead for a block without owner or a slot never written, and WrongContent.
        """
        reading = [each for each in steps if each.loaded < each.end]
        reads = Reads(
            rows=[each.row for each in reading],
            starts=[each.loaded for each in reading],
            ends=[each.end for each in reading],
            requests=[each.request_id for each in reading],
        )
        self.runtime.check_reads(reads)
        for group_id in range(len(self._groups)):
            self._write(group_id, steps)
        forgiving = any(each.failed is not None for each in steps)
        if forgiving:
            for step in reading:
                self._spread(step)
        self.runtime.check_content(reads)
        for group_id in range(len(self._groups)):
            for step in reading:
                self._read(group_id, step, forgiving)

    def check_tables(self, tables: Mapping[int, Sequence[Sequence[int]]]) -> None:
        """Raise TablesDiffer unless each row has these tables, one per group, and no other row any.

        Call it when all taken batches are applied, with the manager's tables from when the last one
        was taken, before its merges.
        """
        mine = self.runtime.tables
        for row in range(mine.max_rows):
            for group_id in range(mine.num_groups):
                expected = list(tables[row][group_id]) if row in tables else []
                found = mine.row_blocks(row, group_id)
                if found != expected:
                    raise TablesDiffer(row=row, group_id=group_id, found=found, expected=expected)

    def fill(self, block: int, group_id: int, stamps: Iterable[int]) -> None:
        """Put stamps into a full block of a group, like a late load."""
        write_page(self.runtime.cache.blocks, block, self.page(group_id, stamps))

    def page(self, group_id: int, stamps: Iterable[int]) -> Tensor:
        """Return the page of a full block of a group with these stamps, for a tier."""
        layout = self.runtime.cache.groups[group_id].layout
        held = self._marks(group_id, as_stamps(list(stamps)))
        page = torch.empty(layout.page_shape, dtype=torch.float64)
        page[:] = held.view(1, 1, -1, 1, 1)
        page[:, 1] *= -1
        return page.view(-1).view(torch.uint8)

    def _write(self, group_id: int, steps: Sequence[Pass]) -> None:
        """Write the stamps into every layer's keys, and their negatives into its values."""
        mapping = self.runtime.tables.slot_mapping(
            [each.row for each in steps],
            [each.start for each in steps],
            [max(each.end, each.num_slots) - each.start for each in steps],
            group_id=group_id,
        )
        stamps = [_stamps_of(step) for step in steps]
        if stamps:
            self._put(group_id, mapping.long(), self._marks(group_id, torch.cat(stamps)))

    def _put(self, group_id: int, slots: Tensor, written: Tensor) -> None:
        size, data = self._groups[group_id].block_size, self.runtime.cache.groups[group_id].data
        for layer in range(data.shape[1]):
            data[slots // size, layer, 0, slots % size, 0, 0] = written
            data[slots // size, layer, 1, slots % size, 0, 0] = -written

    def _spread(self, step: Pass) -> None:
        """Spoil everything that is computed from spoilt slots."""
        for query in range(step.loaded, step.end):
            for group_id in range(len(self._groups)):
                blocks, offsets = self._seen(group_id, step, query, query)
                held = self.runtime.cache.groups[group_id].data[blocks, 0, 0, offsets, 0, 0]
                if bool((held == self._marks(group_id, SPOILT)).any()):
                    break
            else:
                continue
            for group_id in range(len(self._groups)):
                slots = self.runtime.tables.slot_mapping(
                    [step.row], [query], [1], group_id=group_id
                )
                spoilt = torch.tensor([self._marks(group_id, SPOILT)], dtype=torch.float64)
                self._put(group_id, slots.long(), spoilt)

    def _seen(self, group_id: int, step: Pass, query: int, end: int) -> tuple[Tensor, Tensor]:
        """Return the blocks and slots of the positions up to `end` that a query sees."""
        size = self._groups[group_id].block_size
        positions = torch.arange(min(end, skipped_tokens(self._groups[group_id], query)), end)
        table = self.runtime.tables.blocks[group_id, step.row].long()
        return table[positions // size], positions % size

    def _read(self, group_id: int, step: Pass, forgiving: bool) -> None:
        """Check that the queries find everything that they see, in every layer, keys and values.
        forgiving: slots that a failed load spoilt are also accepted.
        """
        size = self._groups[group_id].block_size
        first = min(step.end, skipped_tokens(self._groups[group_id], step.loaded))
        before = first // size
        blocks = self.runtime.tables.blocks[
            group_id, step.row, before : -(-step.end // size)
        ].long()
        pages = self.runtime.cache.groups[group_id].data[blocks]
        by_slot = pages[..., 0, 0].movedim(3, 1).flatten(0, 1)
        held = by_slot[first - before * size : step.end - before * size]
        expected = self._marks(group_id, as_stamps(step.nodes[first : step.end])).view(-1, 1)
        wrong = held != torch.stack((expected, -expected), dim=2)
        if forgiving:
            wrong &= held.abs() != abs(self._marks(group_id, SPOILT))
        places = wrong.flatten(1).any(1).nonzero()
        if places.numel():
            place = int(places[0, 0])
            raise WrongContent(
                step=self.runtime.next_number - 1,
                request=step.request_id,
                group_id=group_id,
                block=int(blocks[(first + place) // size - before]),
                position=first + place,
            )

    def _marks(self, group_id: int, stamps: Stamps) -> Stamps:
        """Return a slot's number for each stamp: unique per stamp and group, exact in float64.

        Stamps of no token have numbers too.
        """
        return (stamps + 3) * len(self._groups) + group_id


def _stamps_of(step: Pass) -> Tensor:
    """Return the stamps that a pass puts into its slots; its nodes are stamps."""
    first, loaded, end = step.start, step.loaded, step.end
    bad = loaded if step.failed is None else step.failed
    held = torch.full((max(end, step.num_slots) - first,), SPOILT, dtype=torch.float64)
    held[: bad - first] = as_stamps(step.nodes[first:bad])
    held[loaded - first : end - first] = as_stamps(step.nodes[loaded:end])
    held[end - first :] = RUBBISH
    return held


def as_stamps(stamps: Sequence[int]) -> Tensor:
    """Return stamps as float64, without a Python loop if they are a buffer."""
    return torch.from_numpy(np.array(stamps, dtype=np.float64))
