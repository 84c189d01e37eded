# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention: its formula, and the same bits however a sequence was cut and batched."""

from __future__ import annotations

import random

import pytest
import torch
from kvcore_runtime.attention.recurrence import GATE_ROOT, advance
from kvcore_runtime.errors import ShapeMismatch
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 8
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def inputs(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """Return queries, keys, values and gates of one sequence."""
    draw = torch.Generator().manual_seed(seed)
    counts = (HEADS, KV_HEADS, KV_HEADS, KV_HEADS)
    q, k, v, g = (torch.randn(num_tokens, count, SIZE, generator=draw) for count in counts)
    return q.to(dtype), k.to(dtype), v.to(dtype), g.to(dtype)


def run(
    states: Tensor, given: Inputs, query_lens: list[int], num_drafts: list[int] | None = None
) -> Tensor:
    """Advance states over a step of these inputs."""
    drafts = num_drafts or [0] * len(query_lens)
    q, k, v, gates = given
    return advance((states,), query_lens, drafts, q=q, k=k, v=v, gates=gates)


def zeros(num_sequences: int) -> Tensor:
    return torch.zeros(num_sequences, KV_HEADS, SIZE, SIZE)


def test_a_token_decays_the_state_adds_its_own_and_reads_it() -> None:
    q, k, v, g = (each.double() for each in inputs(5, 0))
    states = zeros(1)
    seen = run(states, (q, k, v, g), [5])
    for head in range(KV_HEADS):
        state = torch.zeros(SIZE, SIZE, dtype=torch.float64)
        for token in range(5):
            decay = torch.diag(torch.sigmoid(g[token, head]) ** (1 / GATE_ROOT))
            state = decay @ state + torch.outer(k[token, head], v[token, head])
            for reader in (2 * head, 2 * head + 1):
                expected = q[token, reader] @ state
                torch.testing.assert_close(seen[token, reader], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[0, head].double(), state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_how_sequences_are_cut_and_batched(dtype: torch.dtype) -> None:
    pick = random.Random(0)
    lengths = [13, 1, 30]
    given = [inputs(length, seed, dtype) for seed, length in enumerate(lengths)]
    whole = zeros(3)
    expected = [
        run(whole[index : index + 1], each, [length])
        for index, (each, length) in enumerate(zip(given, lengths, strict=True))
    ]
    done, states = [0, 0, 0], zeros(3)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        open_ = [index for index in range(3) if done[index] < lengths[index]]
        chosen = pick.sample(open_, pick.randint(1, len(open_)))
        counts = [pick.randint(1, lengths[index] - done[index]) for index in chosen]
        spans = [slice(done[i], done[i] + n) for i, n in zip(chosen, counts, strict=True)]
        q, k, v, g = (
            torch.cat([given[i][part][span] for i, span in zip(chosen, spans, strict=True)])
            for part in range(4)
        )
        held = states[chosen]
        seen = run(held, (q, k, v, g), counts).split(counts)
        states[chosen] = held
        for index, count, span, each in zip(chosen, counts, spans, seen, strict=True):
            assert torch.equal(each, expected[index][span])
            done[index] += count
    assert torch.equal(states, whole)


@pytest.mark.parametrize("num_known", [0, 1, 4])
def test_each_draft_leaves_a_state_of_its_own(num_known: int) -> None:
    """Two sequences, of which the first has drafts; their states have any content before."""
    given = [inputs(num_known + 3, 1), inputs(2, 2)]
    expected, whole, held = [], zeros(1), [zeros(1)]
    for token in range(num_known + 3):
        q, k, v, g = (each[token : token + 1] for each in given[0])
        expected.append(run(whole, (q, k, v, g), [1]))
        held.append(whole.clone())
    other = zeros(1)
    expected.append(run(other, given[1], [2]))
    states = torch.cat([zeros(1), torch.full_like(zeros(3), torch.nan), zeros(1)])
    q, k, v, g = (torch.cat(each) for each in zip(*given, strict=True))
    seen = run(states, (q, k, v, g), [num_known + 3, 2], [3, 0])
    assert torch.equal(seen, torch.cat(expected))
    assert torch.equal(states, torch.cat([*held[num_known:], other]))


def test_each_sequence_and_draft_needs_a_state() -> None:
    for num_states in (1, 3):
        with pytest.raises(ShapeMismatch, match="states"):
            run(zeros(num_states), inputs(2, 0), [2], [1])
