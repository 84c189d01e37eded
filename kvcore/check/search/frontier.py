# SPDX-License-Identifier: Apache-2.0
"""Compression of packed nodes, since many nodes of a search wait at a time.

Nodes of one world look alike, so each is compressed with a dictionary of earlier nodes (zlib's),
which every reader needs. Before there are such nodes, and if a model's packed nodes are not bytes,
they are kept unchanged.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

KNOWN_BYTES = 8_000
"""Bytes of earlier nodes: more compress others a little better, and much more slowly."""
RAW, LEVEL = -zlib.MAX_WBITS, 1


class Squeezer:
    """Compresses and decompresses nodes. known: bytes of earlier nodes."""

    def __init__(self, known: bytes = b"") -> None:
        self.known = known

    def learn(self, nodes: Sequence[Any]) -> list[Any]:
        """Use some nodes as the dictionary from now on; return the same nodes compressed."""
        if self.known or not all(isinstance(each, bytes) for each in nodes):
            return list(nodes)
        self.known = b"".join(nodes)[-KNOWN_BYTES:]
        return [self.squeeze(each) for each in nodes]

    def squeeze(self, node: Any) -> Any:
        """Compress a packed node."""
        if not self.known:
            return node
        how = (LEVEL, zlib.DEFLATED, RAW, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY)
        press = zlib.compressobj(*how, self.known)
        return press.compress(node) + press.flush()

    def open(self, node: Any) -> Any:
        """Return the packed node that was compressed."""
        return zlib.decompressobj(RAW, self.known).decompress(node) if self.known else node


def bytes_of(nodes: Iterable[Any]) -> int:
    """Return the memory of waiting nodes in bytes, with their places in a list."""
    return sum(sys.getsizeof(each) + 8 for each in nodes)
