# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule behind a short convolution, as in the linear layers of Qwen3-Next.

A layer keeps, for each sequence, the last inputs of a causal convolution and for each value head
a matrix S. A token's inputs pass the convolution and a SiLU and are then its keys, queries and
values. It turns S into S' = e S + b k (v - (e S)^T k)^T, with a decay e and a rate b of its own per
value head, and reads S'^T q / sqrt(key_dim); keys and queries have length 1. All is computed in
float32. S is rounded to the type that it is kept in after each token, not after each step: so, as
in recurrence.py, the bits of a token do not depend on how its sequence was cut.
Source: `torch_recurrent_gated_delta_rule` of transformers' Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvcore_runtime.attention.recurrence import States, walk
from kvcore_runtime.cache.layout import StatePart
from kvcore_runtime.errors import UnsupportedModelFile

EPSILON = 1e-6
"""Added to the squared length of a key or query before its root is taken."""


@attrs.frozen(kw_only=True)
class DeltaShape:
    """The shape of a layer. Value heads share key heads in equal parts.

    kernel_size: inputs that the convolution reads, the newest included. state_dtype: of S; None:
    the model's. Raises UnsupportedModelFile.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int
    state_dtype: torch.dtype | None = None

    def __attrs_post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            expected = f"a multiple of {self.num_key_heads}"
            raise UnsupportedModelFile(
                what="num_value_heads", value=self.num_value_heads, expected=expected
            )

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        """Inputs of the convolution that are queries, keys and values."""
        keys = self.num_key_heads * self.key_dim
        return (keys, keys, self.num_value_heads * self.value_dim)

    @property
    def output_size(self) -> int:
        """Numbers that a token reads from the states of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def projections(self) -> tuple[int, int, int, int]:
        """Widths of the joint projection: convolution, output gates, rates and decays."""
        return (sum(self.head_sizes), self.output_size, self.num_value_heads, self.num_value_heads)

    def parts(self, dtype: torch.dtype) -> tuple[StatePart, StatePart]:
        """Return the parts of a state: inputs of the convolution, then S. dtype: the model's."""
        heads = (self.num_value_heads, self.key_dim, self.value_dim)
        return (
            StatePart((self.kernel_size - 1, sum(self.head_sizes)), dtype),
            StatePart(heads, self.state_dtype or dtype),
        )


def advance_delta(
    states: States,
    query_lens: Sequence[int],
    num_drafts: Sequence[int],
    *,
    shape: DeltaShape,
    inputs: Tensor,
    rates: Tensor,
    decays: Tensor,
    kernel: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
) -> Tensor:
    """Advance states by the gated delta rule; a `Rule` once the rest is given.

    inputs: of the convolution, [T, sum(shape.head_sizes)]. rates: [T, num_value_heads], before the
    sigmoid. decays: alike; e is exp(-exp(decay_log) softplus(decays + decay_bias)). kernel:
    [shape.kernel_size, sum(shape.head_sizes)]. Returns [T, num_value_heads, value_dim] float32.
    Raises ShapeMismatch with another number of states.
    """
    weights, speed, bias = kernel.float(), decay_log.float().exp(), decay_bias.float()
    repeats = shape.num_value_heads // shape.num_key_heads

    def unit(vector: Tensor) -> Tensor:
        heads = vector.unflatten(0, (shape.num_key_heads, -1))
        length = heads.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
        repeated: Tensor = (heads * length).repeat_interleave(repeats, 0)
        return repeated.unsqueeze(-1)

    def step(state: States, token: int) -> Tensor:
        last, kept = state
        window = torch.cat((last, inputs[token : token + 1]))
        last.copy_(window[1:])
        mixed = functional.silu((window.float() * weights).sum(0))
        query, key, value = mixed.split(shape.head_sizes)
        q, k = unit(query), unit(key)
        decay = torch.exp(-speed * functional.softplus(decays[token].float() + bias))
        matrix = kept.float() * decay.view(-1, 1, 1)
        missing = value.view(shape.num_value_heads, -1) - (matrix * k).sum(1)
        matrix.add_(k * (missing * rates[token].float().sigmoid().unsqueeze(-1)).unsqueeze(1))
        kept.copy_(matrix)
        read: Tensor = (matrix * q).sum(1) * shape.key_dim**-0.5
        return read

    return walk(states, query_lens, num_drafts, step)
