# SPDX-License-Identifier: Apache-2.0
"""A step as bytes: a batch, and what its forward pass computes.

All numbers are little-endian. A header of 44 bytes holds `kvst`, version, flags, the batch's
number, the numbers of commands, keys, sequences, tokens and logits that follow, the CRC-32 of all
other bytes, and the batch's epoch. Then come the batch's columns (6 numbers per command), the row,
start and end of each sequence, the tokens at these positions, and the indices of the tokens whose
logits are wanted. In place of sequences there may be orders about slots of a far tier: for each its
kind, ticket and slot. Each number takes 4 bytes, or 2 if a flag says so. The keys of the batch and
of the orders end the message (36 bytes each). Names of requests are not sent. Whoever can write to
a rank's group is trusted; the checksum guards against a misread version or length.
"""

from __future__ import annotations

import enum
import struct
import zlib
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from kvcore.types.commands import COLUMNS, Batch
from kvcore.types.keys import KEY_SIZE
from kvcore_runtime.ranks.errors import BadStep

MAGIC, VERSION = b"kvst", 2
HEADER = struct.Struct("<4sHHqIIIIIII")
CHECKSUM_AT = slice(36, 40)
STEP_BYTES_MAX = 1 << 28
"""A step that claims to be longer is refused before memory is allocated for it."""

COMPUTES, ENDS, SKIPS, IS_NARROW, IS_APPLIED, HAS_ORDERS = 1, 2, 4, 8, 16, 32
"""Flags: a forward pass follows; no step follows this one; batches before this one were cancelled;
all numbers are below 2 ** 16 and have 2 bytes; the batch was sent before; orders follow.
"""
_ALL_FLAGS = 2 * HAS_ORDERS - 1

Numbers: TypeAlias = npt.NDArray[np.uint32]


@attrs.frozen(kw_only=True, eq=False)
class RankPass:
    """A forward pass, the same on all ranks: uint32 numbers.

    rows, starts, ends: for each sequence its row of the tables and the range of computed positions.
    tokens: at these positions, one sequence after another. wanted: indices into tokens.
    """

    rows: Numbers
    starts: Numbers
    ends: Numbers
    tokens: Numbers
    wanted: Numbers

    @property
    def parts(self) -> tuple[Numbers, ...]:
        """The arrays in the order of the message."""
        return self.rows, self.starts, self.ends, self.tokens, self.wanted


class OrderKind(enum.IntEnum):
    """What a rank is to do. LOAD, STORE: with its tier, as part of a ticket. READ, WRITE: mark the
    slot for the batch's `Load` or `Store` of this key. JOIN: have `slot` slots, and tell the digest
    of the weights. OWN: from now on the pages of rank `ticket` have the identity with which the key
    begins.
    """

    LOAD = 0
    STORE = 1
    READ = 2
    WRITE = 3
    JOIN = 4
    OWN = 5


@attrs.frozen
class RankOrder:
    """An order about one slot of a far tier; the same slot on all ranks."""

    kind: OrderKind
    ticket: int
    slot: int
    key: bytes


FIELDS = tuple(attrs.fields_dict(RankPass))


@attrs.frozen(kw_only=True, eq=False)
class RankStep:
    """A message. computes: None if the batch has no forward pass. is_applied: the batch, of which
    this is the forward pass or after which the orders come, was sent before.
    """

    batch: Batch
    computes: RankPass | None = None
    orders: tuple[RankOrder, ...] = ()
    is_applied: bool = False
    skips: bool = False
    ends: bool = False


def encode_step(step: RankStep) -> bytes:
    """Write a step as bytes. Raises BadStep if a number does not fit or the step is too long."""
    batch, orders = step.batch, step.orders
    parts = _order_parts(orders) if step.computes is None else step.computes.parts
    num_chunks, num_tokens, num_wanted = len(parts[0]), len(parts[3]), len(parts[4])
    keys = batch.keys + b"".join(each.key for each in orders)
    numbers = np.concatenate([np.frombuffer(batch.buffer, "<u4"), *parts])
    is_narrow = bool((numbers < 1 << 16).all())
    flags = COMPUTES * (step.computes is not None) | ENDS * step.ends | SKIPS * step.skips
    flags |= IS_NARROW * is_narrow | IS_APPLIED * step.is_applied | HAS_ORDERS * bool(orders)
    counts = (len(batch), len(keys) // KEY_SIZE, num_chunks, num_tokens, num_wanted)
    try:
        header = HEADER.pack(MAGIC, VERSION, flags, batch.number, *counts, 0, batch.epoch)
    except struct.error as error:
        raise BadStep(reason=f"batch {batch.number} of epoch {batch.epoch}: {error}") from None
    whole = bytearray(header)
    whole += numbers.astype("<u2" if is_narrow else "<u4").tobytes()
    whole += keys
    if len(whole) > STEP_BYTES_MAX:
        raise BadStep(reason=f"{len(whole)} bytes, at most {STEP_BYTES_MAX}")
    whole[CHECKSUM_AT] = zlib.crc32(whole).to_bytes(4, "little")
    return bytes(whole)


def step_size(data: bytes) -> int:
    """Read the length of a step from its header. Raises BadStep."""
    return _read_header(data)[0]


def decode_step(data: bytes) -> RankStep:
    """Read a step from bytes; the inverse of `encode_step`. Raises BadStep."""
    size, (flags, number, counts, checksum, epoch) = _read_header(data)
    if len(data) != size:
        raise BadStep(reason=f"{len(data)} bytes, its header says {size}")
    whole = bytearray(data)
    whole[CHECKSUM_AT] = bytes(4)
    found = zlib.crc32(whole)
    if found != checksum:
        raise BadStep(reason=f"its CRC-32 is {found:08x}, its header says {checksum:08x}")
    num_commands, num_keys, num_chunks, num_tokens, num_wanted = counts
    stop = size - num_keys * KEY_SIZE
    width = "<u2" if flags & IS_NARROW else "<u4"
    numbers = np.frombuffer(data[HEADER.size : stop], width).astype("<u4", copy=False)
    first = len(COLUMNS) * num_commands
    columns, parts = numbers[:first], []
    for count in (num_chunks, num_chunks, num_chunks, num_tokens, num_wanted):
        parts.append(numbers[first : first + count])
        first += count
    computes = RankPass(**dict(zip(FIELDS, parts, strict=True)))
    orders: tuple[RankOrder, ...] = ()
    keys = data[stop:]
    if flags & COMPUTES:
        _check_pass(computes)
    elif flags & HAS_ORDERS:
        orders = _read_orders(computes, keys)
        keys = keys[: -KEY_SIZE * num_chunks]
    elif num_chunks or num_tokens or num_wanted:
        raise BadStep(reason="it has sequences and no forward pass")
    return RankStep(
        batch=Batch(number, bytearray(columns), keys, epoch),
        computes=computes if flags & COMPUTES else None,
        orders=orders,
        is_applied=bool(flags & IS_APPLIED),
        skips=bool(flags & SKIPS),
        ends=bool(flags & ENDS),
    )


_Header: TypeAlias = tuple[int, int, tuple[int, ...], int, int]


def _read_header(data: bytes) -> tuple[int, _Header]:
    """Read the length of a step, and its flags, number, counts, checksum and epoch."""
    if len(data) < HEADER.size:
        raise BadStep(reason=f"{len(data)} bytes, a header has {HEADER.size}")
    magic, version, flags, number, *counts, checksum, epoch = HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise BadStep(reason=f"it begins with {magic!r}, version {version}, not version {VERSION}")
    if flags & ~_ALL_FLAGS or (flags & COMPUTES and flags & HAS_ORDERS) or number < 0:
        raise BadStep(reason=f"flags {flags:#x}, batch {number}")
    num_commands, num_keys, num_chunks, num_tokens, num_wanted = counts
    num_numbers = len(COLUMNS) * num_commands + 3 * num_chunks + num_tokens + num_wanted
    width = 2 if flags & IS_NARROW else 4
    size = HEADER.size + width * num_numbers + num_keys * KEY_SIZE
    if size > STEP_BYTES_MAX:
        raise BadStep(reason=f"{size} bytes, at most {STEP_BYTES_MAX}")
    return size, (flags, number, tuple(counts), checksum, epoch)


def _check_pass(computes: RankPass) -> None:
    """Raise BadStep unless the arrays of a pass are consistent."""
    starts, ends, num_tokens = computes.starts, computes.ends, len(computes.tokens)
    if not len(starts) or (ends <= starts).any() or (ends - starts).sum(dtype=int) != num_tokens:
        raise BadStep(reason=f"{len(starts)} sequences whose positions are not {num_tokens} tokens")
    if (computes.wanted >= num_tokens).any():
        raise BadStep(reason=f"a wanted place is not below {num_tokens}")


def _order_parts(orders: tuple[RankOrder, ...]) -> tuple[Numbers, ...]:
    """Return the numbers of orders in the places of a pass's."""
    rows = [(each.kind, each.ticket, each.slot) for each in orders]
    columns = np.array(rows, np.uint32).reshape(-1, 3).T
    return (*columns, columns[0, :0], columns[0, :0])


def _read_orders(parts: RankPass, keys: bytes) -> tuple[RankOrder, ...]:
    """Read orders from the places of a pass. keys: theirs come last. Raises BadStep."""
    count = len(parts.rows)
    if not count or len(parts.tokens) or len(parts.wanted) or len(keys) < KEY_SIZE * count:
        raise BadStep(reason=f"{count} orders with {len(keys) // KEY_SIZE} keys")
    if (parts.rows >= len(OrderKind)).any():
        raise BadStep(reason=f"an order of kind {parts.rows.max()}, at most {max(OrderKind)}")
    own = keys[-KEY_SIZE * count :]
    numbers = zip(parts.rows.tolist(), parts.starts.tolist(), parts.ends.tolist(), strict=True)
    return tuple(
        RankOrder(OrderKind(kind), ticket, slot, own[KEY_SIZE * at : KEY_SIZE * (at + 1)])
        for at, (kind, ticket, slot) in enumerate(numbers)
    )
