# SPDX-License-Identifier: Apache-2.0
"""Records of block hashes and their extra keys, as vLLM 0.8.5's V1 makes them.

A record is hash number, tokens and extra keys, and all three are the key; the chain goes by the
number. A hash function takes one tuple (parent, tokens, extra keys). Media count by their hash
alone, and one that ends where a block starts still counts: so engines of that release that share a
hash seed share their keys. The core knows a record by `content_key`: records of ints, strings and
bytes have the same one if and only if they are equal. Source: S001-01 to 05, 27 to 44.
"""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvcore import _twin
from kvcore.hashing import block_hash
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.legacy.v1_0_8.errors import BeyondMedia, NoMediaHash, TokensMissing
from kvcore.types.arguments import read_count
from kvcore.types.errors import CountMismatch, WrongArgument
from kvcore.types.keys import HASH_SIZE, make_key

HashFunction = Callable[[tuple[int, tuple[int, ...], tuple[Any, ...] | None]], int]

_ABOVE, _BELOW, _OTHER = (make_key(b"", group) for group in range(3))
"""Ends of keys: of numbers from 0 on, of those below, and of what is no number and tokens alone."""


class _Record(NamedTuple):
    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any = None


class BlockHashType(_Record):
    """What a full block is found by.

    hash_value: of its tokens and all before. token_ids: its own. extra_keys: what its content hangs
    on besides.
    """

    _key = b""


def sha256(value: object) -> int:
    """The SHA-256 of a value's pickle, as a big-endian number."""
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return int.from_bytes(hashlib.sha256(pickled).digest(), "big")


def make_none_hash(seed: str | None) -> int:
    """The parent of first blocks: of a seed, or random."""
    return int.from_bytes(os.urandom(32), "big") if seed is None else sha256(seed)


NONE_HASH = make_none_hash(os.environ.get("PYTHONHASHSEED"))


def need_extra_keys(request: Any) -> bool:
    """Whether a request's blocks hang on more than their tokens: on media, or on an adapter."""
    return bool(request.mm_positions) or request.lora_request is not None


def _gen_mm_extra_hash_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[list[Any], int]:
    """The hashes of the media in the block of these tokens, and the index to go on from.

    start_mm_idx: the first item to look at, from the end if it is negative. Items are sorted by
    position. Raises CountMismatch, BeyondMedia, NoMediaHash.
    """
    positions, hashes = request.mm_positions or [], request.mm_hashes or []
    count = len(positions)
    if count and len(hashes) != count:
        fields = {"request": repr(request.request_id), "given": len(hashes), "expected": count}
        raise CountMismatch(name="multi-modal hashes", **fields)
    if not count or _span(positions[-1])[1] < start_token_idx:
        return [], start_mm_idx
    if start_mm_idx < -count:
        raise BeyondMedia(index=start_mm_idx, num_items=count)
    keys: list[Any] = []
    for index in range(count)[start_mm_idx:]:
        if hashes[index] is None:
            raise NoMediaHash(name=f"the hash of media item {index}", expected="set", value="None")
        first, end = _span(positions[index])
        if first < end_token_idx and end >= start_token_idx:
            keys.append(hashes[index])
        if first >= end_token_idx or end > end_token_idx:
            return keys, index
    return keys, max(start_mm_idx, count)


def _gen_lora_extra_hash_keys(request: Any) -> list[int]:
    """The number of a request's adapter, if it has one."""
    return [request.lora_request.lora_int_id] if request.lora_request else []


def generate_block_hash_extra_keys(
    request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """The extra keys of the block of these tokens, None without any, and the next media index.

    Adapter first, then media. Raises what `_gen_mm_extra_hash_keys` raises.
    """
    media, index = _gen_mm_extra_hash_keys(request, start_token_idx, end_token_idx, start_mm_idx)
    return (*_gen_lora_extra_hash_keys(request), *media) or None, index


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: int | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHashType:
    """The record of one full block. parent_block_hash: None for the first block."""
    parent = NONE_HASH if parent_block_hash is None else parent_block_hash
    tokens = tuple(curr_block_token_ids)
    return BlockHashType(hash_function((parent, tokens, extra_keys)), tokens, extra_keys)


def hash_request_tokens(
    hash_function: HashFunction, block_size: int, request: Any
) -> list[BlockHashType]:
    """The records of a request's full blocks, over prompt and generated tokens.

    Raises InvalidCount, and what `generate_block_hash_extra_keys` raises.
    """
    size = read_count("block_size", block_size, 1)
    num_full = len(request.all_token_ids) // size
    return hash_more_tokens(hash_function, size, request, (), num_full)


def hash_more_tokens(
    hash_function: HashFunction,
    block_size: int,
    request: Any,
    known: Sequence[BlockHashType],
    num_full: int,
) -> list[BlockHashType]:
    """The records of a request's first num_full blocks behind those that are known.

    If some are known, the rest is taken for generated tokens, for which only the last media item is
    read, also if it ends at the block's start: so the original makes these keys. Raises
    TokensMissing, and what `generate_block_hash_extra_keys` raises.
    """
    tokens, end, start = request.all_token_ids, num_full * block_size, len(known) * block_size
    if start < end and len(tokens) < end:
        name = repr(request.request_id)
        raise TokensMissing(request=name, num_tokens=len(tokens), requested=end)
    number = read_record(known[-1]).hash_value if known and start < end else NONE_HASH
    marked, keys, next_mm_idx = need_extra_keys(request), None, 0
    records: list[BlockHashType] = []
    for first in range(start, end, block_size):
        own = tuple(tokens[first : first + block_size])
        if marked:
            keys, next_mm_idx = generate_block_hash_extra_keys(
                request, first, first + block_size, -1 if known else next_mm_idx
            )
        number = hash_function((number, own, keys))
        # The class's own `__new__`, which Python makes, takes three times as long.
        records.append(tuple.__new__(BlockHashType, (number, own, keys)))
    return records


def keys_of(records: Sequence[Any], backend: BackendName = "python") -> list[bytes]:
    """The keys by which the core knows records, also of plain tuples; made once per record.

    backend: whose hashing makes them; they are the same. Raises WrongArgument.
    """
    return [getattr(record, "_key", b"") or _make_key(record, backend) for record in records]


def _make_key(record: Any, backend: BackendName) -> bytes:
    record = read_record(record)
    record._key = content_key(
        record, _twin.hash_block if backend == "rust" else block_hash.hash_block
    )
    return bytes(record._key)


def read_record(record: Any) -> BlockHashType:
    """A record, also of a plain tuple. Raises WrongArgument if it is none."""
    if isinstance(record, BlockHashType):
        return record
    if isinstance(record, tuple) and len(record) in (2, 3):
        return BlockHashType(*record)
    raise WrongArgument(name="block_hash", expected="a BlockHashType", value=repr(record))


def content_key(record: _Record, hash_block: Callable[..., bytes] = block_hash.hash_block) -> bytes:
    """The key by which the core knows a record. Raises WrongArgument."""
    number, tokens, extra = record
    if extra is None:
        try:
            number = operator.index(number)
            parent, end = (~number, _BELOW) if number < 0 else (number, _ABOVE)
            return hash_block(parent.to_bytes(HASH_SIZE, "big"), tokens) + end
        except (TypeError, ValueError, AttributeError, OverflowError, struct.error):
            if hash_block is not block_hash.hash_block:
                return content_key(record)  # which takes more kinds of ints
    try:
        form = ascii(_canonical((number, tuple(tokens), extra))).encode()
    except (TypeError, ValueError):
        expected = "a number, tokens and extra keys"
        raise WrongArgument(name="a block hash", expected=expected, value=repr(record)) from None
    return hashlib.sha256(form).digest() + _OTHER


def _span(position: Any) -> tuple[int, int]:
    """First token of a media item and the one behind its last, of an object or a mapping."""
    if isinstance(position, Mapping):
        return position["offset"], position["offset"] + position["length"]
    return position.offset, position.offset + position.length


def _canonical(value: Any) -> Any:
    """A value that prints alike if and only if it is equal. Raises TypeError for other kinds."""
    if isinstance(value, tuple):
        return tuple(map(_canonical, value))
    if isinstance(value, str):
        return {value.encode("utf-8", "surrogatepass")}
    return value if value is None or isinstance(value, bytes) else int(operator.index(value))
