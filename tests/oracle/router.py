# SPDX-License-Identifier: Apache-2.0
"""A router: an index made of events alone, and the longest prefix that it can find.

Source: docs/engines.md, "Groups" and "Events": all groups resume at one length, a multiple of all
block sizes, which leaves a token to compute; each group must find what the next query sees. If a
group drops its last hit, it must also find the block behind that length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from kvcore import AllBlocksCleared, BlockRemoved, BlockStored, Config, Event, Group
from tests.oracle.finding import demand

Keys = Sequence[Sequence[bytes]]


class Router:
    """The keys of one manager, by its events."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.found: set[bytes] = set()
        self._step = math.lcm(*(group.block_size for group in config.groups))
        self._flagged = any(group.eagle for group in config.groups)

    def hear(self, events: Iterable[Event]) -> None:
        """Follow events."""
        for event in events:
            match event:
                case BlockStored():
                    size = self.config.groups[event.group_id].block_size
                    demand(event.block_size == size, f"{event} has another group's block size")
                    num_tokens = size * len(event.block_hashes)
                    demand(len(event.tokens) == num_tokens, f"{event} has a wrong number of tokens")
                    self.found.update(each + _suffix(event.group_id) for each in event.block_hashes)
                case BlockRemoved():
                    key = event.block_hash + _suffix(event.group_id)
                    demand(key in self.found, f"{event}, which no event stored")
                    self.found.remove(key)
                case AllBlocksCleared():
                    self.found.clear()

    def longest(self, keys: Keys, num_tokens: int) -> int:
        """Return the longest hit of a request with these keys and this many tokens."""
        for length in range((num_tokens - 1) // self._step * self._step, 0, -self._step):
            if all(
                self._resumes(group, keys[at], length, num_tokens)
                for at, group in enumerate(self.config.groups)
            ):
                return length
        return 0

    def _resumes(self, group: Group, keys: Sequence[bytes], length: int, num_tokens: int) -> bool:
        """Tell whether a group finds what it needs to go on after this many tokens."""
        positions = list(self._needed(group, length))
        if positions and (positions[-1] + 1) * group.block_size > num_tokens - 1:
            return False
        return length <= len(keys) * group.block_size and all(
            position < len(keys) and keys[position] in self.found for position in positions
        )

    def _needed(self, group: Group, length: int) -> Iterator[int]:
        """Yield the positions that a group must find."""
        end = length // group.block_size
        first = first_seen(group, length) // group.block_size
        if group.kind == "sliding_window":
            first = min(first, end - 1)
        drops = self.config.use_eagle and (group.eagle or not self._flagged)
        yield from range(first, end + int(drops))


def first_seen(group: Group, query: int) -> int:
    """Return the first position that a query sees."""
    if group.kind == "sliding_window":
        assert group.window is not None
        return max(0, query - group.window + 1)
    if group.kind == "chunked_local":
        assert group.window is not None
        return query // group.window * group.window
    return 0


def _suffix(group_id: int) -> bytes:
    return group_id.to_bytes(4, "big")
