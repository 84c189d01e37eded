# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: its formula, and the same bits however a sequence was cut and drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvcore_runtime.attention.delta_rule import EPSILON, DeltaShape, advance_delta
from kvcore_runtime.attention.recurrence import States
from kvcore_runtime.errors import ShapeMismatch, UnsupportedModelFile
from torch import Tensor
from torch.nn import functional

SHAPE = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=3, value_dim=5, kernel_size=4)
CHANNELS = sum(SHAPE.head_sizes)


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(9)
    return {
        "kernel": torch.randn(SHAPE.kernel_size, CHANNELS, generator=draw),
        "decay_log": torch.randn(SHAPE.num_value_heads, generator=draw) - 2,
        "decay_bias": torch.randn(SHAPE.num_value_heads, generator=draw),
    }


def inputs(num_tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return what one sequence's tokens give to the layer."""
    draw = torch.Generator().manual_seed(seed)
    widths = {"inputs": CHANNELS, "rates": SHAPE.num_value_heads, "decays": SHAPE.num_value_heads}
    return {
        name: torch.randn(num_tokens, width, generator=draw).to(dtype)
        for name, width in widths.items()
    }


def zeros(num_states: int, dtype: torch.dtype = torch.float32) -> States:
    return tuple(
        torch.zeros(num_states, *part.shape, dtype=part.dtype) for part in SHAPE.parts(dtype)
    )


def run(states: States, given: dict[str, Tensor], lens: list[int], drafts: list[int]) -> Tensor:
    return advance_delta(states, lens, drafts, shape=SHAPE, **given, **weights())


def test_a_token_decays_the_state_corrects_its_value_and_reads_it() -> None:
    given, states = inputs(6, 0), zeros(1)
    seen = run(states, given, [6], [0])
    own = {name: each.double() for name, each in (given | weights()).items()}
    padded = torch.cat([torch.zeros(3, CHANNELS).double(), own["inputs"]])
    memory = torch.zeros(SHAPE.num_value_heads, SHAPE.key_dim, SHAPE.value_dim).double()
    for token in range(6):
        window = padded[token : token + 4] * own["kernel"]
        query, key, value = functional.silu(window.sum(0)).split(SHAPE.head_sizes)
        bias = functional.softplus(own["decays"][token] + own["decay_bias"])
        for head in range(SHAPE.num_value_heads):
            q, k = (each.view(2, 3)[head // 2] for each in (query, key))
            q, k = (each / (each @ each + EPSILON) ** 0.5 for each in (q, k))
            decayed = memory[head] * torch.exp(-own["decay_log"][head].exp() * bias[head])
            missing = value.view(4, 5)[head] - decayed.T @ k
            rate = own["rates"][token, head].sigmoid()
            memory[head] = decayed + torch.outer(k, rate * missing)
            expected = memory[head].T @ q / 3**0.5
            torch.testing.assert_close(seen[token, head].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[0][0], given["inputs"][3:])
    torch.testing.assert_close(states[1][0].double(), memory, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_cuts_neighbours_and_drafts(dtype: torch.dtype) -> None:
    """The first sequence ends in two drafts, which leave states of their own."""
    given, other = inputs(9, 1, dtype), inputs(4, 2, dtype)
    whole, held, expected = zeros(1, dtype), [], []
    for token in range(9):
        row = {name: each[token : token + 1] for name, each in given.items()}
        expected.append(run(whole, row, [1], [0]))
        held.append(tuple(part.clone() for part in whole))
    alone = zeros(1, dtype)
    beside = run(alone, other, [4], [0])
    states = zeros(1, dtype)
    first = {name: each[:3] for name, each in given.items()}
    assert torch.equal(run(states, first, [3], [0]), torch.cat(expected[:3]))
    unread = tuple(torch.full_like(part, torch.nan).repeat_interleave(2, 0) for part in states)
    step = tuple(torch.cat(each) for each in zip(states, unread, zeros(1, dtype), strict=True))
    both: dict[str, Any] = {name: torch.cat([given[name][3:], other[name]]) for name in given}
    assert torch.equal(run(step, both, [6, 4], [2, 0]), torch.cat([*expected[3:], beside]))
    for found, *wanted in zip(step, *held[6:], alone, strict=True):
        assert torch.equal(found, torch.cat(wanted))


def test_wrong_numbers_of_states_and_of_heads_are_refused() -> None:
    for num_states in (1, 3):
        with pytest.raises(ShapeMismatch, match="states"):
            run(zeros(num_states), inputs(2, 0), [2], [1])
    with pytest.raises(UnsupportedModelFile, match="a multiple of 3"):
        DeltaShape(num_key_heads=3, num_value_heads=4, key_dim=1, value_dim=1, kernel_size=2)
