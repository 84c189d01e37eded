# SPDX-License-Identifier: Apache-2.0
"""Layers that keep one state for the whole prefix, not keys and values: gated linear attention.

The state of a head is a matrix S in float32. A token turns it into diag(g) S + k v^T, with a gate g
of its own, and reads q S from the result. Tokens are computed one after another, each by the same
operations on tensors of the same shape. So their bits depend neither on how a sequence was cut into
steps, nor on the rest of the batch, in either mode of the model. Another rule is that of delta
nets (delta_rule.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kvcore_runtime.attention.read_plan import ReadPlan
from kvcore_runtime.errors import ShapeMismatch

GATE_ROOT = 16
"""Gates are this root of a sigmoid: close to 1, so that a state remembers many tokens."""

States: TypeAlias = tuple[Tensor, ...]
"""The parts of the states of a step, each [num_seqs + all drafts, *shape of the part]: the state of
a sequence, then those after each of its drafts, whose content before is not read.
"""
Rule: TypeAlias = Callable[[States, Sequence[int], Sequence[int]], Tensor]
"""Advances states in place over a step. Its arguments are the states, the number of new tokens of
each sequence, and how many of these are drafts; it returns what the tokens read.
"""


class PagedStates:
    """The layers of one group of states in one step; created for each step.

    A sequence's block holds the state before the step, put there by the batch's commands, and is
    overwritten by the state after it; if the step ends in drafts, by the state before them, and the
    blocks after it get the states after each draft. Needs the interface of `PagedAttention`.
    """

    def __init__(self, states: States, plan: ReadPlan, numbers: Sequence[Tensor]) -> None:
        """states: the parts, each [num_blocks, num_layers, *shape]. plan: one block per sequence,
        and one per draft. numbers: the plan's numbers on the device, split as by `number_sizes`.
        """
        self._states = states
        self._plan = plan
        entries, self.positions, _ = numbers
        self._entries = entries[len(self.positions) :]

    def bind(self, block_tables: Tensor) -> PagedStates:
        """Set the block tables; return self. See `PagedAttention.bind`."""
        places = self._entries.to(block_tables.device)
        found = block_tables.view(-1).index_select(0, places)
        self._blocks = found.to(self._states[0].device, torch.int64)
        return self

    def recur(self, layer: int, like: Tensor, rule: Rule) -> Tensor:
        """Advance the sequences' states in this layer over the step's tokens. See `Attention`."""
        del like
        parts = [each[:, layer] for each in self._states]
        held = tuple(each.index_select(0, self._blocks) for each in parts)
        seen = rule(held, self._plan.query_lens, self._plan.num_drafts)
        for part, each in zip(parts, held, strict=True):
            part.index_copy_(0, self._blocks, each)
        return seen


def advance(
    states: States,
    query_lens: Sequence[int],
    num_drafts: Sequence[int],
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
) -> Tensor:
    """Advance states of gated linear attention; a `Rule` once q, k, v and gates are given.

    states: one part, [num_kv_heads, head_dim, head_dim] float32. q: [T, num_heads, head_dim]; k, v,
    gates: [T, num_kv_heads, head_dim], gates before the sigmoid. Returns a tensor like q. Raises
    ShapeMismatch with another number of states.
    """
    num_heads = k.shape[1]
    queries = q.float().unflatten(1, (num_heads, -1)).unsqueeze(-1)
    keys, values = k.float().unsqueeze(-1), v.float().unsqueeze(-2)
    logits = gates.float().unsqueeze(-1)

    def step(state: States, token: int) -> Tensor:
        (matrix,) = state
        matrix.mul_(logits[token].sigmoid().pow_(1 / GATE_ROOT))
        matrix.add_(keys[token] * values[token])
        read: Tensor = (queries[token] * matrix.unsqueeze(1)).sum(2)
        return read

    return walk(states, query_lens, num_drafts, step).flatten(1, 2).to(q.dtype)


def walk(
    states: States,
    query_lens: Sequence[int],
    num_drafts: Sequence[int],
    step: Callable[[States, int], Tensor],
) -> Tensor:
    """Advance states token by token. step: changes a sequence's state in place by the token of this
    number, and returns what it reads. Returns all that was read, [T, ...]. Raises ShapeMismatch
    with another number of states.
    """
    expected = len(query_lens) + sum(num_drafts)
    if {len(part) for part in states} != {expected}:
        actual = [len(part) for part in states]
        raise ShapeMismatch(name="states", expected=[expected] * len(states), actual=actual)
    seen, token, rest = [], 0, zip(*states, strict=True)
    for query_len, count in zip(query_lens, num_drafts, strict=True):
        state = next(rest)
        for number in range(query_len):
            if number >= query_len - count:
                before, state = state, next(rest)
                for part, old in zip(state, before, strict=True):
                    part.copy_(old)
            seen.append(step(state, token))
            token += 1
    return torch.stack(seen)
