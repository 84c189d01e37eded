# SPDX-License-Identifier: Apache-2.0
"""Which request got each block that a call took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcore.types.values import Appended

Taker = Callable[[int], str | None]
"""For each block that a call took, the request that got it."""
ADMITTING = ("allocate_slots", "load")


def find_taker(
    core: Any, name: str, outcome: Any, given: Mapping[str, Any], to_id: Callable[[int], str]
) -> Taker:
    """Return which request got each block of a call. given: its arguments by name. to_id: returns
    the id of a request given by its row.
    """
    if name in ADMITTING:
        return lambda _: given["request_id"]
    if isinstance(outcome, Appended) and outcome.columns:
        named, (places, _, _, blocks) = given["requests"], outcome.grown
        grown = dict(zip(blocks, places, strict=True))

        def by_place(block: int) -> str | None:
            request = named[grown[block]] if block in grown else None
            return request if request is None or isinstance(request, str) else to_id(int(request))

        return by_place
    if name == "swap_in":
        held = {
            block: each
            for each in given["request_ids"]
            for table in core.get_blocks(each).blocks
            for block in table
        }
        return held.get
    return lambda _: None
