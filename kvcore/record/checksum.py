# SPDX-License-Identifier: Apache-2.0
"""CRC-32C, the checksum of a record's headers, frames and batches.

The table is the specification; the compiled twin computes the same numbers with the processor's
instructions.
"""

from __future__ import annotations

from kvcore import _twin

POLYNOMIAL = 0x82F63B78
"""Castagnoli's polynomial, bits reversed."""


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ POLYNOMIAL * (byte & 1)
    return byte


TABLE = tuple(map(_entry, range(256)))


def crc32c_by_table(data: bytes | bytearray | memoryview) -> int:
    """Compute the checksum, one byte at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


crc32c = _twin.crc32c if _twin.available() else crc32c_by_table
