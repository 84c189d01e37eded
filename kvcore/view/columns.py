# SPDX-License-Identifier: Apache-2.0
"""Encodes events as columns, which are small and quick to read in a browser.

A section is deflated and can be read alone: u32 count, a byte per event for its kind, then x, y and
z as u32, little-endian, in byte planes (all first bytes, then all second ones, and so on). A value
is the zigzag difference, modulo 2**32, from that of the previous event of its kind.
Twin: `readSection` in page.js.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from struct import pack

KINDS = (
    *("reset", "take", "take_evicting", "hit", "drop", "freed", "freed_cached", "free", "hold"),
    *("forget", "forget_all", "copy", "swap_out", "swap_in", "store", "load", "host", "refused"),
    "batch",
)
"""Kinds of events; the kind of a call is FIRST_CALL plus its opcode.

take, take_evicting, hit: request y has block x at z = position * groups + group; it is the first
one in a new block, it also evicted the block's content, or the content was there. drop, freed,
freed_cached: the request has it no more, others do, or none does; x is the block + 1, or 0 for the
one that y has at z. free: of no request; z: cached. hold: of an operation or a pin. forget: x lost
its key. copy: from block z. swap_out, swap_in: z is the host block. store, load: z is the
operation. host: x is free (y = 0), cached (1), or of request y - 2. refused: x blocks needed, y
available, z pending. batch: the step ends; x is the batch, y the call, z the free blocks.
A call: x is a request + 1 or a list of them, y a count, z the outcome, by its place in `outcomes`.
"""
RESET, TAKE, TAKE_EVICTING, HIT, DROP, FREED, FREED_CACHED, FREE, HOLD = range(9)
FORGET, FORGET_ALL, COPY, SWAP_OUT, SWAP_IN, STORE, LOAD, HOST, REFUSED, BATCH = range(9, 19)
FIRST_CALL = 32
SECTION_EVENTS = 1 << 20
MASK = 2**32 - 1


class Columns:
    """Collects events in order, in sections."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._open()

    def add(self, kind: int, x: int = 0, y: int = 0, z: int = 0) -> None:
        """Add an event. Values are taken modulo 2**32."""
        last = self._last.get(kind, (0, 0, 0))
        self._kinds.append(kind)
        for column, value, before in zip(self._columns, (x, y, z), last, strict=True):
            change = (value - before) & MASK
            column.append((change << 1 & MASK) ^ (MASK if change >> 31 else 0))
        self._last[kind] = (x, y, z)
        if len(self._kinds) == SECTION_EVENTS:
            self._close()

    def sections(self) -> list[bytes]:
        """Return all events so far as deflated sections."""
        if self._kinds:
            self._close()
        return self._done

    def _open(self) -> None:
        self._kinds = bytearray()
        self._columns = (array("I"), array("I"), array("I"))
        self._last: dict[int, tuple[int, int, int]] = {}

    def _close(self) -> None:
        parts = [pack("<I", len(self._kinds)), bytes(self._kinds), *map(planes, self._columns)]
        self._done.append(zlib.compress(b"".join(parts), 9))
        self._open()


def planes(column: array[int]) -> bytes:
    """Return the bytes of a column: all lowest ones, then all second ones, and so on."""
    if sys.byteorder == "big":
        column = array("I", column)
        column.byteswap()
    data = column.tobytes()
    return b"".join(data[place::4] for place in range(4))
