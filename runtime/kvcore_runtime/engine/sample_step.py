# SPDX-License-Identifier: Apache-2.0
"""From logits to answers: which sequences sample, which tokens they take, and when an answer ends.

The samples of a step are decided when it is planned, and drawn on the device of its logits, since
the next step may be computed from them before they are read. A sequence with drafts samples after
each of them and takes tokens up to the first that differs from the draft (drafts.py); an answer may
end among them, and takes no token after its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Row

import attrs
import torch
from torch import Tensor

from kvcore_runtime.engine.drafts import count_accepted
from kvcore_runtime.engine.scheduler import ScheduledChunk
from kvcore_runtime.engine.sequence import Completion, Sequence, derive_sampling
from kvcore_runtime.model.contiguous import Decode
from kvcore_runtime.model.sampling import Sampling, finish_reason


@attrs.frozen
class Draw:
    """A sequence that samples, its drafts, and the rows of logits of its newest positions.

    sample: index among the prompt's samples; one other than the sequence's begins with this token.
    place: of the first token in the answer. num_drops: of the sequence, when the step was planned.
    """

    sequence: Sequence
    drafts: tuple[int, ...]
    rows: range
    sample: int
    sampling: Sampling
    place: int
    num_drops: int

    @property
    def is_stale(self) -> bool:
        """Whether these tokens are no longer expected."""
        return self.sequence.is_gone or self.num_drops != self.sequence.num_drops


@attrs.frozen
class Taken:
    """What a sequence took: tokens, accepted drafts among them, and its answer if complete."""

    num_tokens: int
    num_accepted: int
    completion: Completion | None


def plan_draws(chunks: Iterable[ScheduledChunk]) -> list[Draw]:
    """Decide which sequences sample from which rows of logits; at a prompt's end, its other samples
    too.
    """
    draws = []
    row = 0
    for chunk in chunks:
        sequence, rows = chunk.sequence, range(row, row + chunk.num_wanted)
        row = rows.stop
        if not rows:
            continue
        place = len(sequence.generated) + sequence.num_to_come - 1
        first = Draw(
            sequence,
            chunk.drafts,
            rows,
            sequence.sample,
            sequence.sampling,
            place,
            sequence.num_drops,
        )
        draws.append(first)
        if place == 0 and sequence.sample == 0:
            draws += [
                attrs.evolve(
                    first, sample=sample, sampling=derive_sampling(sequence.request, sample)
                )
                for sample in range(1, sequence.request.num_samples)
            ]
    return draws


def split_tokens(draws: Row[Draw], tokens: Iterable[int]) -> Iterator[tuple[Draw, list[int]]]:
    """Split the concatenated tokens by draw."""
    drawn = iter(tokens)
    for each in draws:
        yield each, [next(drawn) for _ in each.rows]


def take_tokens(
    sequence: Sequence, draw: Draw, sampled: Row[int], logits: Tensor | None, decode: Decode | None
) -> Taken:
    """Give a sequence its accepted drafts and the token after them, up to the answer's end.

    sampled: one token per row. logits: to be kept, or None. decode: as in `Engine`.
    """
    completion = None
    num_right = count_accepted(draw.drafts, sampled)
    num_tokens = 0
    for row, token in zip(draw.rows, sampled[: num_right + 1], strict=False):
        sequence.generated.append(token)
        num_tokens += 1
        if logits is not None:
            sequence.logits.append(logits[row].clone())
        completion = _finished(sequence, decode)
        if completion is not None:
            break
    sequence.has_new_token = True
    return Taken(num_tokens, min(num_right, num_tokens), completion)


def _finished(sequence: Sequence, decode: Decode | None) -> Completion | None:
    """Return the answer, if the newest token ends it."""
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
