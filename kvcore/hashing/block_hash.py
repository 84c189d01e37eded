# SPDX-License-Identifier: Apache-2.0
"""Keys of full blocks: a chain of hashes over an unambiguous encoding.

Invariants: a block's hash covers its parent's hash, its tokens and its tagged extra keys. The key
under which a block is found is that hash and the group, so two groups never share a block. The
chain grows with the request, and no block is hashed twice. There are three hashings:

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

"xxh3", XXH3-128, several times as fast. It is not a cryptographic hash: an attacker who chooses
prompts can search for two that collide, so it is for tenants that trust each other. The mark in the
middle of a hash tells it from a SHA-256; both ends are digest, since an index and events read only
those.

    digest     = XXH3-128("kvcore root" 0x00 seed) or XXH3-128(parent's digest[16] block)
    root, hash = digest[:8] "xxh3-128: no SHA" digest[8:]

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
_XXH3_MARK = b"xxh3-128: no SHA"
_XXH3_HALF = 8


def root_hash(seed: bytes, hashing: Hashing = "sha256") -> bytes:
    """Return the parent of each request's first block. seed: UTF-8 text for sha256_cbor."""
    match hashing:
        case "sha256":
            return hashlib.sha256(_ROOT + seed).digest()
        case "sha256_cbor":
            return hashlib.sha256(_cbor(seed.decode())).digest()
        case "xxh3":
            return _xxh3(_ROOT + seed)


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
        case "xxh3":
            digest = parent[:_XXH3_HALF] + parent[-_XXH3_HALF:]
            return _xxh3(digest + _encode(tokens, extra_keys))


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

    digest = xxhash.xxh3_128_digest(data)
    return digest[:_XXH3_HALF] + _XXH3_MARK + digest[_XXH3_HALF:]
