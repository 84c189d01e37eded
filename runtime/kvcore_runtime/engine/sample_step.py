# SPDX-License-Identifier: Apache-2.0
"""From logits to answers: who samples, what a sequence takes of it, and when its answer is done.

A sequence with drafts samples behind each of them and takes tokens up to the first that is
not the draft (drafts.py); an answer may end among them, and takes no token behind its end.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from typing import NamedTuple

import torch
from torch import Tensor

from kvcore_runtime.engine.drafts import count_accepted
from kvcore_runtime.engine.sequence import Completion, Sequence
from kvcore_runtime.model.contiguous import Decode
from kvcore_runtime.model.sampling import finish_reason, sample


class Sampler(NamedTuple):
    """A sequence that samples, its drafts, and the rows of logits behind its newest positions."""

    sequence: Sequence
    drafts: tuple[int, ...]
    rows: range


class Taken(NamedTuple):
    """What a sequence took: tokens, drafts among them, and its answer if that is done."""

    num_tokens: int
    num_accepted: int
    completion: Completion | None


def draw_tokens(samplers: Row[Sampler], logits: Tensor) -> list[list[int]]:
    """Sample a token for each row of each sampler, all in one call."""
    rows = [row for each in samplers for row in each.rows]
    if not rows:
        return []
    tokens = sample(
        logits[torch.tensor(rows, device=logits.device)],
        [each.sequence.sampling for each in samplers for _ in each.rows],
        [
            len(each.sequence.generated) + place
            for each in samplers
            for place in range(len(each.rows))
        ],
    )
    drawn = iter(tokens)
    return [[next(drawn) for _ in each.rows] for each in samplers]


def take_tokens(
    sampler: Sampler, sampled: Row[int], logits: Tensor | None, decode: Decode | None
) -> Taken:
    """Give a sequence the drafts that were right and the token behind them, up to its end.

    sampled: a token a row. logits: to be kept, None if not. decode: as of `Engine`.
    """
    sequence, completion = sampler.sequence, None
    num_right = count_accepted(sampler.drafts, sampled)
    num_tokens = 0
    for row, token in zip(sampler.rows, sampled[: num_right + 1], strict=False):
        sequence.generated.append(token)
        num_tokens += 1
        if logits is not None:
            sequence.logits.append(logits[row].clone())
        completion = _finished(sequence, decode)
        if completion is not None:
            break
    sequence.pending = True
    return Taken(num_tokens, min(num_right, num_tokens), completion)


def _finished(sequence: Sequence, decode: Decode | None) -> Completion | None:
    """The answer, if the newest token ends it."""
    generated = sequence.generated
    text = decode(generated) if decode is not None and sequence.sampling.stop else ""
    reason = finish_reason(sequence.sampling, generated, text)
    if reason is None:
        return None
    return Completion(
        request_id=sequence.request.request_id,
        sample=sequence.sample,
        tokens=tuple(generated),
        reason=reason,
        logits=torch.stack(sequence.logits) if sequence.logits else None,
    )
