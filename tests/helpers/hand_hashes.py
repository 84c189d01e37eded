# SPDX-License-Identifier: Apache-2.0
"""Hashes laid out by hand, and those that either language makes.

`chain` is the rule as the specification has it: a parent, and tokens and extra keys of each block.
Extra keys are written as vLLM has them: ("lora", name, path), ("mm", identifier, offset),
("cache_salt", salt), ("prompt_embeds", digest); what a cut left as ("mm cut", identifier, offset,
end), ("prompt_embeds cut", digest, rows left). Nothing of kvcore is used to make them.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any

import xxhash

from kvcore import Request
from kvcore.hashing import block_hash as hashing
from kvcore.hashing.extra_keys import read_extra_keys
from kvcore.types.keys import Hashing
from tests.conftest import Backend

Key = tuple[Any, ...]
TAGS = {"lora": 1, "mm": 2, "cache_salt": 3, "prompt_embeds": 4}
TAGS |= {"mm cut": 5, "prompt_embeds cut": 6}


def little(number: int) -> bytes:
    """Encode a number in four bytes, lowest first; a negative one in two's complement."""
    return bytes(number >> shift & 255 for shift in (0, 8, 16, 24))


def sha(*parts: bytes) -> bytes:
    """Hash the concatenated parts with SHA-256."""
    return hashlib.sha256(b"".join(parts)).digest()


def root(seed: bytes) -> bytes:
    """Return the parent of a first block, in the default hashing."""
    return sha(b"kvcore root", b"\0", seed)


def plain(tokens: Sequence[int], keys: Sequence[Key] = ()) -> bytes:
    """Return a block in the default encoding, without its parent."""
    parts = [little(len(tokens)), *(little(token) for token in tokens), bytes([len(keys)])]
    for kind, *values in keys:
        value = b""
        if kind == "lora":
            value += little(len(values[0].encode()))
        if kind == "mm":
            values = [little(values[1]), values[0]]
        if kind == "mm cut":
            values = [little(values[1]), little(values[2]), values[0]]
        if kind == "prompt_embeds cut":
            values = [little(values[1]), values[0]]
        value += b"".join(each if isinstance(each, bytes) else each.encode() for each in values)
        parts += [bytes([TAGS[kind]]), little(len(value)), value]
    return b"".join(parts)


def head(kind: int, number: int) -> bytes:
    """Return a head of CBOR: the kind in the high three bits, the number as short as it can be."""
    if number < 24:
        return bytes([kind << 5 | number])
    size, low = next((each, 24 + power) for power in range(3) if number < 256 ** (each := 2**power))
    return bytes([kind << 5 | low]) + number.to_bytes(size, "big")


def cbor(value: Any) -> bytes:
    """Encode a value in CBOR, for the kinds of values that a block contains."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return head(0, value) if value >= 0 else head(1, -1 - value)
        case bytes():
            return head(2, len(value)) + value
        case str():
            return head(3, len(value.encode())) + value.encode()
        case _:
            return head(4, len(value)) + b"".join(map(cbor, value))


def xxh3(*parts: bytes) -> bytes:
    """Hash the parts with XXH3-128, and put the mark of its kind into the middle."""
    digest = xxhash.xxh3_128(b"".join(parts)).intdigest().to_bytes(16, "big")
    return digest[:8] + b"xxh3-128: no SHA" + digest[8:]


def siphash(key: bytes, data: bytes, rounds: int = 1, more: int = 3) -> bytes:
    """SipHash with 128 bits as the reference has it, with this many rounds a word and at an end."""
    a, b, c, d = (
        int.from_bytes(text, "big") ^ int.from_bytes(key[place : place + 8], "little")
        for text, place in ((b"somepseu", 0), (b"dorandom", 8), (b"lygenera", 0), (b"tedbytes", 8))
    )
    b ^= 0xEE

    def turn(number: int, bits: int) -> int:
        return (number << bits | number >> 64 - bits) % 2**64

    def mix() -> None:
        nonlocal a, b, c, d
        a, b = (a + b) % 2**64, turn(b, 13) ^ (a + b) % 2**64
        a = turn(a, 32)
        c, d = (c + d) % 2**64, turn(d, 16) ^ (c + d) % 2**64
        a, d = (a + d) % 2**64, turn(d, 21) ^ (a + d) % 2**64
        c, b = (c + b) % 2**64, turn(b, 17) ^ (c + b) % 2**64
        c = turn(c, 32)

    full = len(data) // 8 * 8
    words = [data[at : at + 8] for at in range(0, full, 8)]
    words.append(data[full:] + bytes(7 - (len(data) - full)) + bytes([len(data) & 255]))
    for word in words:
        d ^= int.from_bytes(word, "little")
        for _ in range(rounds):
            mix()
        a ^= int.from_bytes(word, "little")
    c ^= 0xEE
    for _ in range(more):
        mix()
    first = a ^ b ^ c ^ d
    b ^= 0xDD
    for _ in range(more):
        mix()
    return first.to_bytes(8, "little") + (a ^ b ^ c ^ d).to_bytes(8, "little")


def sip_marked(digest: bytes) -> bytes:
    """Put the mark of a keyed hash into the middle."""
    return digest[:8] + b"siphash:  no SHA" + digest[-8:]


def block_hash(
    parent: bytes, tokens: Sequence[int], keys: Sequence[Key] = (), kind: Hashing = "sha256"
) -> bytes:
    """Return the hash of a block."""
    match kind:
        case "sha256":
            return sha(parent, plain(tokens, keys))
        case "sha256_cbor":
            return sha(cbor([parent, tokens, keys or None]))
        case "xxh3":
            return xxh3(parent[:8], parent[24:], plain(tokens, keys))
        case "siphash":
            return sip_marked(siphash(parent[:8] + parent[24:], plain(tokens, keys)))


def chain(
    parent: bytes,
    tokens: Sequence[int],
    block_size: int,
    keys: Sequence[Sequence[Key]],
    kind: Hashing = "sha256",
) -> list[bytes]:
    """Return the hashes of consecutive blocks. keys: those of each block."""
    hashes = []
    for position, each in enumerate(keys):
        first = position * block_size
        parent = block_hash(parent, tokens[first : first + block_size], each, kind)
        hashes.append(parent)
    return hashes


def root_of(backend: Backend, seed: bytes, kind: Hashing) -> bytes:
    """Return the root that a language makes of a seed."""
    if backend == "python":
        return hashing.root_hash(seed, kind)
    made: bytes = importlib.import_module("kvcore._rust").root_hash(seed, kind)
    return made


def hashes_of(
    backend: Backend,
    request: Request,
    parent: bytes,
    block_size: int,
    kind: Hashing,
    *,
    start: int = 0,
) -> list[bytes]:
    """Return the hashes that a language makes of a request's full blocks from token `start` on."""
    if backend == "rust":
        twin = importlib.import_module("kvcore._rust")
        made: list[bytes] = twin.hash_blocks(request, parent, block_size, start=start, hashing=kind)
        return made
    tokens = list(request.tokens)
    keys = read_extra_keys(request, len(tokens), block_size)
    blocks = hashing.hash_blocks(
        parent, tokens[start:], block_size, start=start, extra_keys=keys, hashing=kind
    )
    return list(blocks)
