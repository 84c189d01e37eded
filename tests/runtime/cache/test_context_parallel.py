# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: where tokens lie on each rank, and attention over all ranks' parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kvcore_runtime.cache.apply import batch_columns
from kvcore_runtime.cache.context_parallel import ELSEWHERE, local_slots
from kvcore_runtime.cache.errors import InvalidSize, TableOutOfRange, UnevenShares
from kvcore_runtime.cache.tables import BlockTables

from kvcore import Config, KVCacheManager, Request
from kvcore.types.commands import Batch, CopyOnWrite
from tests.conftest import Backend

NUM_BLOCKS, LOCAL, HEAD_DIM = 12, 4, 8


def test_runs_of_tokens_go_around_the_ranks() -> None:
    slots = torch.arange(16, 24)  # block 2 of blocks of eight tokens
    first = local_slots(slots, 8, rank=0, num_ranks=2, interleave=2)
    second = local_slots(slots, 8, rank=1, num_ranks=2, interleave=2)
    assert first.tolist() == [8, 9, -1, -1, 10, 11, -1, -1]
    assert second.tolist() == [-1, -1, 8, 9, -1, -1, 10, 11]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_each_token_lies_on_one_rank_and_fills_one_slot(
    num_ranks: int, interleave: int, num_runs: int, num_blocks: int
) -> None:
    local = interleave * num_runs
    size = local * num_ranks
    slots = torch.arange(num_blocks * size, dtype=torch.int32)
    kept = [
        local_slots(slots, size, rank=rank, num_ranks=num_ranks, interleave=interleave)
        for rank in range(num_ranks)
    ]
    owners = (slots % size) // interleave % num_ranks  # the position's, if blocks are in order
    for rank, each in enumerate(kept):
        assert each.dtype == slots.dtype
        assert torch.equal(each != ELSEWHERE, owners == rank)
        mine = each[each != ELSEWHERE]
        assert mine.tolist() == list(range(num_blocks * local))  # in order, without a gap


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_ranks": 0, "rank": 0}, InvalidSize),
        ({"num_ranks": 2, "rank": 0, "interleave": 0}, InvalidSize),
        ({"num_ranks": 2, "rank": 2}, TableOutOfRange),
        ({"num_ranks": 2, "rank": -1}, TableOutOfRange),
        ({"num_ranks": 3, "rank": 0}, UnevenShares),
        ({"num_ranks": 2, "rank": 0, "interleave": 8}, UnevenShares),
    ],
)
def test_impossible_shares_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    slots = torch.arange(4)
    with pytest.raises(error):
        local_slots(slots, 8, **options)
    assert slots.tolist() == [0, 1, 2, 3]


class Rank:
    """The pages of one rank: one layer, one head, keys and values."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.pages = torch.full((NUM_BLOCKS, LOCAL, 2, HEAD_DIM), torch.nan)

    def copy(self, batch: Batch) -> None:
        for command in batch:
            if isinstance(command, CopyOnWrite):
                self.pages[command.target] = self.pages[command.source]

    def kept(self, slots: torch.Tensor) -> torch.Tensor:
        return local_slots(slots, LOCAL * self.num_ranks, rank=self.rank, num_ranks=self.num_ranks)

    def write(self, slots: torch.Tensor, content: torch.Tensor) -> None:
        kept = self.kept(slots)
        self.pages.view(-1, 2, HEAD_DIM)[kept[kept >= 0]] = content[kept >= 0]

    def attend(self, slots: torch.Tensor, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rank's part of attention, not yet divided, and the sum of its weights."""
        kept = self.kept(slots)
        keys, values = self.pages.view(-1, 2, HEAD_DIM)[kept[kept >= 0]].unbind(1)
        weights = (keys @ query).exp()
        return weights @ values, weights.sum()


class Cluster:
    """One manager and tables, as on each rank, and what the ranks keep."""

    def __init__(self, num_ranks: int, backend: Backend) -> None:
        size = LOCAL * num_ranks
        config = Config(NUM_BLOCKS, size, hash_seed=b"seed")
        self.manager = KVCacheManager(config, backend=backend)
        self.tables = BlockTables(4, NUM_BLOCKS, 64, size)
        self.ranks = [Rank(rank, num_ranks) for rank in range(num_ranks)]

    def slots(self, row: int, start: int, end: int) -> torch.Tensor:
        return self.tables.slot_mapping([row], [start], [end - start]).long()

    def step(self, row: int, start: int, tokens: list[int]) -> None:
        """Apply the open batch on every rank, and write the tokens from `start` on."""
        batch = self.manager.take_batch()
        self.tables.apply(batch_columns(batch))
        slots = self.slots(row, start, len(tokens))
        for rank in self.ranks:
            rank.copy(batch)
            rank.write(slots, content_of(tokens)[start:])

    def attend(self, row: int, num_tokens: int, query: torch.Tensor) -> torch.Tensor:
        slots = self.slots(row, 0, num_tokens)
        parts = [rank.attend(slots, query) for rank in self.ranks]
        return torch.stack([part for part, _ in parts]).sum(0) / sum(total for _, total in parts)


def content_of(tokens: list[int]) -> torch.Tensor:
    """Return keys and values: random, but the same for the same tokens up to a position."""
    made = []
    for end in range(1, len(tokens) + 1):
        generator = torch.Generator().manual_seed(hash(tuple(tokens[:end])) % 2**31)
        made.append(torch.randn(2, HEAD_DIM, generator=generator))
    return torch.stack(made)


def expected(tokens: list[int], query: torch.Tensor) -> torch.Tensor:
    keys, values = content_of(tokens).unbind(1)
    return torch.softmax(keys @ query, 0) @ values


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_attention_over_all_ranks_is_that_of_one(num_ranks: int, backend: Backend) -> None:
    """A prompt, one that hits its blocks, and a fork whose last block is copied on every rank."""
    cluster, query = Cluster(num_ranks, backend), torch.randn(HEAD_DIM)
    manager, size = cluster.manager, LOCAL * num_ranks
    texts = {"a": list(range(2 * size + 3)), "b": [*range(2 * size), 90, 91]}
    for name, tokens in texts.items():
        manager.add_request(Request(name, tokens))
        hit = manager.get_computed_blocks(name)
        assert hit.num_tokens == (2 * size if name == "b" else 0)
        assert manager.allocate_slots(name, len(tokens) - hit.num_tokens, hit)
        cluster.step(manager.get_row(name), hit.num_tokens, tokens)
    manager.fork("a", "c")
    texts["c"] = [*texts["a"], 70]
    manager.append(["c"], [70])
    cluster.step(manager.get_row("c"), len(texts["a"]), texts["c"])
    texts["a"].append(80)
    manager.append(["a"], [80])
    cluster.step(manager.get_row("a"), len(texts["a"]) - 1, texts["a"])
    for name, tokens in texts.items():
        found = cluster.attend(manager.get_row(name), len(tokens), query)
        torch.testing.assert_close(found, expected(tokens, query))
