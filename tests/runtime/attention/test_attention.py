# SPDX-License-Identifier: Apache-2.0
"""Attention from blocks: bit for bit what contiguous keys give, and in invariant mode the same
bits however a sequence came to be: cut into steps, batched, shared, copied or moved.

Free blocks are NaN throughout, so that a read of anything a sequence does not own shows.
"""

import random
from typing import Any

import pytest
import torch
from kvcore_runtime.attention.attention import GroupedAttention, PagedAttention
from kvcore_runtime.attention.ragged import RaggedStep, heads_first
from kvcore_runtime.attention.read_plan import _parts, plan_reads
from kvcore_runtime.attention.visibility import Visibility
from kvcore_runtime.errors import ShapeMismatch, TooLong
from kvcore_runtime.model.contiguous import ContiguousAttention, ContiguousCache
from kvcore_runtime.model.model import Llama, tiny_model
from torch import Tensor

DTYPES = (torch.float32, torch.float64)
NUM_BLOCKS = 96


class Pool:
    """Blocks at random places, NaN where free; the bookkeeping is a list."""

    def __init__(self, model: Llama, block_size: int, seed: int) -> None:
        config = model.config
        shape = (NUM_BLOCKS, config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim)
        self.pages = torch.full(shape, float("nan"), dtype=model.dtype)
        self.block_size = block_size
        self.free = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(self.free)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pages[:, layer, 0], self.pages[:, layer, 1]

    def copy(self, block: int) -> int:
        target = self.free.pop()
        self.pages[target] = self.pages[block]
        return target

    def move(self, block: int) -> int:
        target = self.copy(block)
        self.pages[block] = float("nan")
        self.free.insert(0, block)
        return target


class Sequence:
    """Tokens, the blocks that hold them, and the logits seen so far by position."""

    def __init__(self, tokens: list[int], blocks: list[int] | None = None, computed: int = 0):
        self.tokens = tokens
        self.blocks = blocks or []
        self.computed = computed
        self.logits: dict[int, Tensor] = {}


def run_step(model: Llama, pool: Pool, work: list[tuple[Sequence, int]]) -> None:
    """Compute the next n tokens of each sequence, all in one forward."""
    size = pool.block_size
    token_ids = []
    for sequence, n in work:
        end = sequence.computed + n
        while len(sequence.blocks) * size < end:
            sequence.blocks.append(pool.free.pop())
        token_ids += sequence.tokens[sequence.computed : end]
    width = max(len(sequence.blocks) for sequence, _ in work) + 1
    tables = torch.zeros(len(work), width, dtype=torch.int32)
    for row, (sequence, _) in enumerate(work):
        tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
    plan = plan_reads(
        [n for _, n in work],
        [sequence.computed + n for sequence, n in work],
        block_size=size,
        width=width,
    )
    attention = PagedAttention(pool, plan, invariant=model.invariant).bind(tables)
    whole = GroupedAttention([attention], [(0, layer) for layer in range(model.config.num_layers)])
    logits = model.forward(torch.tensor(token_ids), attention.step.positions(), whole)
    row = 0
    for sequence, n in work:
        for position in range(sequence.computed, sequence.computed + n):
            sequence.logits[position] = logits[row]
            row += 1
        sequence.computed += n


def one_shot(model: Llama, tokens: list[int]) -> Tensor:
    """Compute the logits of all positions in one forward pass over one contiguous tensor."""
    cache = ContiguousCache(model.config, len(tokens), dtype=model.dtype)
    n = len(tokens)
    attention = ContiguousAttention(
        [cache], query_lens=[n], seq_lens=[n], invariant=model.invariant
    )
    return model.forward(torch.tensor(tokens), torch.arange(n), attention)


def some_tokens(draw: random.Random, num_tokens: int) -> list[int]:
    return [draw.randrange(256) for _ in range(num_tokens)]


def live_a_life(model: Llama, block_size: int, seed: int) -> list[Sequence]:
    """Run random lengths, chunks, batches, hits, forks with copy-on-write, and block moves."""
    draw = random.Random(seed)
    pool = Pool(model, block_size, seed)
    sequences = [Sequence(some_tokens(draw, draw.randint(1, 70))) for _ in range(3)]
    for _ in range(60):
        unfinished = [s for s in sequences if s.computed < len(s.tokens)]
        if not unfinished:
            break
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        longest = draw.choice((1, 1, 5, 40))
        work = [(s, draw.randint(1, min(longest, len(s.tokens) - s.computed))) for s in chosen]
        run_step(model, pool, work)
        parent = draw.choice(sequences)
        if len(sequences) < 7 and parent.computed:
            kept = draw.randint(1, parent.computed)
            full, part = divmod(kept, block_size)
            blocks = parent.blocks[:full] + ([pool.copy(parent.blocks[full])] if part else [])
            tail = some_tokens(draw, draw.randint(1, 30))
            sequences.append(Sequence(parent.tokens[:kept] + tail, blocks, kept))
        moved = draw.choice([b for s in sequences for b in s.blocks])
        target = pool.move(moved)
        for s in sequences:
            s.blocks = [target if b == moved else b for b in s.blocks]
    return sequences


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [3, 16, 20])
def test_invariant_logits_do_not_depend_on_how_a_sequence_came_to_be(
    dtype: torch.dtype, block_size: int
) -> None:
    model = tiny_model(1, dtype=dtype, invariant=True)
    for seed in range(4):
        for sequence in live_a_life(model, block_size, seed):
            expected = one_shot(model, sequence.tokens)
            for position, logits in sequence.logits.items():
                assert torch.equal(logits, expected[position]), (
                    f"seed {seed}, position {position} of {len(sequence.tokens)}"
                )


def test_plain_logits_stay_close_however_a_sequence_came_to_be() -> None:
    model = tiny_model(1, dtype=torch.float64)
    for seed in range(4):
        for sequence in live_a_life(model, 8, seed):
            expected = one_shot(model, sequence.tokens)[list(sequence.logits)]
            found = torch.stack(list(sequence.logits.values()))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def test_plain_mode_is_not_invariant() -> None:
    """The property above is not vacuous: without the mode, bits do depend on the batch."""
    model = tiny_model(1)
    tokens = some_tokens(random.Random(0), 40)
    sequence = Sequence(tokens)
    pool = Pool(model, 16, 0)
    for _ in tokens:
        run_step(model, pool, [(sequence, 1)])
    found = torch.stack([sequence.logits[position] for position in range(len(tokens))])
    assert not torch.equal(found, one_shot(model, tokens))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_blocks_give_the_bits_of_contiguous_tensors_step_by_step(
    dtype: torch.dtype, invariant: bool
) -> None:
    model = tiny_model(2, dtype=dtype, invariant=invariant)
    draw = random.Random(7)
    pool = Pool(model, 16, 3)
    sequences = [Sequence(some_tokens(draw, n)) for n in (37, 16, 5)]
    caches = [ContiguousCache(model.config, 37, dtype=dtype) for _ in sequences]
    for chunk in (9, 3, 1, 1, 20):
        before = [s.computed for s in sequences]
        lens = [min(chunk, len(s.tokens) - s.computed) for s in sequences]
        active = [i for i, n in enumerate(lens) if n]
        run_step(model, pool, [(sequences[i], lens[i]) for i in active])
        attention = ContiguousAttention(
            [caches[i] for i in active],
            query_lens=[lens[i] for i in active],
            seq_lens=[before[i] + lens[i] for i in active],
            invariant=invariant,
        )
        ids = [t for i in active for t in sequences[i].tokens[before[i] : before[i] + lens[i]]]
        expected = model.forward(torch.tensor(ids), attention.step.positions(), attention)
        spans = [(i, p) for i in active for p in range(before[i], before[i] + lens[i])]
        for row, (i, position) in enumerate(spans):
            assert torch.equal(sequences[i].logits[position], expected[row])


@pytest.mark.parametrize("invariant", [False, True])
def test_attention_is_softmax_of_scaled_products(invariant: bool) -> None:
    """It equals the formula written out, one query and head at a time."""
    torch.manual_seed(0)
    q = torch.randn(9, 4, 8, dtype=torch.float64)
    kv = [
        (torch.randn(s, 2, 8, dtype=torch.float64), torch.randn(s, 2, 8, dtype=torch.float64))
        for s in (20, 4)
    ]
    step = RaggedStep(query_lens=(5, 4), seq_lens=(20, 4), invariant=invariant)
    seen = step.attend(q, [(heads_first(keys), heads_first(values)) for keys, values in kv])
    assert step.positions().tolist() == [15, 16, 17, 18, 19, 0, 1, 2, 3]
    assert step.last_rows().tolist() == [4, 8]
    for row, position in enumerate(step.positions().tolist()):
        keys, values = kv[0] if row < 5 else kv[1]
        for head in range(4):
            scores = keys[: position + 1, head // 2] @ q[row, head] / 8**0.5
            expected = scores.softmax(0) @ values[: position + 1, head // 2]
            torch.testing.assert_close(seen[row, head], expected)


@pytest.mark.parametrize("invariant", [False, True])
def test_other_content_of_the_last_block_is_never_read(invariant: bool) -> None:
    model = tiny_model(3, invariant=invariant)
    pool = Pool(model, 16, 0)
    sequence = Sequence(some_tokens(random.Random(1), 18))
    run_step(model, pool, [(sequence, 18)])
    assert pool.pages[sequence.blocks[1], :, :, 2:].isnan().all()
    assert torch.stack(list(sequence.logits.values())).isfinite().all()


def test_a_block_that_was_taken_away_shows_as_nan() -> None:
    model = tiny_model(3)
    pool = Pool(model, 16, 0)
    sequence = Sequence(some_tokens(random.Random(1), 33))
    run_step(model, pool, [(sequence, 32)])
    pool.move(sequence.blocks[0])
    run_step(model, pool, [(sequence, 1)])
    assert sequence.logits[32].isnan().all()


def test_steps_that_do_not_fit_together_are_refused() -> None:
    model = tiny_model(0)
    pool = Pool(model, 4, 0)

    def step(tables: Tensor, queries: list[int], lens: list[int]) -> None:
        PagedAttention(pool, plan_reads(queries, lens, block_size=4, width=2)).bind(tables)

    one_row = torch.zeros(1, 2, dtype=torch.int32)
    step(one_row, [3], [8])
    with pytest.raises(ShapeMismatch, match=r"block_tables has shape \(1, 2\), expected \(1, 3\)"):
        step(one_row, [3], [9])
    with pytest.raises(ShapeMismatch, match=r"block_tables has shape \(1, 2\), expected \(2, 2\)"):
        step(one_row, [1, 1], [1, 1])
    with pytest.raises(ShapeMismatch, match=r"queries of 0 has shape \(0,\)"):
        step(one_row, [0], [8])
    with pytest.raises(ShapeMismatch, match="seq_lens"):
        step(one_row, [1], [1, 2])
    with pytest.raises(TooLong, match="sequence 0 needs 3 positions, there are 2"):
        step(one_row, [3], [2])


def test_sequences_are_gathered_in_parts_of_bounded_size() -> None:
    spans = [range(2), range(1, 2), range(3), range(5), range(2, 3)]
    parts = _parts(spans, 3)
    assert parts == [spans[:2], [spans[2]], [spans[3]], [spans[4]]]
    assert _parts(spans, 99) == [spans]
    assert _parts([], 3) == []


def test_a_plan_says_which_slots_of_a_part_are_whose() -> None:
    """In blocks of 4, a query at position 6 sees 3 keys from 4 on, one at 9 those from 7 on."""
    window = Visibility(kind="sliding_window", window=3)
    arguments: dict[str, Any] = {"block_size": 4, "width": 3, "visibility": window}
    plan = plan_reads([1, 1], [7, 10], **arguments)
    assert plan.parts == ((3, (0, 3, 1 + 3, 3, 2)),)
    assert plan_reads([1, 1], [7, 10], num_blocks_max=1, **arguments).parts == (
        (1, (0, 3, 1)),
        (2, (3, 3, 2)),
    )
    assert sum(plan.number_sizes) == len(plan.numbers)
