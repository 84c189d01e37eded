# SPDX-License-Identifier: Apache-2.0
"""A step from its issue until its tokens are known, and checks for mistakes of an adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvcore.sanitizer.errors import AdapterError
from kvcore.sanitizer.lines import BlockLists, SlotLists

STEP_MAX = END_MAX = 2**32 - 1
"""The highest number of a step, and the highest end of a chunk."""
EPOCH_MAX = 2**16 - 1
"""How often weights may change: a slot stores the number of its weights in 16 bits."""


@attrs.define
class Issued:
    """A step that waits for its tokens."""

    step: int
    serials: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]
    drafts: Mapping[int, Sequence[int]]
    slots: Mapping[int, SlotLists]
    tables: Mapping[int, BlockLists]
    is_complete: bool = False
    is_cancelled: bool = False


def check_step(step: int, last: int) -> None:
    """Check the number of a step against the last one."""
    if step <= last:
        reason = f"step {last} came before it, and steps must ascend"
        raise AdapterError(observation=f"issue({step})", reason=reason)
    if step > STEP_MAX:
        reason = f"steps are numbered up to {STEP_MAX}"
        raise AdapterError(observation=f"issue({step})", reason=reason)


def check_numbered(
    what: str,
    names: Sequence[str],
    counts: Sequence[int],
    drafts: Mapping[int, Sequence[int]],
    tables: Mapping[int, BlockLists],
) -> None:
    """Check the drafts and blocks that are given by the number of a chunk."""
    for at in (*drafts, *tables):
        if not isinstance(at, int) or not 0 <= at < len(names):
            raise AdapterError(observation=what, reason=f"no chunk {at!r} of {len(names)}")
    for at, tokens in drafts.items():
        check_drafts(what, names[at], counts[at], tokens)


def check_end(what: str, name: str, start: int, num_tokens: int) -> None:
    """Check the position that a chunk ends at."""
    if start + num_tokens > END_MAX:
        reason = f"{name} has start {start} and {num_tokens} tokens: none ends above {END_MAX}"
        raise AdapterError(observation=what, reason=reason)


def check_drafts(what: str, name: str, num_tokens: int, drafts: Sequence[int]) -> None:
    """Check how many drafts a chunk has."""
    if len(drafts) > num_tokens:
        reason = f"{len(drafts)} drafts in {num_tokens} tokens of {name}"
        raise AdapterError(observation=what, reason=reason)
