# SPDX-License-Identifier: Apache-2.0
"""Requests and engine configurations with the attributes that vLLM 0.8.5 reads."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs

SIZE = 4
"""Tokens per block."""


class RequestStatus(enum.Enum):
    """The status of a request in an engine."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()


@attrs.define
class Span:
    """The position of a media item's tokens."""

    offset: int
    length: int


@attrs.define
class Lora:
    """An adapter."""

    lora_int_id: int


@attrs.define
class SamplingParams:
    """The sampling parameters of a request."""

    prompt_logprobs: int | None = None


@attrs.define
class ModelConfig:
    """max_model_len: longest request in tokens."""

    max_model_len: int


@attrs.define
class SchedulerConfig:
    """max_num_batched_tokens: most tokens of one step."""

    max_num_batched_tokens: int | None = None


@attrs.define
class CacheConfig:
    """num_gpu_blocks_override: blocks of the pool, whatever the memory would give."""

    num_gpu_blocks_override: int | None = None


@attrs.define
class VllmConfig:
    """The parts of an engine's configuration that sizing reads."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig = attrs.field(factory=SchedulerConfig)
    cache_config: CacheConfig = attrs.field(factory=CacheConfig)


@attrs.define
class EngineRequest:
    """A request as an engine knows it."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    spec_token_ids: list[int] = attrs.field(factory=list)
    mm_positions: list[Span] = attrs.field(factory=list)
    mm_hashes: list[str | None] = attrs.field(factory=list)
    lora_request: Lora | None = None
    sampling_params: SamplingParams = attrs.field(factory=SamplingParams)
    status: RequestStatus = RequestStatus.WAITING

    def __attrs_post_init__(self) -> None:
        self.all_token_ids = list(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and accepted tokens."""
        return len(self.all_token_ids)


def with_media(
    num_tokens: int, *items: tuple[str | None, int, int], lora: int | None = None
) -> EngineRequest:
    """Return a request with media: hash, first token and number of tokens each."""
    return EngineRequest(
        "r",
        list(range(num_tokens)),
        mm_positions=[Span(offset, length) for _, offset, length in items],
        mm_hashes=[name for name, _, _ in items],
        lora_request=None if lora is None else Lora(lora),
    )


def full_blocks(tokens: Sequence[int], size: int = SIZE) -> list[tuple[int, ...]]:
    """Return the tokens of the full blocks."""
    return [tuple(tokens[first : first + size]) for first in range(0, len(tokens) - size + 1, size)]
