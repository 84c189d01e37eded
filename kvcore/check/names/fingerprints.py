# SPDX-License-Identifier: Apache-2.0
"""The names of the nodes that were met, in few bytes each.

A fingerprint lies in one of many rows of bytes, behind the others of its row, and is searched in
the row: a set of objects would take six times the memory. The number of rows grows with the number
of names, so that no row gets long. Names of another length, which only whole names and models of
users have, are in a set. Twin: rust/src/check/names/fingerprints.rs.
"""

from __future__ import annotations

import sys
from zlib import crc32

from kvcore.check.names.canonical import FINGERPRINT_BYTES

SIZE = FINGERPRINT_BYTES
FEW_ROWS, MORE_ROWS, LONG_ROW = 16, 4, 128
"""Initial number of rows, its factor of growth, and the names per row at which it grows."""


class Fingerprints:
    """A set of names that only grows."""

    def __init__(self) -> None:
        self._rows = [bytearray() for _ in range(FEW_ROWS)]
        self._others: set[bytes] = set()
        self._num_short = 0
        self._others_bytes = 0

    def __len__(self) -> int:
        return self._num_short + len(self._others)

    def __contains__(self, name: bytes) -> bool:
        if len(name) != SIZE:
            return name in self._others
        row = self._rows[crc32(name) % len(self._rows)]
        at = row.find(name)
        while at % SIZE and at >= 0:
            at = row.find(name, at + 1)
        return at >= 0

    def add(self, name: bytes) -> bool:
        """Add a name; return whether it is new."""
        if name in self:
            return False
        if len(name) != SIZE:
            self._others.add(name)
            self._others_bytes += sys.getsizeof(name)
            return True
        self._rows[crc32(name) % len(self._rows)] += name
        self._num_short += 1
        if self._num_short > LONG_ROW * len(self._rows):
            self._spread()
        return True

    @property
    def num_bytes(self) -> int:
        """Return the memory of all names, in bytes."""
        others = sys.getsizeof(self._others) + self._others_bytes
        return sum(map(sys.getsizeof, self._rows)) + others

    def _spread(self) -> None:
        """Distribute the names over more rows."""
        rows = [bytearray() for _ in range(MORE_ROWS * len(self._rows))]
        while self._rows:
            full = self._rows.pop()
            for at in range(0, len(full), SIZE):
                name = full[at : at + SIZE]
                rows[crc32(name) % len(rows)] += name
        self._rows = rows
