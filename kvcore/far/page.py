# SPDX-License-Identifier: Apache-2.0
"""The name of a page in a far tier, and its header, which identifies it and holds its checksum.

A slot holds a header of 112 bytes, 16 zero bytes, and the payload. The name ends with the key of
the block, 36 bytes; before it stand the identity of the layout and weights, and the rank. XXH3
detects damage, not forgery: everyone who can write to the store is trusted.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import attrs
import xxhash

from kvcore.far.tier import FarStatus, View
from kvcore.types.keys import KEY_SIZE

MAGIC = b"kvpage02"
OLD_MAGIC = b"kvblock1"
"""The magic numbers of earlier versions."""
HEADER = struct.Struct(f"<8s32s{KEY_SIZE}sB3xQQ16s")
PAYLOAD_START = 128
RAW = 0
"""The only codec: the payload is the page."""

_DIGEST_SIZE = 16
_DIGEST_START = HEADER.size - _DIGEST_SIZE
_SHOWN_SIZE = 16
"""Number of bytes of the identity in a name."""
_PREFIX = "kvcore2"


@attrs.frozen
class PageOwner:
    """Where pages belong: 32 bytes of identity, and which of `world` slices of a block."""

    identity: bytes
    rank: int = 0
    world: int = 1

    def name(self, key: bytes) -> str:
        """Return the name of a block's page."""
        shown = self.identity[:_SHOWN_SIZE].hex()
        return f"{_PREFIX}/{shown}/{self.rank}.{self.world}/{key.hex()}"

    def owns(self, view: View) -> bool:
        """Return whether the header in a slot has exactly this identity."""
        return bytes(view[8:40]) == self.identity


def identify_pages(lines: Iterable[str]) -> bytes:
    """Compute the identity, 32 bytes, that these lines in this order stand for."""
    return hashlib.sha256("\n".join((_PREFIX, *lines)).encode()).digest()


def begin_page(view: View, identity: bytes, key: bytes) -> None:
    """Write the header of a slot, except its checksum."""
    size = len(view) - PAYLOAD_START
    HEADER.pack_into(view, 0, MAGIC, identity, key, RAW, size, size, bytes(_DIGEST_SIZE))
    view[HEADER.size : PAYLOAD_START] = bytes(PAYLOAD_START - HEADER.size)


def seal_page(view: View) -> None:
    """Write the checksum of a slot whose payload is complete."""
    view[_DIGEST_START : HEADER.size] = _digest(view)


def check_page(view: View, name: str, num_bytes: int) -> FarStatus:
    """Verify that a slot holds the page of a name. num_bytes: the size of the store's entry.

    Returns OK, FOREIGN for a page of another identity or an earlier format, or DAMAGED otherwise.
    """
    if num_bytes < HEADER.size or len(view) < HEADER.size:
        return FarStatus.DAMAGED
    magic, identity, key, codec, page_size, payload_size, digest = HEADER.unpack_from(view)
    if magic == OLD_MAGIC:
        return FarStatus.FOREIGN
    if magic != MAGIC or num_bytes != len(view):
        return FarStatus.DAMAGED
    size = len(view) - PAYLOAD_START
    if (codec, page_size, payload_size) != (RAW, size, size) or _digest(view) != digest:
        return FarStatus.DAMAGED
    _, shown, _, named_key = name.split("/")
    if identity[:_SHOWN_SIZE].hex() != shown:
        return FarStatus.FOREIGN
    return FarStatus.OK if key.hex() == named_key else FarStatus.DAMAGED


def check_pages(
    names: Sequence[str],
    views: Sequence[View],
    got: Iterable[int | FarStatus],
    remove: Callable[[Sequence[str]], object],
) -> list[FarStatus]:
    """Verify the slots that a store filled, and remove its damaged entries: no put replaces them.

    got: the size of each entry, or why there is none; each page is verified before the next one.
    """
    statuses = [
        each if isinstance(each, FarStatus) else check_page(view, name, each)
        for name, view, each in zip(names, views, got, strict=True)
    ]
    pairs = zip(names, statuses, strict=True)
    damaged = [name for name, status in pairs if status is FarStatus.DAMAGED]
    if damaged:
        with suppress(Exception):  # of a client library: the page is damaged all the same
            remove(damaged)
    return statuses


def _digest(view: View) -> bytes:
    digest = xxhash.xxh3_128(view[:_DIGEST_START])
    digest.update(view[HEADER.size :])
    return digest.digest()
