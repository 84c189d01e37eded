# SPDX-License-Identifier: Apache-2.0
"""Gated linear attention: layers that keep one state for the whole prefix, not keys and values.

The state of a head is a matrix S in float32. A token turns it into diag(g) S + k v^T, with a gate g
of its own, and reads q S from the result. Tokens are computed one after another, each by the same
operations on tensors of the same shape. So their bits depend neither on how a sequence was cut into
steps, nor on the rest of the batch, in either mode of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcore_runtime.attention.read_plan import ReadPlan
from kvcore_runtime.errors import ShapeMismatch

GATE_ROOT = 16
"""Gates are this root of a sigmoid: close to 1, so that a state remembers many tokens."""


class PagedStates:
    """The layers of one group of states in one step; created for each step.

    A sequence's block holds the state before the step, put there by the batch's commands, and is
    overwritten by the state after it; if the step ends in drafts, by the state before them, and the
    blocks after it get the states after each draft. Needs the interface of `PagedAttention`.
    """

    def __init__(self, states: Tensor, plan: ReadPlan, numbers: Sequence[Tensor]) -> None:
        """states: [num_blocks, num_layers, num_kv_heads, head_dim, head_dim] float32. plan: one
        block per sequence, and one per draft. numbers: the plan's numbers on the device, split as
        by `number_sizes`.
        """
        self._states = states
        self._plan = plan
        entries, self.positions, _ = numbers
        self._entries = entries[len(self.positions) :]

    def bind(self, block_tables: Tensor) -> PagedStates:
        """Set the block tables; return self. See `PagedAttention.bind`."""
        places = self._entries.to(block_tables.device)
        found = block_tables.view(-1).index_select(0, places)
        self._blocks = found.to(self._states.device, torch.int64)
        return self

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None = None
    ) -> Tensor:
        """Advance the sequences' states in this layer over the step's tokens. See `Attention`."""
        states = self._states[:, layer]
        held = states.index_select(0, self._blocks)
        plan = self._plan
        seen = advance(held, q, k, v, gates, plan.query_lens, plan.num_drafts)
        states.index_copy_(0, self._blocks, held)
        return seen


def advance(
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor | None,
    query_lens: Sequence[int],
    num_drafts: Sequence[int] | None = None,
) -> Tensor:
    """Advance each sequence's state over its tokens of a step; return what their queries read.

    num_drafts: of each sequence's last tokens; default: none. states: [num_seqs + all drafts,
    num_kv_heads, head_dim, head_dim] float32, contiguous, changed in place: the state of a
    sequence, then those after each of its drafts, whose content before is not read. q:
    [T, num_heads, head_dim]; k, v, gates: [T, num_kv_heads, head_dim], gates before the sigmoid.
    Returns a tensor like q. Raises ShapeMismatch without gates, or with
    another number of states.
    """
    if gates is None:
        raise ShapeMismatch(name="gates", expected=k.shape, actual=())
    num_heads = k.shape[1]
    queries = q.float().unflatten(1, (num_heads, -1)).unsqueeze(-1)
    keys, values = k.float().unsqueeze(-1), v.float().unsqueeze(-2)
    logits = gates.float().unsqueeze(-1)
    drafts = [0] * len(query_lens) if num_drafts is None else num_drafts
    if len(states) != (expected := len(query_lens) + sum(drafts)):
        raise ShapeMismatch(name="states", expected=(expected,), actual=(len(states),))
    seen, token, rest = [], 0, iter(states)
    for query_len, count in zip(query_lens, drafts, strict=True):
        state = next(rest)
        for number in range(query_len):
            if number >= query_len - count:
                state = next(rest).copy_(state)
            state.mul_(logits[token].sigmoid().pow_(1 / GATE_ROOT))
            state.add_(keys[token] * values[token])
            seen.append((queries[token] * state.unsqueeze(1)).sum(2))
            token += 1
    return torch.stack(seen).flatten(1, 2).to(q.dtype)
