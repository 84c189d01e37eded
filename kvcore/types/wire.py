# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the canonical bytes of single values.

Invariants: integers are little-endian; a count precedes the items. Bytes that no writer produces
raise DamagedState with the offset. Twin: rust/src/types/wire.rs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from kvcore.types.errors import DamagedState
from kvcore.types.keys import HASH_SIZE, KEY_SIZE

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
NONE = bytes(4)
"""A count of 0."""


class Reader:
    """A cursor over bytes to read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0

    def take(self, size: int) -> bytes:
        """Read the next `size` bytes. Raises DamagedState at the end."""
        end = self.offset + size
        if end > len(self.data):
            raise self.damaged(f"{size} bytes are missing")
        part = self.data[self.offset : end]
        self.offset = end
        return part

    def damaged(self, reason: str) -> DamagedState:
        """Make the error for this offset."""
        return DamagedState(reason=reason, offset=self.offset)

    def u8(self) -> int:
        """Read one byte."""
        offset = self.offset
        try:
            value = self.data[offset]
        except IndexError:
            raise self.damaged("1 bytes are missing") from None
        self.offset = offset + 1
        return value

    def flag(self) -> bool:
        """Read one byte, 0 or 1."""
        value = self.u8()
        if value > 1:
            raise self.damaged(f"{value} is not below 2")
        return value == 1

    def choice(self, count: int) -> int:
        """Read one byte below a count. Raises DamagedState."""
        value = self.u8()
        if value >= count:
            raise self.damaged(f"{value} is not below {count}")
        return value

    def u32(self) -> int:
        """Read four bytes."""
        offset = self.offset
        try:
            value: int = _U32.unpack_from(self.data, offset)[0]
        except struct.error:
            raise self.damaged("4 bytes are missing") from None
        self.offset = offset + 4
        return value

    def below(self, end: int) -> int:
        """Read four bytes, a number below `end`. Raises DamagedState."""
        value = self.u32()
        if value >= end:
            raise self.damaged(f"{value} is not below {end}")
        return value

    def u64(self) -> int:
        """Read eight bytes."""
        offset = self.offset
        try:
            value: int = _U64.unpack_from(self.data, offset)[0]
        except struct.error:
            raise self.damaged("8 bytes are missing") from None
        self.offset = offset + 8
        return value

    def numbers(self) -> list[int]:
        """Read a count and that many u32."""
        count = self.u32()
        return list(struct.unpack(f"<{count}I", self.take(4 * count))) if count else []

    def ids(self, end: int) -> list[int]:
        """Read numbers, each below `end`. Raises DamagedState."""
        values = self.numbers()
        if values and max(values) >= end:
            raise self.damaged(f"an id is not below {end}")
        return values

    def sized(self) -> bytes:
        """Read a count and that many bytes."""
        return self.take(self.u32())

    def key(self) -> bytes:
        """Read a key with its size. Raises DamagedState."""
        value = self.sized()
        if len(value) != KEY_SIZE:
            raise self.damaged(f"a key has {KEY_SIZE} bytes, not {len(value)}")
        return value

    def name(self) -> str:
        """Read a count and that many bytes of UTF-8. Raises DamagedState."""
        try:
            return self.sized().decode()
        except UnicodeDecodeError:
            raise self.damaged("a name is not UTF-8") from None

    def text(self) -> str | None:
        """Read a flag, and the text if there is one. Raises DamagedState."""
        return self.name() if self.flag() else None

    def hashes(self) -> list[bytes]:
        """Read a count and that many block hashes."""
        count = self.u32()
        if not count:
            return []
        joined = self.take(count * HASH_SIZE)
        return [joined[at : at + HASH_SIZE] for at in range(0, len(joined), HASH_SIZE)]


class Writer:
    """A buffer of bytes to write."""

    def __init__(self, start: bytes = b"") -> None:
        self.data = bytearray(start)

    def u8(self, value: int) -> None:
        """Write one byte."""
        self.data.append(value)

    def u32(self, value: int) -> None:
        """Write four bytes."""
        self.data += value.to_bytes(4, "little")

    def u64(self, value: int) -> None:
        """Write eight bytes."""
        self.data += value.to_bytes(8, "little")

    def text(self, value: str | None) -> None:
        """Write a flag, and the text if there is one."""
        self.u8(value is not None)
        if value is not None:
            self.sized(value.encode())

    def numbers(self, values: Iterable[int]) -> None:
        """Write a count and that many u32."""
        listed = list(values)
        count = len(listed)
        self.data += struct.pack(f"<I{count}I", count, *listed) if count else NONE

    def sized(self, value: bytes | bytearray) -> None:
        """Write a count and that many bytes."""
        self.data += len(value).to_bytes(4, "little")
        self.data += value
