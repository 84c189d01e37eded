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
        """One byte."""
        return self.take(1)[0]

    def flag(self) -> bool:
        """Read one byte, 0 or 1."""
        return bool(self.choice(2))

    def choice(self, count: int) -> int:
        """Read one byte below a count. Raises DamagedState."""
        value = self.u8()
        if value >= count:
            raise self.damaged(f"{value} is not below {count}")
        return value

    def u32(self) -> int:
        """Four bytes."""
        return int.from_bytes(self.take(4), "little")

    def below(self, end: int) -> int:
        """Read four bytes, a number below `end`. Raises DamagedState."""
        value = self.u32()
        if value >= end:
            raise self.damaged(f"{value} is not below {end}")
        return value

    def u64(self) -> int:
        """Eight bytes."""
        return int.from_bytes(self.take(8), "little")

    def numbers(self) -> list[int]:
        """A count and that many u32."""
        count = self.u32()
        return list(struct.unpack(f"<{count}I", self.take(4 * count)))

    def ids(self, end: int) -> list[int]:
        """Read numbers, each below `end`. Raises DamagedState."""
        values = self.numbers()
        if any(value >= end for value in values):
            raise self.damaged(f"an id is not below {end}")
        return values

    def sized(self) -> bytes:
        """A count and that many bytes."""
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
        joined = self.take(self.u32() * HASH_SIZE)
        return [joined[at : at + HASH_SIZE] for at in range(0, len(joined), HASH_SIZE)]


class Writer:
    """A buffer of bytes to write."""

    def __init__(self, start: bytes = b"") -> None:
        self.data = bytearray(start)

    def u8(self, value: int) -> None:
        """One byte."""
        self.data.append(value)

    def u32(self, value: int) -> None:
        """Four bytes."""
        self.data += value.to_bytes(4, "little")

    def u64(self, value: int) -> None:
        """Eight bytes."""
        self.data += value.to_bytes(8, "little")

    def text(self, value: str | None) -> None:
        """A flag, and the text if there is one."""
        self.u8(value is not None)
        if value is not None:
            self.sized(value.encode())

    def numbers(self, values: Iterable[int]) -> None:
        """A count and that many u32."""
        listed = list(values)
        self.data += struct.pack(f"<I{len(listed)}I", len(listed), *listed)

    def sized(self, value: bytes | bytearray) -> None:
        """A count and that many bytes."""
        self.u32(len(value))
        self.data += value
