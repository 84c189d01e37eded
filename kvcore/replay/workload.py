# SPDX-License-Identifier: Apache-2.0
"""One request of a trace.

A request names its prompt by hash ids, one per `unit` tokens, the last possibly partial; equal
leading ids mean an equal prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

MOONCAKE_UNIT = 512
BAILIAN_UNIT = 16


@attrs.frozen
class TraceRequest:
    """A request as recorded. line: in its file, from 1. arrival: seconds. unit: tokens per id."""

    line: int
    arrival: float
    prompt_len: int
    output_len: int
    hash_ids: Sequence[int]
    unit: int = MOONCAKE_UNIT
