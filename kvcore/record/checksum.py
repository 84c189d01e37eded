# SPDX-License-Identifier: Apache-2.0
"""CRC-32C, the checksum of a record: of its headers, its frames, and the batches in it.

The table is the specification; the compiled twin, where it is built, gives the same numbers by the
processor's own instruction.
"""

from __future__ import annotations

from kvcore import _twin

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, bits reversed."""


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
    return byte


TABLE = tuple(map(_entry, range(256)))


def crc32c_by_table(data: bytes | bytearray | memoryview) -> int:
    """The checksum, a byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


crc32c = _twin.crc32c if _twin.available() else crc32c_by_table
