# SPDX-License-Identifier: Apache-2.0
"""How a record encodes the arguments of calls.

A number is a varint of 7 bits per byte, the lowest first; if it may be negative, it is zigzagged. A
value that is not a number, or is beyond 2**60, becomes -2**61 or 2**61: no call distinguishes such
values. A known request is 1 and its row, an unknown one 0 and its id; an id that is not text
becomes the empty one. Tokens are u32. A hit is 1 and its length if the last look-up of the request
found it, else 0 and its blocks. A record by keys (names.py) has other ids, and of tokens the count.
Twin: rust/src/record/fields.rs.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kvcore.types.arguments import read_bool, read_int
from kvcore.types.errors import KvcoreError
from kvcore.types.keys import HASH_SIZE
from kvcore.types.tokens import read_named, read_tokens
from kvcore.types.values import Hit, KVCacheBlocks

if TYPE_CHECKING:
    from kvcore.record.names import Names

NEAR, FAR, SIGN = 2**60, 2**61, 2**31
NEAR_CHANGES = tuple(byte >> 1 ^ -(byte & 1) for byte in range(128))  # those of one byte


class NoForm(Exception):
    """An argument cannot be read at all; its call raises and is not recorded."""


class NotReadable(Exception):
    """The bytes are not what a writer produces, or end too early."""


@attrs.frozen
class LastHit:
    """Stands for the hit of the request's last look-up, which has this length."""

    num_tokens: int


class Known(Protocol):
    """The recording manager's knowledge of its requests. names: those of a record by keys."""

    names: Names | None

    def row(self, request_id: str) -> int | None:
        """Return the row of a request."""

    def name(self, request_id: str) -> str:
        """Return the id of a request as the record has it."""

    def last_hit(self, request_id: str) -> Hit | None:
        """Return the hit of a request's last look-up in this segment."""


class Source:
    """Bytes to read, and the ids of the requests by row. by_keys: tokens were not recorded."""

    def __init__(self, data: bytes, ids: dict[int, str], *, by_keys: bool = False) -> None:
        self.data, self.at, self.ids, self.by_keys = data, 0, ids, by_keys

    def take(self, size: int) -> bytes:
        """Read the next `size` bytes."""
        part = self.data[self.at : self.at + size]
        if len(part) < size:
            raise NotReadable
        self.at += size
        return part

    def varint(self) -> int:
        """Read a number of at least 0 and below 2**63."""
        if self.at < len(self.data) and self.data[self.at] < 0x80:  # most are one byte
            self.at += 1
            return self.data[self.at - 1]
        value = shift = 0
        while shift < 63:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
        raise NotReadable

    def number(self) -> int:
        """Read a number of any sign."""
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def sized(self) -> bytes:
        """Read a size and that many bytes."""
        return self.take(self.varint())

    def text(self) -> str:
        """Read sized bytes as text."""
        try:
            return self.sized().decode()
        except UnicodeDecodeError:
            raise NotReadable from None


@attrs.frozen
class Field:
    """Writes and reads one kind of argument. The id is that of the call's request, if any."""

    write: Callable[[bytearray, Any, Known, Any], None]
    read: Callable[[Source], Any]


def put_varint(out: bytearray, value: int) -> None:
    """Write a number of at least 0."""
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def put_number(out: bytearray, value: Any) -> None:
    """Write a number of any sign."""
    number = read_int(value)
    if not isinstance(number, int):
        number = -FAR
    elif abs(number) >= NEAR:
        number = FAR if number > 0 else -FAR
    put_varint(out, number << 1 ^ number >> 63)


def put_text(out: bytearray, value: Any) -> None:
    """Write a text; the empty one if it has no UTF-8 form."""
    try:
        data = value.encode() if isinstance(value, str) else b""
    except UnicodeEncodeError:
        data = b""
    put_varint(out, len(data))
    out += data


def put_numbers(out: bytearray, values: Sequence[Any]) -> None:
    """Write the count of some numbers, and each number."""
    put_varint(out, len(values))
    for value in values:
        put_number(out, value)


def put_rows(out: bytearray, rows: Sequence[int]) -> None:
    """Write the count of some rows, and each one's difference from the row before."""
    put_varint(out, len(rows) << 1)
    last = 0
    for row in rows:
        put_number(out, row - last)
        last = row


def put_request(out: bytearray, value: Any, known: Known) -> None:
    """Write a request's row or id."""
    row = known.row(value)
    put_varint(out, 0 if row is None else row + 1)
    if row is None:
        put_text(out, known.name(value))


def read_request(source: Source) -> str:
    """Read the id of a request."""
    place = source.varint()
    if not place:
        return source.text()
    if place - 1 not in source.ids:
        raise NotReadable
    return source.ids[place - 1]


def put_pin(out: bytearray, value: Any, known: Known) -> None:
    """Write the name of a pin."""
    put_text(out, value if known.names is None else known.names.pin(value))


def put_requests(out: bytearray, ids: Sequence[Any], known: Known) -> None:
    """Write requests: as rows if all are known, else flagged in the count, and one by one."""
    rows = [known.row(each) for each in ids]
    if None not in rows:
        put_rows(out, [row for row in rows if row is not None])
        return
    put_varint(out, len(ids) << 1 | 1)
    for each in ids:
        put_request(out, each, known)


def read_rows(source: Source) -> list[str] | array.array[int]:
    """Read the ids of requests, or their rows."""
    head = source.varint()
    if head & 1:
        return [read_request(source) for _ in range(head >> 1)]
    count = head >> 1
    near = source.data[source.at : source.at + count]
    changes: Iterable[int] = (source.number() for _ in range(count))
    if len(near) == count and near.isascii():  # one byte each
        source.at, changes = source.at + count, map(NEAR_CHANGES.__getitem__, near)
    try:
        return array.array("I", accumulate(changes))
    except OverflowError:
        raise NotReadable from None


def read_ids(source: Source) -> list[str]:
    """Read the ids of requests."""
    rows = read_rows(source)
    try:
        return rows if isinstance(rows, list) else [source.ids[row] for row in rows]
    except KeyError:
        raise NotReadable from None


def put_named(out: bytearray, value: Any, known: Known) -> None:
    """Write the requests of an `append`. Raises NoForm."""
    try:
        ids, rows = read_named(value)
    except KvcoreError:
        raise NoForm from None
    if ids is None:
        put_rows(out, rows)
    else:
        put_requests(out, ids, known)


def put_tokens(out: bytearray, value: Any, known: Known) -> None:
    """Write tokens, or their count alone; its lowest bit is set if ids are negative. Raises
    NoForm.
    """
    signed = 0
    try:
        tokens = read_tokens(value)
    except KvcoreError:
        try:
            tokens, signed = read_tokens(value, signed=True), 1
        except KvcoreError:
            raise NoForm from None
    if known.names is not None:
        put_varint(out, len(tokens) << 1)
        return
    put_varint(out, len(tokens) << 1 | signed)
    out += struct.pack(f"<{len(tokens)}I", *tokens)


def get_tokens(source: Source) -> Any:
    """Read tokens as a buffer, or as a list if some ids are negative."""
    head = source.varint()
    if source.by_keys:
        if head >> 32:
            raise NotReadable
        return memoryview(bytes(head >> 1))
    data = source.take(4 * (head >> 1))
    if head & 1:
        return [token - 2 * (token & SIGN) for token in struct.unpack(f"<{head >> 1}I", data)]
    return memoryview(data).cast("I")


def put_hashes(out: bytearray, hashes: Sequence[Any]) -> None:
    """Write the count of hashes, then 1 before each hash, or 0 if it is not a hash."""
    put_varint(out, len(hashes))
    for each in hashes:
        is_hash = isinstance(each, bytes) and len(each) == HASH_SIZE
        out.append(is_hash)
        out += each if is_hash else b""


def read_hashes(source: Source) -> list[bytes]:
    """Read hashes; b"" for a value that was not a hash."""
    return [source.take(HASH_SIZE * source.varint()) for _ in range(source.varint())]


def put_hit(out: bytearray, hit: Any, last: Hit | None) -> None:
    """Write a hit. Raises NoForm."""
    try:
        blocks = [[read_int(block) for block in group] for group in hit.blocks.blocks]
    except (AttributeError, TypeError):
        raise NoForm from None
    num_tokens = read_int(hit.num_tokens)
    found = None if last is None else (last.num_tokens, [*map(list, last.blocks.blocks)])
    if last is not None and (num_tokens, blocks) == found:
        out.append(1)
        put_varint(out, last.num_tokens)
        return
    out.append(0)
    put_number(out, num_tokens)
    put_varint(out, len(blocks))
    for group in blocks:
        put_numbers(out, group)


def read_hit(source: Source) -> Hit | LastHit:
    """Read a hit."""
    if source.take(1) != b"\0":
        return LastHit(source.varint())
    num_tokens = source.number()
    groups = tuple(read_blocks(source) for _ in range(source.varint()))
    return Hit(KVCacheBlocks(groups), num_tokens)


def read_blocks(source: Source) -> tuple[int, ...]:
    """Read numbers of any sign."""
    return tuple(source.number() for _ in range(source.varint()))


def check_flag(value: Any) -> bool:
    """Check a flag. Raises NoForm."""
    flag = read_bool(value)
    if not isinstance(flag, bool):
        raise NoForm
    return flag


REQUEST = Field(lambda out, value, known, _: put_request(out, value, known), read_request)
REQUESTS = Field(lambda out, value, known, _: put_requests(out, value, known), read_ids)
NAMED = Field(lambda out, value, known, _: put_named(out, value, known), read_rows)
ID = Field(lambda out, value, known, _: put_text(out, known.name(value)), Source.text)
PIN = Field(lambda out, value, known, _: put_pin(out, value, known), Source.text)
COUNT = Field(lambda out, value, *_: put_number(out, value), Source.number)
NUMBER = Field(lambda out, value, *_: put_number(out, value), Source.number)
TOKENS = Field(lambda out, value, known, _: put_tokens(out, value, known), get_tokens)
BLOCKS = Field(lambda out, value, *_: put_numbers(out, value), read_blocks)
BLOCK_HASHES = Field(lambda out, value, *_: put_hashes(out, value), read_hashes)
HIT = Field(lambda out, value, known, of: put_hit(out, value, known.last_hit(of)), read_hit)
FLAG = Field(lambda *_: None, lambda _: True)
"""The kinds of arguments. As an option a COUNT is 0 by default, and a NUMBER None; the bit that
says that a FLAG is there is its value.
"""
