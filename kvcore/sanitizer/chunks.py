# SPDX-License-Identifier: Apache-2.0
"""The facts about a cache that an adapter states, and the work of one step for one request."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvcore.sanitizer.errors import AdapterError

LEAST = {"block_size": 1, "window": 1, "num_null": 0, "pool": 0}


@attrs.frozen(kw_only=True)
class CacheGroup:
    """The blocks of layers that share tables.

    block_size: slots per block. window: queries at p see [max(0, p - window + 1), p]; None: all.
    chunked: they see the chunk of `window` positions that contains them instead. ring: tables wrap
    around, and a step reads before it writes. num_null: device blocks below this id are null
    blocks, which are neither written nor read inside the window. zeros_readable: zeroed blocks may
    be read. pool: groups of one pool share block ids. state: a block holds the recurrent state
    after the last of its tokens that a step computed: a step reads the one before its first
    position, and writes one after its last. Raises AdapterError.
    """

    block_size: int
    window: int | None = None
    ring: bool = False
    num_null: int = 0
    zeros_readable: bool = False
    pool: int = 0
    chunked: bool = False
    state: bool = False

    def __attrs_post_init__(self) -> None:
        for name, least in LEAST.items():
            number = getattr(self, name)
            if number is not None and number < least:
                reason = f"{name} is {number}: it is {least} or more"
                raise AdapterError(observation="CacheGroup", reason=reason)

    @property
    def reads_first(self) -> bool:
        """Whether a step reads before it writes."""
        return self.ring or self.state

    def first(self, start: int) -> int:
        """Return the first position that the queries from `start` on see."""
        if self.state:
            return max(0, start - 1)
        if self.window is None:
            return 0
        return start - start % self.window if self.chunked else max(0, start - self.window + 1)


@attrs.frozen
class Chunk:
    """Positions [start, start + num_tokens) of a request, in the slots that its tables name.

    drafts: the speculative tokens at the end of these positions, which are not in the request's
    list; a negative one is not known.
    """

    name: str
    start: int
    num_tokens: int
    drafts: Sequence[int] = ()


@attrs.frozen
class SlotChunk:
    """A chunk in one group, given by slots, `block * block_size + offset`.

    writes: one per position from start on; a negative one is not written. reads: of the positions
    up to the chunk's last one; for a ring, up to the one before its first.
    """

    name: str
    group_id: int
    start: int
    num_tokens: int
    writes: Sequence[int]
    reads: Sequence[int]
