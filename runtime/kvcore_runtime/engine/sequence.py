# SPDX-License-Identifier: Apache-2.0
"""An engine's requests, their sequences, and their answers.

A request asks for one or more samples of an answer; each sample is a separate sequence. Only the
manager knows which tokens of a sequence are computed, and where they are.
"""

from numbers import Integral
from typing import NoReturn

import attrs
from torch import Tensor

from kvcore import Request
from kvcore_runtime.errors import InvalidRequest, InvalidSampling
from kvcore_runtime.model.sampling import FinishReason, Sampling, derive_seed


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """A prompt as token ids, at least one, and how to answer it.

    num_samples: how many answers; each draws from a stream of its own (`derive_seed`). cache_salt:
    only requests of the same salt share blocks, wherever these are kept. answered: tokens of the
    one answer that another engine has sampled; they come first among its tokens. Raises
    InvalidRequest, InvalidSampling.
    """

    request_id: str
    prompt: tuple[int, ...] = attrs.field(converter=tuple[int, ...])
    sampling: Sampling = attrs.field(factory=Sampling)
    num_samples: int = 1
    cache_salt: str | None = None
    answered: tuple[int, ...] = attrs.field(default=(), converter=tuple[int, ...])

    def __attrs_post_init__(self) -> None:
        if not self.prompt:
            self._refuse("prompt", self.prompt, "at least one token")
        for token in (*self.prompt, *self.answered):
            if not isinstance(token, Integral) or token < 0:
                self._refuse("token", token, "an integer of at least 0")
        if self.cache_salt is not None and not (self.cache_salt and type(self.cache_salt) is str):
            self._refuse("cache_salt", self.cache_salt, "None or a text that is not empty")
        if self.num_samples < 1:
            raise InvalidSampling(name="num_samples", value=self.num_samples, expected="1 or more")
        if self.answered and self.num_samples > 1:
            expected = "1, since tokens of one answer are given"
            raise InvalidSampling(name="num_samples", value=self.num_samples, expected=expected)
        if len(self.answered) >= max(1, self.sampling.max_tokens):
            expected = f"more than the {len(self.answered)} tokens that are given"
            raise InvalidSampling(
                name="max_tokens", value=self.sampling.max_tokens, expected=expected
            )

    def _refuse(self, name: str, value: object, expected: str) -> NoReturn:
        raise InvalidRequest(name=name, request=self.request_id, value=value, expected=expected)


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """One finished answer. logits: [len(tokens), vocab], of engines that keep them."""

    request_id: str
    sample: int
    tokens: tuple[int, ...]
    reason: FinishReason
    logits: Tensor | None = None


class Sequence:
    """One unfinished sample of a request.

    arrival: number of the request's arrival; the lower, the older. row: in the manager.
    has_new_token: the newest token was sampled but not yet given to the manager; sampled_by: the
    batch that sampled it. num_to_come: tokens that pending batches sample. num_drops: how often
    such tokens were dropped; tokens of a batch planned before are not taken. is_gone: it is
    finished or aborted, so what a batch in flight computes of it is wasted. num_reused:
    prompt tokens that were cached when it was first admitted.
    """

    def __init__(
        self, request: GenerationRequest, *, arrival: int, row: int, sample: int = 0
    ) -> None:
        self.request = request
        self.sample = sample
        self.sequence_id = name_sequence(request, sample)
        self.age = (arrival, sample)
        self.row = row
        self.sampling = derive_sampling(request, sample)
        self.generated = list(request.answered)
        self.has_new_token = False
        self.sampled_by: int | None = None
        self.num_to_come = 0
        self.num_drops = 0
        self.is_gone = False
        self.num_reused = 0
        self.logits: list[Tensor] = []

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens, including the new one."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def newest(self) -> int:
        """The token sampled last."""
        return self.generated[-1]

    @property
    def can_decode(self) -> bool:
        """Whether its next position can be planned, of the new token or of one to come.

        The last token of an answer gets no position.
        """
        num_planned = len(self.generated) + self.num_to_come
        can_go_on = self.has_new_token or self.num_to_come > 0
        return can_go_on and num_planned < self.sampling.max_tokens

    def give(self) -> None:
        """Note that the manager has the new token now."""
        self.has_new_token, self.sampled_by = False, None

    def drop_output(self) -> None:
        """Drop the tokens to come, which are sampled again."""
        self.num_to_come = 0
        self.num_drops += 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the token ids at positions [start, end)."""
        length = len(self.request.prompt)
        if start >= length:
            return self.generated[start - length : end - length]
        return [*self.request.prompt[start:end], *self.generated[: max(0, end - length)]]


def name_sequence(request: GenerationRequest, sample: int = 0) -> str:
    """Return the manager's request id for a sample, which no other request's sample has: the
    request's own if it has only one sample, and no `#` in it.
    """
    name = request.request_id
    if request.num_samples > 1:
        return f"{name}#{sample}"
    return f"{name}#" if "#" in name else name


def derive_sampling(request: GenerationRequest, sample: int) -> Sampling:
    """Return the sampling of one of a request's samples, which draws from its own stream."""
    seed = derive_seed(request.sampling.seed, sample)
    return attrs.evolve(request.sampling, seed=seed)


def as_core_request(request: GenerationRequest, name: str) -> Request:
    """Convert a request to the manager's type, under the name of one of its samples."""
    tokens = (*request.prompt, *request.answered)
    return Request(name, tokens, cache_salt=request.cache_salt)
