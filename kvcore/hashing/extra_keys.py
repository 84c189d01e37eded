# SPDX-License-Identifier: Apache-2.0
"""Reads the extra keys of a request, and writes them in vLLM's form.

Their forms are defined in kvcore/types/extra_inputs.py. Twin: rust/src/hashing/extra_keys.rs.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from kvcore.types.errors import CountMismatch, InvalidExtraKey, UnsortedMedia
from kvcore.types.extra_inputs import (
    CACHE_SALT,
    CUT_EMBEDS,
    CUT_MEDIA,
    LORA,
    MAX_MEDIA,
    MEDIA,
    PROMPT_EMBEDS,
    ExtraKeys,
    MediaItem,
    check_text,
)
from kvcore.types.values import Request


def read_extra_keys(request: Request, num_tokens: int, hash_block_size: int) -> ExtraKeys:
    """Return the extra keys of a request whose prompt has `num_tokens` tokens.

    Raises InvalidExtraKey for an empty salt and for more media items in a block than its hash can
    count, UnsortedMedia for items that are not sorted by offset or reach past the prompt,
    CountMismatch for embeddings that do not have the prompt's size.
    """
    if request.cache_salt is not None:
        check_text("cache_salt", request.cache_salt)
    media = tuple(request.media)
    _check_media(request.request_id, media, num_tokens, hash_block_size)
    embeds: tuple[bytes, ...] = ()
    if request.prompt_embeds is not None:
        data, row = request.prompt_embeds.data, request.prompt_embeds.bytes_per_token
        if len(data) != num_tokens * row:
            raise CountMismatch(
                request=request.request_id,
                name="bytes of prompt embeddings",
                given=len(data),
                expected=num_tokens * row,
            )
        step = hash_block_size * row
        parts = (data[first : first + step] for first in range(0, len(data), step))
        embeds = tuple(hashlib.sha256(part).digest() for part in parts)
    num_rows = num_tokens if embeds else 0
    return ExtraKeys(request.lora, media, request.cache_salt, embeds, num_rows)


def vllm_key(tag: int, value: bytes) -> tuple[Any, ...]:
    """Return an extra key in vLLM's form: the name of its kind, then its parts.

    The kinds of cut items are kvcore's own, since vLLM never cuts a prompt.
    """
    if tag == LORA:
        (size,) = struct.unpack_from("<I", value)
        return ("lora", value[4 : 4 + size].decode(), value[4 + size :].decode())
    if tag == MEDIA:
        (offset,) = struct.unpack_from("<i", value)
        return ("mm", value[4:].decode(), offset)
    if tag == CACHE_SALT:
        return ("cache_salt", value.decode())
    if tag == CUT_MEDIA:
        offset, end = struct.unpack_from("<iI", value)
        return ("mm cut", value[8:].decode(), offset, end)
    if tag == CUT_EMBEDS:
        (num_left,) = struct.unpack_from("<I", value)
        return ("prompt_embeds cut", value[4:], num_left)
    assert tag == PROMPT_EMBEDS, f"no extra key has tag {tag}"
    return ("prompt_embeds", value)


def _check_media(
    request_id: str, media: Sequence[MediaItem], num_tokens: int, block_size: int
) -> None:
    first = 0
    for position, item in enumerate(media):
        if item.offset < first or item.end > num_tokens:
            raise UnsortedMedia(
                request=request_id,
                position=position,
                offset=item.offset,
                length=item.length,
                first=first,
                num_tokens=num_tokens,
            )
        first = item.offset
    last_blocks = sorted((item.end - 1) // block_size for item in media)
    for position, item in enumerate(media):
        num_items = position + 1 - bisect_left(last_blocks, item.offset // block_size)
        if num_items > MAX_MEDIA:
            name = f"the number of media items in the block where item {position} begins"
            raise InvalidExtraKey(name=name, expected=f"at most {MAX_MEDIA}", value=num_items)
