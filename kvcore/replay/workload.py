# SPDX-License-Identifier: Apache-2.0
"""One request of a trace, and what a step of the replay computes.

Rules: a request names its prompt by hash ids, one for each `unit` tokens, the last perhaps partial;
equal ids from the start mean an equal prefix. Twin: none.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

MOONCAKE_UNIT = 512
BAILIAN_UNIT = 16


@attrs.frozen
class TraceRequest:
    """A request as recorded. line: in its file, from 1. arrival: seconds. unit: tokens an id."""

    line: int
    arrival: float
    prompt_len: int
    output_len: int
    hash_ids: Sequence[int]
    unit: int = MOONCAKE_UNIT


@attrs.frozen
class Chunk:
    """Positions [start, end) of a request, computed in one step.

    tokens: of the request, up to end at least (a buffer that grows; copy what is kept).
    """

    request: str
    row: int
    start: int
    end: int
    tokens: Sequence[int]


@attrs.frozen
class Step:
    """One step of the loop, from 0. time: when it starts, in virtual seconds."""

    number: int
    time: float
    chunks: Sequence[Chunk]
    num_prefill_tokens: int
    num_decodes: int
