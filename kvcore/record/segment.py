# SPDX-License-Identifier: Apache-2.0
"""The bytes of one segment: a header, then frames, each at a multiple of 8.

    header   magic[8] format[u32] flags[u32] number[u64] first call[u64] version[28] CRC-32C[u32]
    frame    length[u32] CRC-32C[u32] bytes

The first frame is a state, so that a segment can be replayed alone; each other frame holds the
calls of one step and their outcomes. While a frame is open, the top bit of its length is set, its
checksum is 0 and its length counts the committed bytes, none at first: the top bit is set before
any byte is written behind it. A length of 0 ends the segment. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path

import attrs

from kvcore.record.checksum import crc32c
from kvcore.record.errors import DamagedRecord, NewerRecord, NotARecord

MAGIC = b"KVCREC1\n"
FORMAT = 1
KEYS, CONTINUES = 1, 2
"""Flags: hashes of blocks instead of tokens; the state continues the one in which the segment
before ends.
"""
HEADER = struct.Struct("<8sIIQQ28s")
HEADER_SIZE, FRAME_SIZE = 64, 8
WORDS = struct.Struct("<II")
OPEN = 1 << 31
FRAME_BYTES = 1 << 16
"""A frame ends after a step, or when it exceeds this size."""


@attrs.frozen
class Header:
    """The header of a segment."""

    number: int
    first_call: int
    flags: int
    version: str

    def to_bytes(self) -> bytes:
        """Encode the header, 64 bytes."""
        version = self.version.encode()
        packed = HEADER.pack(MAGIC, FORMAT, self.flags, self.number, self.first_call, version)
        return packed + crc32c(packed).to_bytes(4, "little")


@attrs.frozen
class Segment:
    """One file as read.

    frames: offset and bytes of each; the last has no checksum if `has_tail`. dropped_bytes: those
    after the first damaged frame.
    """

    path: Path
    header: Header
    state: bytes
    frames: tuple[tuple[int, bytes], ...]
    has_tail: bool
    dropped_bytes: int


def padded(size: int) -> int:
    """Round a size up to the next possible offset of a frame."""
    return -(-size // 8) * 8


def read_header(path: Path, data: bytes) -> Header:
    """Read the header of a segment. Raises NotARecord, NewerRecord, DamagedRecord."""
    if data[: len(MAGIC)] != MAGIC:
        raise NotARecord(path=str(path), reason="it does not begin with the header of a segment")
    if len(data) < HEADER_SIZE:
        raise DamagedRecord(file=str(path), offset=len(data), reason="the header is cut off")
    packed = data[: HEADER.size]
    if crc32c(packed) != int.from_bytes(data[HEADER.size : HEADER_SIZE], "little"):
        raise DamagedRecord(file=str(path), offset=0, reason="the checksum of the header is wrong")
    _, form, flags, number, first_call, version = HEADER.unpack(packed)
    if form != FORMAT:
        what = f"format {form}, this kvcore reads {FORMAT}"
        raise NewerRecord(file=str(path), what=what)
    return Header(number, first_call, flags, version.rstrip(b"\0").decode(errors="replace"))


def read_segment(path: Path) -> Segment:
    """Read the undamaged part of a segment. Raises NotARecord, NewerRecord, DamagedRecord."""
    data = path.read_bytes()
    header = read_header(path, data)
    frames, at, is_open = [], HEADER_SIZE, False
    while not is_open and (found := _read_frame(data, at)) is not None:
        part, is_open = found
        frames.append((at + FRAME_SIZE, part))
        at = padded(at + FRAME_SIZE + len(part))
    if not frames or (is_open and len(frames) == 1):
        raise DamagedRecord(file=str(path), offset=HEADER_SIZE, reason="the state is incomplete")
    # Nothing was committed after an open frame, or in one of no bytes.
    is_over = is_open or data[at : at + FRAME_SIZE] == WORDS.pack(OPEN, 0)
    is_over = is_over or data.count(0, at) == max(0, len(data) - at)
    left = 0 if is_over else len(data[at:].rstrip(b"\0"))
    return Segment(path, header, frames[0][1], tuple(frames[1:]), is_open, left)


def _read_frame(data: bytes, at: int) -> tuple[bytes, bool] | None:
    """Return the bytes of a frame and whether it is open; None if it is damaged or missing."""
    if len(data) < at + FRAME_SIZE:
        return None
    length, checksum = WORDS.unpack_from(data, at)
    start, size = at + FRAME_SIZE, length & ~OPEN
    part = data[start : start + size]
    if not size or len(part) < size:
        return None
    if length & OPEN and not checksum:
        return part, True
    return (part, False) if crc32c(part) == checksum else None
