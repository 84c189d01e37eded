# SPDX-License-Identifier: Apache-2.0
"""Extra inputs, which decide the content of blocks besides their tokens, and their extra keys.

Invariants: a LoRA adapter and prompt embeddings mark every block, a media item the blocks that
contain its tokens, a cache salt the first block, from which the chain carries it on. A block's keys
come in the order LoRA, media by position, salt, embeddings, each under a tag of its kind, so that
equal values of two kinds differ. A media item that ends where a block starts is not in the block
(X-08); one in the block has its offset from the block's start, negative if it began before. Items
may overlap, as the sound and the pictures of a video do: a block has the keys of all of them. If a
cut ends items or rows inside a block, the block's keys have special tags and give the position of
the cut. Nothing is kept between blocks: a block's items are searched among those that begin before
its end.
Twin: rust/src/types/extra_inputs.rs.

    1 LoRA             size of name[u32] name path
    2 media            offset from the block's start[i32] identifier
    3 cache salt       salt
    4 embeddings       SHA-256 of the bytes of the block's rows
    5 cut media        offset[i32] end from the block's start[u32] identifier
    6 cut embeddings   rows that are left[u32] SHA-256 of the bytes of the rows before the cut

Equal keys of blocks mean equal content, provided that an identifier stands for one content of one
length and that all rows have one size. Source: tests/core/hashing/test_key_contents.py.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from typing import Any

import attrs
from msgspec import Struct
from msgspec.structs import replace

from kvcore.types.errors import InvalidExtraKey

ExtraKey = tuple[int, bytes]
"""Tag and value."""

LORA, MEDIA, CACHE_SALT, PROMPT_EMBEDS, CUT_MEDIA, CUT_EMBEDS = 1, 2, 3, 4, 5, 6
MAX_EXTRA_KEYS = 255
MAX_MEDIA = MAX_EXTRA_KEYS - 3
"""Most media items in one block, besides one key of each other kind."""
TEXT = "a non-empty str"
HIDDEN = b"kvcore salt\0"
"""Prefix of the input of a hidden salt's digest."""
NO_ROWS = hashlib.sha256(b"").digest()
"""The digest of the embeddings of a block after the prompt."""


def _read_integer(name: str, value: Any, least: int) -> int:
    """Return a value as int. Raises InvalidExtraKey outside [least, 2**32)."""
    try:
        number = operator.index(value)
    except Exception:
        number = -1
    if not least <= number < 2**32:
        expected = f"an integer in [{least}, 2**32)"
        raise InvalidExtraKey(name=name, expected=expected, value=value)
    return number


def _read_offset(value: Any) -> int:
    return _read_integer("the offset of a media item", value, 0)


def _read_length(value: Any) -> int:
    return _read_integer("the length of a media item", value, 1)


def _read_row_size(value: Any) -> int:
    return _read_integer("bytes_per_token", value, 1)


def _read_bytes(data: Any) -> bytes:
    try:
        return data if isinstance(data, bytes) else memoryview(data).tobytes()
    except TypeError:
        name, expected = "the data of prompt embeddings", "a buffer of bytes"
        raise InvalidExtraKey(name=name, expected=expected, value=data) from None


@attrs.frozen
class LoRA:
    """An adapter: its name, and the path of its weights. Raises InvalidExtraKey."""

    name: str
    path: str = ""

    def __attrs_post_init__(self) -> None:
        check_text("the name of a LoRA adapter", self.name)
        if not isinstance(self.path, str) or self.path:
            check_text("the path of a LoRA adapter", self.path)


@attrs.frozen
class MediaItem:
    """An image, sound or video: a digest of its content, and the place of its tokens in the prompt.

    offset: position of its first token. length: number of its tokens, at least one. Raises
    InvalidExtraKey.
    """

    identifier: str
    offset: int = attrs.field(converter=_read_offset)
    length: int = attrs.field(converter=_read_length)

    def __attrs_post_init__(self) -> None:
        check_text("the identifier of a media item", self.identifier)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.length


@attrs.frozen
class PromptEmbeds:
    """Embeddings that stand for a prompt's tokens, one row per token.

    data: the concatenated rows, as a buffer of any format, which is copied.
    bytes_per_token: bytes of a row. Raises InvalidExtraKey.
    """

    data: bytes = attrs.field(converter=_read_bytes, repr=False)
    bytes_per_token: int = attrs.field(converter=_read_row_size)


class ExtraKeys(Struct, frozen=True, gc=False):
    """The extra keys of a request, checked.

    embeds: SHA-256 of the rows of each hash block of the prompt, a last partial one included; empty
    if the prompt is not given as embeddings. num_rows: number of tokens with a row. media_cut,
    rows_cut: whether a cut ended the media items that reach furthest, or the rows, inside a hash
    block.
    """

    lora: LoRA | None = None
    media: tuple[MediaItem, ...] = ()
    cache_salt: str | None = None
    embeds: tuple[bytes, ...] = ()
    num_rows: int = 0
    media_cut: bool = False
    rows_cut: bool = False

    def of_block(self, start: int, end: int, block_size: int) -> tuple[ExtraKey, ...]:
        """Return the keys of the block of tokens [start, end), in order.

        block_size: tokens per hash block. A coarser block has the digests of all its hash blocks.
        """
        if self is NO_EXTRA_KEYS:
            return ()
        keys: list[ExtraKey] = []
        cut_at = self.media_cut_at
        if self.lora is not None:
            name = self.lora.name.encode()
            keys.append((LORA, struct.pack("<I", len(name)) + name + self.lora.path.encode()))
        for item in self.media:
            if item.offset >= end:
                break
            if item.end <= start:
                continue
            offset, identifier = struct.pack("<i", item.offset - start), item.identifier.encode()
            if item.end == cut_at and item.end < end:
                keys.append((CUT_MEDIA, offset + struct.pack("<I", item.end - start) + identifier))
            else:
                keys.append((MEDIA, offset + identifier))
        if self.cache_salt is not None and start == 0:
            keys.append((CACHE_SALT, self.cache_salt.encode()))
        if self.embeds:
            positions = range(start // block_size, end // block_size)
            keys += (self._rows_of(position, block_size) for position in positions)
        return tuple(keys)

    @property
    def media_cut_at(self) -> int | None:
        """Return where a cut ended media items inside a hash block, if one did."""
        return max((item.end for item in self.media), default=None) if self.media_cut else None

    def cut(self, num_tokens: int, block_size: int) -> ExtraKeys:
        """Return the keys of a prompt that is cut to `num_tokens` tokens.

        Media and embeddings after the cut are dropped. A block that contains the cut never has its
        old key again, whatever tokens follow. A second cut gives the same result as if it were the
        only one.
        """
        inside = num_tokens % block_size > 0
        media = tuple(
            attrs.evolve(item, length=min(item.length, num_tokens - item.offset))
            for item in self.media
            if item.offset < num_tokens
        )
        ended = any(item.offset < num_tokens < item.end for item in self.media)
        media_cut = inside if ended else self.media_cut and media == self.media
        fewer = num_tokens < self.num_rows
        return replace(
            self,
            media=media,
            embeds=self.embeds[: -(-num_tokens // block_size)],
            num_rows=min(num_tokens, self.num_rows),
            media_cut=media_cut,
            rows_cut=inside if fewer else self.rows_cut,
        )

    def hide_salt(self, root: bytes) -> ExtraKeys:
        """Return these keys with a digest instead of the salt, for readers that may not see it.

        root: of the key chains. If it is secret, the digest does not help to guess the salt.
        """
        if self.cache_salt is None:
            return self
        digest = hashlib.sha256(HIDDEN + root + self.cache_salt.encode())
        return replace(self, cache_salt=digest.hexdigest())

    def _rows_of(self, position: int, block_size: int) -> ExtraKey:
        """Return the key of the rows of a hash block."""
        if position >= len(self.embeds):
            return PROMPT_EMBEDS, NO_ROWS
        if self.rows_cut and position == len(self.embeds) - 1:
            num_left = self.num_rows - position * block_size
            return CUT_EMBEDS, struct.pack("<I", num_left) + self.embeds[position]
        return PROMPT_EMBEDS, self.embeds[position]


NO_EXTRA_KEYS = ExtraKeys()


def is_extra_key(tag: int, value: bytes) -> bool:
    """Return whether the value of an extra key has the form of its tag."""
    if tag == LORA:
        size = 4 + int.from_bytes(value[:4], "little")
        return 4 < size <= len(value) and _is_text(value[4:size]) and _is_text(value[size:])
    if tag == MEDIA:
        return len(value) > 4 and _is_text(value[4:])
    if tag == CACHE_SALT:
        return len(value) > 0 and _is_text(value)
    if tag == CUT_MEDIA:
        return len(value) > 8 and _is_text(value[8:])
    if tag == CUT_EMBEDS:
        return len(value) == 4 + len(NO_ROWS)
    return tag == PROMPT_EMBEDS and len(value) == len(NO_ROWS)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_text(name: str, value: Any) -> None:
    """Raise InvalidExtraKey unless a value is a non-empty str that can be encoded as UTF-8."""
    try:
        if isinstance(value, str) and value.encode():
            return
    except UnicodeEncodeError:
        pass
    raise InvalidExtraKey(name=name, expected=TEXT, value=value)
