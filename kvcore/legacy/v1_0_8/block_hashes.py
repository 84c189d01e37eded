# SPDX-License-Identifier: Apache-2.0
"""Records of block hashes as in vLLM 0.8.5's V1, and the keys under which the core stores them.

A record consists of hash number, tokens and extra keys, and all three identify a block; the chain
uses the number alone. A hash function takes one tuple (parent, tokens, extra keys). The core stores
a record under `content_key`: two records of ints, strings and bytes have the same content key if
and only if they are equal.
Source: S001-01 to 05.
"""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvcore import _twin
from kvcore.hashing import block_hash
from kvcore.legacy.blocks.blocks import BackendName
from kvcore.types.errors import WrongArgument
from kvcore.types.keys import HASH_SIZE, make_key

HashFunction = Callable[[tuple[int, tuple[int, ...], tuple[Any, ...] | None]], int]

_ABOVE, _BELOW, _OTHER = (make_key(b"", group) for group in range(3))
"""Endings of keys: for a number of at least 0, for a negative number, and for all other records."""


class _Record(NamedTuple):
    hash_value: int
    token_ids: tuple[int, ...]
    extra_keys: Any = None


class BlockHashType(_Record):
    """The key under which a full block is found.

    hash_value: hash of all tokens up to its end. token_ids: its own tokens. extra_keys: other
    inputs on which its content depends.
    """

    _key = b""


def sha256(value: object) -> int:
    """Return the SHA-256 of a value's pickle, as a big-endian number."""
    pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return int.from_bytes(hashlib.sha256(pickled).digest(), "big")


def make_none_hash(seed: str | None) -> int:
    """Return the parent hash of first blocks, from a seed or random."""
    return int.from_bytes(os.urandom(32), "big") if seed is None else sha256(seed)


NONE_HASH = make_none_hash(os.environ.get("PYTHONHASHSEED"))


def keys_of(records: Sequence[Any], backend: BackendName = "python") -> list[bytes]:
    """Return the core's keys of records, which may be plain tuples; each is computed once.

    backend: whose hash function computes the keys; the results are equal. Raises WrongArgument.
    """
    try:
        return [record._key or _make_key(record, backend) for record in records]
    except AttributeError:
        return keys_of([read_record(record) for record in records], backend)


def _make_key(record: BlockHashType, backend: BackendName) -> bytes:
    hash_block = _twin.hash_block if backend == "rust" else block_hash.hash_block
    record._key = content_key(record, hash_block)
    return record._key


def read_record(record: Any) -> BlockHashType:
    """Return a record or plain tuple as a record. Raises WrongArgument for anything else."""
    if isinstance(record, BlockHashType):
        return record
    if isinstance(record, tuple) and len(record) in (2, 3):
        return BlockHashType(*record)
    raise WrongArgument(name="block_hash", expected="a BlockHashType", value=record)


def content_key(record: _Record, hash_block: Callable[..., bytes] = block_hash.hash_block) -> bytes:
    """Return the key under which the core stores a record. Raises WrongArgument."""
    number, tokens, extra = record
    if extra is None:
        try:
            number = operator.index(number)
            parent, end = (~number, _BELOW) if number < 0 else (number, _ABOVE)
            return hash_block(parent.to_bytes(HASH_SIZE, "big"), tokens) + end
        except (TypeError, ValueError, AttributeError, OverflowError, struct.error):
            if hash_block is not block_hash.hash_block:
                return content_key(record)  # which accepts more kinds of ints
    try:
        form = ascii(_canonical((number, tuple(tokens), extra))).encode()
    except (TypeError, ValueError):
        expected = "a number, tokens and extra keys"
        raise WrongArgument(name="a block hash", expected=expected, value=record) from None
    return hashlib.sha256(form).digest() + _OTHER


def _canonical(value: Any) -> Any:
    """Return a form of a value whose text is equal exactly for equal values. Raises TypeError."""
    if isinstance(value, tuple):
        return tuple(map(_canonical, value))
    if isinstance(value, str):
        return {value.encode("utf-8", "surrogatepass")}
    return value if value is None or isinstance(value, bytes) else int(operator.index(value))
