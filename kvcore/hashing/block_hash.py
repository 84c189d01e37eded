# SPDX-License-Identifier: Apache-2.0
"""Keys of full blocks: a chain of hashes over an unambiguous encoding.

Invariants: a block's hash covers its parent's hash, its tokens and its tagged extra keys. The key
under which a block is found is that hash and the group, so two groups never share a block. The
chain grows with the request, and no block is hashed twice. There are four hashings:

"sha256", the default. All integers are little-endian but the group, which is big-endian as in the
field.

    root       = SHA-256("kvcore root" 0x00 seed)
    block hash = SHA-256(parent[32] block)
    block      = num_tokens[u32] token[u32]... num_extra[u8] (tag[u8] size[u32] bytes)...
    key        = block hash[32] group[u32]

"sha256_cbor", equal bit for bit to vLLM's for the same requests with `sha256_cbor` and the seed in
PYTHONHASHSEED (or "vllm-none-hash", its default). CBOR is canonical (RFC 8949, 4.2.3).

    root       = SHA-256(CBOR(seed as text))
    block hash = SHA-256(CBOR([parent, [token, ...], null or [extra key, ...]]))
    extra key  = ["lora", name, path] | ["mm", identifier, offset] | ["cache_salt", salt]
                 | ["prompt_embeds", digest]
                 | ["mm cut", identifier, offset, end] | ["prompt_embeds cut", digest, rows left]

The last line is kvcore's own, since vLLM never cuts a prompt. Without cuts, keys equal vLLM's.

"siphash", SipHash-1-3 with 128 bits, under the parent's digest as its key: a quarter of the time
of SHA-256 in the twin. Who chooses prompts, but knows neither seed nor hashes, cannot search for
two that collide. Who sees hashes can.

"xxh3", XXH3-128 without a key, twice as fast again: whoever chooses prompts can search for two that
collide, so it is for tenants that trust each other.

    digest     = SHA-256("kvcore root" 0x00 seed)[:8, 24:] | SipHash(parent's digest[16], block)
    digest     = XXH3-128("kvcore root" 0x00 seed) | XXH3-128(parent's digest[16] block)
    root, hash = digest[:8] mark[16] digest[8:]
    mark       = "siphash:  no SHA" | "xxh3-128: no SHA"

The mark tells such a hash from a SHA-256. Both ends are digest, since an index and events read only
those.

Different blocks have different inputs: after the parent, of fixed size, the default's encoding is
prefix-free, and so is CBOR. Inputs of different hashings differ too: byte 35 is the high byte of a
block's token count, below 0x80, or the head of a CBOR array, above. Twin:
rust/src/hashing/block_hash.rs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from functools import cache

from kvcore.hashing.extra_keys import vllm_key
from kvcore.types.extra_inputs import MAX_EXTRA_KEYS, NO_EXTRA_KEYS, ExtraKey, ExtraKeys
from kvcore.types.keys import Hashing

_ROOT = b"kvcore root\0"
_SIP_MARK = b"siphash:  no SHA"
_XXH3_MARK = b"xxh3-128: no SHA"
_HALF = 8
_UINT64 = 2**64 - 1


def root_hash(seed: bytes, hashing: Hashing = "sha256") -> bytes:
    """Return the parent of each request's first block. seed: UTF-8 text for sha256_cbor."""
    match hashing:
        case "sha256":
            return hashlib.sha256(_ROOT + seed).digest()
        case "sha256_cbor":
            return hashlib.sha256(_cbor(seed.decode())).digest()
        case "siphash":
            return _marked(_digest(hashlib.sha256(_ROOT + seed).digest()), _SIP_MARK)
        case "xxh3":
            return _marked(_xxh3(_ROOT + seed), _XXH3_MARK)


def hash_block(
    parent: bytes,
    tokens: Sequence[int],
    extra_keys: Sequence[ExtraKey] = (),
    hashing: Hashing = "sha256",
) -> bytes:
    """Return the hash of one full block.

    parent: hash of the block before, or the root. tokens: ids below 2**32. extra_keys: (tag, value)
    pairs, at most MAX_EXTRA_KEYS, in an order that is part of the key.
    """
    assert len(extra_keys) <= MAX_EXTRA_KEYS
    match hashing:
        case "sha256":
            return hashlib.sha256(parent + _encode(tokens, extra_keys)).digest()
        case "sha256_cbor":
            extra = tuple(vllm_key(tag, value) for tag, value in extra_keys) or None
            return hashlib.sha256(_cbor((parent, tuple(tokens), extra))).digest()
        case "siphash":
            return _marked(_siphash(_digest(parent), _encode(tokens, extra_keys)), _SIP_MARK)
        case "xxh3":
            return _marked(_xxh3(_digest(parent) + _encode(tokens, extra_keys)), _XXH3_MARK)


def hash_blocks(
    parent: bytes,
    tokens: Sequence[int],
    block_size: int,
    *,
    start: int = 0,
    extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    hashing: Hashing = "sha256",
) -> Iterator[bytes]:
    """Return the hashes of the full blocks of these tokens, in order; a partial tail has none.

    start: position of the first of these tokens in the request; a block must start there. parent:
    hash of the block before.
    """
    for first in range(0, len(tokens) - block_size + 1, block_size):
        end = first + block_size
        keys = extra_keys.of_block(start + first, start + end, block_size)
        parent = hash_block(parent, tokens[first:end], keys, hashing)
        yield parent


def _encode(tokens: Sequence[int], extra_keys: Sequence[ExtraKey]) -> bytes:
    size = len(tokens)
    if not extra_keys:
        return _form(size).pack(size, *tokens, 0)
    parts = [_form(size).pack(size, *tokens, len(extra_keys))]
    for tag, value in extra_keys:
        parts.append(struct.pack("<BI", tag, len(value)) + value)
    return b"".join(parts)


@cache
def _form(num_tokens: int) -> struct.Struct:
    """The layout of the bytes before the extra keys."""
    return struct.Struct(f"<{num_tokens + 1}IB")


# Compiled libraries are loaded only if their hashing is configured: the default needs none.
def _cbor(value: object) -> bytes:
    from cbor2 import dumps

    return dumps(value, canonical=True)


def _xxh3(data: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(data)


def _digest(block_hash: bytes) -> bytes:
    """The 16 bytes of a hash around its mark."""
    return block_hash[:_HALF] + block_hash[-_HALF:]


def _marked(digest: bytes, mark: bytes) -> bytes:
    return digest[:_HALF] + mark + digest[_HALF:]


def _siphash(key: bytes, data: bytes) -> bytes:
    """SipHash-1-3 with 128 bits (Aumasson and Bernstein, 2012): a round for each word of data."""
    low, high = struct.unpack("<2Q", key)
    v0, v1 = low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D ^ 0xEE
    v2, v3 = low ^ 0x6C7967656E657261, high ^ 0x7465646279746573
    padded = data + bytes(-(len(data) + 1) % 8) + bytes([len(data) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3 ^ word)
        v0 ^= word
    halves = []
    v2 ^= 0xEE
    for _ in range(2):
        for _ in range(3):
            v0, v1, v2, v3 = _sip_round(v0, v1, v2, v3)
        halves.append(v0 ^ v1 ^ v2 ^ v3)
        v1 ^= 0xDD
    return struct.pack("<2Q", *halves)


def _sip_round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    v0 = v0 + v1 & _UINT64
    v2 = v2 + v3 & _UINT64
    v1 = _rotated(v1, 13) ^ v0
    v3 = _rotated(v3, 16) ^ v2
    v2 = v2 + v1 & _UINT64
    v0 = _rotated(v0, 32) + v3 & _UINT64
    return v0, _rotated(v1, 17) ^ v2, _rotated(v2, 32), _rotated(v3, 21) ^ v0


def _rotated(number: int, num_bits: int) -> int:
    return (number << num_bits | number >> 64 - num_bits) & _UINT64
