# SPDX-License-Identifier: Apache-2.0
"""A request as the slot checker follows it: its tokens, its tables, and their verified lengths.

Twin: rust/src/sanitizer/requests.rs.
"""

from __future__ import annotations

from collections.abc import Sequence

DISTURBED = -1
"""The verified length of a request after another request changed its blocks."""


class Followed:
    """A request: its tokens, its tables, and their verified lengths."""

    def __init__(self, serial: int, tokens: Sequence[int], base: int, epoch: int) -> None:
        self.serial, self.tokens, self.epoch = serial, tokens, epoch
        self.base, self.checked = base, True
        self.tables: list[list[int]] = []
        self.trimmed: list[int] = []
        self.empty_tables(0)

    def empty_tables(self, num_groups: int) -> None:
        """Start without blocks. trimmed: the first block of each table that is still claimed."""
        self.tables = [[] for _ in range(num_groups)]
        self.trimmed = [0] * num_groups
        self.verified, self.oldest_epoch, self.repeats = 0, 0, False
        self.summed, self.total = 0, self.base

    def forget_from(self, position: int, epoch: int) -> None:
        """Lower the verified length to a position, or to 0 if it includes older weights."""
        if position < self.verified:
            self.verified = position if self.oldest_epoch == epoch else DISTURBED
