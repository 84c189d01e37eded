# SPDX-License-Identifier: Apache-2.0
"""How a record encodes a request that is added: its id, its tokens, and a bit set of its parts.

A record by keys has none of the parts from which keys are made, except those of a tenant.
Twin: rust/src/record/new_request.rs.
"""

from __future__ import annotations

from itertools import chain

import attrs

from kvcore.record.fields import (
    Field,
    Known,
    NotReadable,
    Source,
    get_tokens,
    put_hashes,
    put_text,
    put_tokens,
    put_varint,
    read_hashes,
)
from kvcore.record.names import salt_of
from kvcore.types.errors import KvcoreError
from kvcore.types.extra_inputs import LoRA, MediaItem, PromptEmbeds
from kvcore.types.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from kvcore.types.values import Request

LORA, MEDIA, SALT, EMBEDS, HASHES, SKIP, LEVELS = 1, 2, 4, 8, 16, 32, 64
"""The parts of a request, in the order in which they are written."""


def put_new_request(out: bytearray, request: Request, known: Known) -> None:
    """Write a new request. Raises NoForm."""
    put_text(out, known.name(request.request_id))
    put_tokens(out, request.tokens, known)
    if known.names is not None:
        salt = salt_of(known.names.config, request.cache_salt)
        request = attrs.evolve(request, lora=None, media=(), cache_salt=salt, prompt_embeds=None)
    lora, embeds, hashes = request.lora, request.prompt_embeds, request.block_hashes
    parts = LORA * (lora is not None) | MEDIA * bool(request.media)
    parts |= SALT * (request.cache_salt is not None) | EMBEDS * (embeds is not None)
    parts |= HASHES * (hashes is not None) | SKIP * bool(request.skip_reading_prefix_cache)
    parts |= LEVELS * (request.retention is not None)
    put_varint(out, parts)
    if lora is not None:
        put_text(out, lora.name)
        put_text(out, lora.path)
    if request.media:
        put_varint(out, len(request.media))
    for item in request.media:
        put_text(out, item.identifier)
        put_varint(out, item.offset)
        put_varint(out, item.length)
    if request.cache_salt is not None:
        put_text(out, request.cache_salt)
    if embeds is not None:
        put_varint(out, embeds.bytes_per_token)
        put_varint(out, len(embeds.data))
        out += embeds.data
    if hashes is not None:
        put_hashes(out, list(hashes))
    if request.retention is not None:
        put_retention(out, request.retention)


def read_new_request(source: Source) -> Request:
    """Read a new request. Raises NotReadable."""
    request_id, tokens, parts = source.text(), get_tokens(source), source.varint()
    try:
        lora = LoRA(source.text(), source.text()) if parts & LORA else None
        count = source.varint() if parts & MEDIA else 0
        media = [MediaItem(source.text(), source.varint(), source.varint()) for _ in range(count)]
        salt, embeds = source.text() if parts & SALT else None, None
        if parts & EMBEDS:
            size = source.varint()
            embeds = PromptEmbeds(source.sized(), size)
    except KvcoreError:
        raise NotReadable from None
    return Request(
        request_id,
        tokens,
        lora=lora,
        media=media,
        cache_salt=salt,
        prompt_embeds=embeds,
        block_hashes=read_hashes(source) if parts & HASHES else None,
        skip_reading_prefix_cache=bool(parts & SKIP),
        retention=read_retention(source) if parts & LEVELS else None,
    )


def put_retention(out: bytearray, levels: KvCacheRetentionConfig) -> None:
    """Write the ranges of a retention wish (start, end, level, ms), and those of decoded tokens."""
    ranges = levels.token_range_retention_configs
    numbers = [(r.token_start, r.token_end, r.priority, r.duration_ms) for r in ranges]
    decoded = (levels.decode_retention_priority, levels.decode_duration_ms)
    for number in (len(numbers), *chain(*numbers), *decoded):
        put_varint(out, number or 0)


def read_retention(source: Source) -> KvCacheRetentionConfig:
    """Read a retention wish; an end or ms of 0 means None. Raises NotReadable."""
    numbers = [source.varint() for _ in range(4 * source.varint() + 2)]
    parts = [*zip(*[iter(numbers[:-2])] * 4, strict=True)]
    try:
        ranges = [TokenRangeRetentionConfig(a, b or None, c, d or None) for a, b, c, d in parts]
        return KvCacheRetentionConfig(ranges, numbers[-2], numbers[-1] or None)
    except KvcoreError:
        raise NotReadable from None


NEW_REQUEST = Field(
    lambda out, value, known, _: put_new_request(out, value, known), read_new_request
)
RETENTION = Field(lambda out, value, *_: put_retention(out, value), read_retention)
