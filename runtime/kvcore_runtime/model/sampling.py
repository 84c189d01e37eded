# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token, and knowing when to stop.

The random number for the i-th token of a request is a function of the request's seed and i
alone. So neither batching, nor preemption, nor the order of requests changes what is sampled.
"""

import enum
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvcore_runtime.errors import InvalidSampling, ShapeMismatch

_WORD = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class FinishReason(enum.Enum):
    """Why a request stopped generating."""

    END = "end"  # the model ended its answer
    STOP = "stop"  # a stop string appeared
    LENGTH = "length"  # max_tokens, or the model's maximum length


@attrs.frozen(kw_only=True)
class Sampling:
    """How one request samples.

    temperature 0 is greedy. top_k 0 and top_p 1 cut nothing. end_ids end an answer and are
    part of the generated tokens; stop strings end it as soon as the text contains one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 64
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        _require("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 or more")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")
        _require("stop", self.stop, all(self.stop), "strings that are not empty")


def sample(logits: Tensor, samplings: Sequence[Sampling], indices: Sequence[int]) -> list[int]:
    """Choose one token for each row. Arguments as for `draw`."""
    tokens: list[int] = draw(logits, samplings, indices).tolist()
    return tokens


def draw(logits: Tensor, samplings: Sequence[Sampling | None], indices: Sequence[int]) -> Tensor:
    """Choose one token for each row, [n] int64 on the logits' device.

    logits: [n, vocab]. samplings: None for greedy. indices: number of tokens that each request has
    generated before. Greedy rows are taken together; others go one by one, in fp64 on the CPU.
    Raises ShapeMismatch.
    """
    if not len(samplings) == len(indices) == logits.shape[0]:
        raise ShapeMismatch(
            name="logits", expected=(len(samplings), len(indices)), actual=logits.shape
        )
    tokens = logits.argmax(dim=-1)
    if not any(samplings):
        return tokens
    for row, (sampling, index) in enumerate(zip(samplings, indices, strict=True)):
        if sampling is not None and sampling.temperature > 0:
            tokens[row] = _draw(logits[row], sampling, uniform(sampling.seed, index))
    return tokens


def finish_reason(
    sampling: Sampling, generated: Sequence[int], text: str = ""
) -> FinishReason | None:
    """Return why a request ends after its newest token, or None. text: everything generated,
    decoded.
    """
    if generated and generated[-1] in sampling.end_ids:
        return FinishReason.END
    if any(stop in text for stop in sampling.stop):
        return FinishReason.STOP
    if len(generated) >= sampling.max_tokens:
        return FinishReason.LENGTH
    return None


def cut_at_stop(sampling: Sampling, text: str) -> str:
    """Return the text before the first stop string in it, all of it if there is none."""
    starts = [start for stop in sampling.stop if (start := text.find(stop)) >= 0]
    return text[: min(starts)] if starts else text


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) at an index of a seed's stream; no state is kept.

    SplitMix64 (Steele, Lea and Flood 2014), the seed mixed first so that similar seeds give
    different streams.
    """
    return (_mix(_mix(seed) + (index + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def derive_seed(seed: int, sample_index: int) -> int:
    """Return the seed of one of several samples of a prompt; sample 0 keeps the prompt's seed."""
    return seed if sample_index == 0 else _mix(_mix(seed) ^ _mix(sample_index + _GOLDEN_GAMMA))


def _mix(word: int) -> int:
    word = (word + _GOLDEN_GAMMA) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def _draw(logits: Tensor, sampling: Sampling, number: float) -> int:
    """Invert the cumulative distribution at number, likeliest token first."""
    exact = logits.to("cpu", torch.float64)
    # The softmax is taken of the distances from the maximum, which do not overflow at small
    # temperatures.
    scaled = (exact - exact.max()) / sampling.temperature
    ordered, token_ids = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered = ordered[: sampling.top_k]
    cumulative = ordered.softmax(dim=0).cumsum(dim=0)
    if sampling.top_p < 1:
        kept = int((cumulative < sampling.top_p).sum()) + 1
        cumulative = cumulative[:kept]
    place = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    return int(token_ids[min(place, cumulative.shape[0] - 1)])


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InvalidSampling(name=name, value=value, expected=expected)
