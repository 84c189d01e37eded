# SPDX-License-Identifier: Apache-2.0
"""Packed nodes squeezed, since many of a search's nodes wait at a time.

Nodes of one world look alike, so each is written as what it has in common with some that came
before, which every reader needs (a dictionary of zlib's). Before there are such
nodes, and where a model's packed nodes are no bytes, they stay as they are.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

KNOWN_BYTES = 8_000
"""Of the nodes before: more make others a little smaller, and squeezing much slower."""
RAW, LEVEL = -zlib.MAX_WBITS, 1


class Squeezer:
    """Squeezes nodes and opens them; known: bytes of the nodes before."""

    def __init__(self, known: bytes = b"") -> None:
        self.known = known

    def learn(self, nodes: Sequence[Any]) -> list[Any]:
        """Know some nodes from now on; the same nodes squeezed."""
        if self.known or not all(isinstance(each, bytes) for each in nodes):
            return list(nodes)
        self.known = b"".join(nodes)[-KNOWN_BYTES:]
        return [self.squeeze(each) for each in nodes]

    def squeeze(self, node: Any) -> Any:
        """A packed node in fewer bytes."""
        if not self.known:
            return node
        how = (LEVEL, zlib.DEFLATED, RAW, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY)
        press = zlib.compressobj(*how, self.known)
        return press.compress(node) + press.flush()

    def open(self, node: Any) -> Any:
        """The packed node that was squeezed."""
        return zlib.decompressobj(RAW, self.known).decompress(node) if self.known else node


def bytes_of(nodes: Iterable[Any]) -> int:
    """Memory of waiting nodes in bytes, with their places in a list."""
    return sum(sys.getsizeof(each) + 8 for each in nodes)
