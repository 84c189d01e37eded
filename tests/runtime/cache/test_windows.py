# SPDX-License-Identifier: Apache-2.0
"""Windows: the keys that a query sees; nothing before them is read, from blocks at random
places.

Blocks behind the window are given back at once here: their content is NaN and the table names the
null block, NaN too. Expected values come from one contiguous tensor with the full history.
"""

import random

import pytest
import torch
from kvcore_runtime.attention.attention import GroupedAttention, PagedAttention
from kvcore_runtime.attention.ragged import RaggedStep, heads_first
from kvcore_runtime.attention.read_plan import plan_reads
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.layer_groups import make_groups, place_layers
from kvcore_runtime.errors import UnsupportedModelFile
from kvcore_runtime.model.model import Llama, tiny_config, tiny_model
from torch import Tensor

from kvcore import Group
from kvcore.types.groups import skipped_tokens
from tests.runtime.attention.test_attention import one_shot

NUM_BLOCKS = 64
KINDS = [
    FULL,
    Visibility(kind="sliding_window", window=1),
    Visibility(kind="sliding_window", window=7),
    Visibility(kind="sliding_window", window=24),
    Visibility(kind="chunked_local", window=3),
    Visibility(kind="chunked_local", window=10),
    Visibility(kind="chunked_local", window=16),
]


class Sequence:
    """Tokens, their table in one group, and which positions are computed."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.table: list[int] = []
        self.computed = 0
        self.logits: list[Tensor] = []


class Pool:
    """Blocks of a model whose layers all see alike; block 0 is the null block."""

    def __init__(self, model: Llama, block_size: int, seed: int) -> None:
        config = model.config
        shape = (NUM_BLOCKS, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.pages = torch.full(shape, float("nan"), dtype=model.dtype)
        self.model = model
        self.block_size = block_size
        self.visibility = config.layer_visibilities[0]
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(seed).shuffle(self.free)
        self.num_read = 0

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pages[:, layer, 0], self.pages[:, layer, 1]

    def drop(self, sequence: Sequence) -> None:
        """Give back the blocks that no later query sees."""
        first = self.visibility.first_seen(sequence.computed) // self.block_size
        for position in range(min(first, len(sequence.table))):
            if block := sequence.table[position]:
                self.pages[block] = float("nan")
                self.free.insert(0, block)
                sequence.table[position] = 0

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute the next n tokens of each sequence, all in one forward."""
        token_ids = []
        for sequence, n in work:
            self.drop(sequence)
            end = sequence.computed + n
            while len(sequence.table) * self.block_size < end:
                sequence.table.append(self.free.pop())
            token_ids += sequence.tokens[sequence.computed : end]
        width = max(len(sequence.table) for sequence, _ in work)
        rows = [sequence.table + [0] * (width - len(sequence.table)) for sequence, _ in work]
        plan = plan_reads(
            [n for _, n in work],
            [sequence.computed + n for sequence, n in work],
            block_size=self.block_size,
            width=width,
            visibility=self.visibility,
        )
        attention = PagedAttention(
            self, plan, invariant=self.model.invariant, visibility=self.visibility
        )
        attention.bind(torch.tensor(rows))
        self.num_read = plan.num_blocks
        positions = attention.positions
        places = [(0, layer) for layer in range(self.model.config.num_layers)]
        whole = GroupedAttention([attention], places)
        logits = self.model.forward(torch.tensor(token_ids), positions, whole)
        for (sequence, n), part in zip(
            work, torch.split(logits, [n for _, n in work]), strict=True
        ):
            sequence.logits += list(part)
            sequence.computed += n


def make_model(visibility: Visibility, *, invariant: bool, dtype: torch.dtype) -> Llama:
    config = tiny_config(visibilities=(visibility, visibility))
    return tiny_model(config=config, invariant=invariant, dtype=dtype)


@pytest.mark.parametrize("visibility", KINDS, ids=str)
def test_a_mask_shows_what_is_from_the_first_seen_to_the_query(visibility: Visibility) -> None:
    mask = visibility.mask(range(50), range(50), torch.device("cpu"))
    for query in range(50):
        seen = mask[query].nonzero().view(-1).tolist()
        assert seen == list(range(visibility.first_seen(query), query + 1))


@pytest.mark.parametrize("visibility", KINDS, ids=str)
def test_a_layer_sees_exactly_what_its_group_keeps(visibility: Visibility) -> None:
    group = Group(16, kind=visibility.kind, window=visibility.window)
    for position in range(60):
        assert visibility.first_seen(position) == skipped_tokens(group, position)


@pytest.mark.parametrize("visibility", KINDS, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize(
    ("invariant", "dtype"),
    [(True, torch.float32), (True, torch.float64), (False, torch.float64)],
    ids=["invariant fp32", "invariant fp64", "plain"],
)
def test_paged_windows_equal_the_full_history_masked(
    visibility: Visibility, block_size: int, invariant: bool, dtype: torch.dtype
) -> None:
    """They are equal however the sequences are cut into steps and batched."""
    model = make_model(visibility, invariant=invariant, dtype=dtype)
    draw = random.Random(block_size)
    pool = Pool(model, block_size, seed=block_size)
    lengths = [3, 40, 61] if block_size > 1 else [3, 20, 30]
    sequences = [Sequence([draw.randrange(256) for _ in range(length)]) for length in lengths]
    while any(each.computed < len(each.tokens) for each in sequences):
        unfinished = [each for each in sequences if each.computed < len(each.tokens)]
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        pool.step(
            [(each, draw.randint(1, min(19, len(each.tokens) - each.computed))) for each in chosen]
        )
    for each in sequences:
        logits, expected = torch.stack(each.logits), one_shot(model, each.tokens)
        if invariant:
            assert torch.equal(logits, expected)
        else:
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("visibility", KINDS, ids=str)
@pytest.mark.parametrize("invariant", [True, False])
def test_attention_is_the_softmax_over_what_each_query_sees(
    visibility: Visibility, invariant: bool
) -> None:
    """This is computed by definition, query by query; keys before the first seen may be missing."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, 45, 2, 4, generator=generator, dtype=torch.float64)
    step = RaggedStep(
        query_lens=(13, 1), seq_lens=(45, 30), invariant=invariant, visibility=visibility
    )
    firsts = step.first_keys
    keys_values = [
        (heads_first(k[first:end]), heads_first(v[first:end]))
        for first, end in zip(firsts, (45, 30), strict=True)
    ]
    seen = step.attend(torch.cat((q[32:45], q[29:30])), keys_values)
    for row, position in enumerate([*range(32, 45), 29]):
        keys = slice(visibility.first_seen(position), position + 1)
        scores = torch.einsum("hd,khd->hk", q[position], k[keys]) / 2.0  # sqrt of head_dim 4
        expected = torch.einsum("hk,khd->hd", scores.softmax(dim=1), v[keys])
        torch.testing.assert_close(seen[row], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("invariant", [True, False])
def test_windows_change_what_the_model_says(invariant: bool) -> None:
    """Otherwise the tests above would hold for a runtime that ignores windows."""
    tokens = list(range(40))
    said = [
        one_shot(make_model(kind, invariant=invariant, dtype=torch.float64), tokens)
        for kind in KINDS
    ]
    for index, logits in enumerate(said):
        for other in said[index + 1 :]:
            same = torch.isclose(logits, other, rtol=0, atol=1e-9).all(dim=1)
            assert not same.all()


def test_a_step_reads_only_the_blocks_that_its_queries_see() -> None:
    sliding = Visibility(kind="sliding_window", window=9)
    pool = Pool(make_model(sliding, invariant=False, dtype=torch.float32), 4, seed=1)
    sequence = Sequence(list(range(60)))
    pool.step([(sequence, 40)])
    assert pool.num_read == 10
    pool.step([(sequence, 1)])
    assert pool.num_read == 3  # positions 32 to 40 of blocks 8, 9 and 10
    pool.step([(sequence, 2)])
    assert pool.num_read == 3  # positions 33 to 42
    pool.step([(sequence, 2)])
    assert pool.num_read == 4  # positions 35 to 44
    assert [block for block in sequence.table if block] == sequence.table[-4:]


@pytest.mark.parametrize(
    ("kind", "window"),
    [("sliding_window", 0), ("chunked_local", None), ("full_attention", 4), ("mla", None)],
)
def test_windows_that_mean_nothing_are_refused(kind: str, window: int | None) -> None:
    with pytest.raises(UnsupportedModelFile, match=r"(window|kind) is"):
        Visibility(kind=kind, window=window)  # type: ignore[arg-type]  # what a caller may pass


def test_layers_are_split_into_the_fewest_groups_of_equal_counts() -> None:
    sliding = Visibility(kind="sliding_window", window=8)
    seen = (sliding, sliding, FULL, sliding, sliding, FULL)
    groups = make_groups(seen, 4)
    assert [(each.kind, each.window) for each in groups] == [
        ("sliding_window", 8),
        ("sliding_window", 8),
        ("full_attention", None),
    ]
    placed = place_layers(seen, groups)
    assert [(each.group_id, each.layer) for each in placed.places] == [
        (0, 0), (0, 1), (2, 0), (1, 0), (1, 1), (2, 1)
    ]  # fmt: skip
    assert placed.num_layers == (2, 2, 2)
    assert placed.kept == (sliding, sliding, FULL)
    together = place_layers(seen, (Group(4),))
    assert [each.layer for each in together.places] == list(range(6))
    assert [each.visibility for each in together.places] == list(seen)
