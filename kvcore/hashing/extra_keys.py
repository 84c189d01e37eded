# SPDX-License-Identifier: Apache-2.0
"""Extra keys: what decides a block's content besides its tokens.

Rules: a LoRA adapter and prompt embeddings mark every block, a media item the blocks that it has
tokens in, a cache salt the first block, from which the chain carries it on. A block's keys come in
the order LoRA, media by position, salt, embeddings, each under a tag of its kind, so that equal
values of two kinds differ. A media item that ends where a block starts is not in it (X-08); one
that is carries its offset from the block's start, negative if it began before. If a cut ends an
item or the rows inside a block, that block has a tag of its own for it and says where. Nothing is
kept between blocks: a block's items are found by bisection. Twin: rust/src/hashing/extra_keys.rs.

    1 LoRA             size of name[u32] name path
    2 media            offset from the block's start[i32] identifier
    3 cache salt       salt
    4 embeddings       SHA-256 of the bytes of the block's rows
    5 cut media        offset[i32] end from the block's start[u32] identifier
    6 cut embeddings   rows that are left[u32] SHA-256 of the bytes of the rows before the cut

Equal keys of a block mean equal content, if an identifier stands for one content of one length and
all rows are of one size. Source: tests/core/hashing/test_key_contents.py.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from msgspec import Struct
from msgspec.structs import replace as evolve

from kvcore.types.errors import (
    CountMismatch,
    InvalidExtraKey,
    UnsortedMedia,
    WrongArgument,
)

if TYPE_CHECKING:
    from kvcore.types.values import Request

ExtraKey = tuple[int, bytes]
"""Tag and value."""

LORA, MEDIA, CACHE_SALT, PROMPT_EMBEDS, CUT_MEDIA, CUT_EMBEDS = 1, 2, 3, 4, 5, 6
MAX_EXTRA_KEYS = 255
MAX_MEDIA = MAX_EXTRA_KEYS - 3
"""Media items in one block, beside one key of each other kind."""
TEXT = "a non-empty str"
HIDDEN = b"kvcore salt\0"
"""What the digest of a hidden salt begins with."""
NO_ROWS = hashlib.sha256(b"").digest()
"""The digest of the embeddings of a block behind the prompt."""


def _read_integer(name: str, value: Any, least: int) -> int:
    """The int that a value stands for. Raises InvalidExtraKey outside [least, 2**32)."""
    try:
        number = operator.index(value)
    except Exception:
        number = -1
    if not least <= number < 2**32:
        expected = f"an integer in [{least}, 2**32)"
        raise InvalidExtraKey(name=name, expected=expected, value=repr(value))
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
        raise InvalidExtraKey(name=name, expected=expected, value=repr(data)) from None


@attrs.frozen
class LoRA:
    """An adapter: its name, and where its weights come from. Raises InvalidExtraKey."""

    name: str
    path: str = ""

    def __attrs_post_init__(self) -> None:
        _check_text("the name of a LoRA adapter", self.name)
        if not isinstance(self.path, str) or self.path:
            _check_text("the path of a LoRA adapter", self.path)


@attrs.frozen
class MediaItem:
    """An image, sound or video: a digest of its content, and where its tokens stand in the prompt.

    offset: position of its first token. length: its tokens, at least one. Raises InvalidExtraKey.
    """

    identifier: str
    offset: int = attrs.field(converter=_read_offset)
    length: int = attrs.field(converter=_read_length)

    def __attrs_post_init__(self) -> None:
        _check_text("the identifier of a media item", self.identifier)

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.offset + self.length


@attrs.frozen
class PromptEmbeds:
    """Embeddings that stand for a prompt's tokens, one row a token.

    data: the rows one after the other, a buffer of any format, of which a copy is kept.
    bytes_per_token: bytes of a row. Raises InvalidExtraKey.
    """

    data: bytes = attrs.field(converter=_read_bytes, repr=False)
    bytes_per_token: int = attrs.field(converter=_read_row_size)


class ExtraKeys(Struct, frozen=True, gc=False):
    """The extra keys of a request, checked.

    embeds: SHA-256 of the rows of each hash block of the prompt, a last partial one included; empty
    if the prompt is not given as embeddings. num_rows: tokens that have a row. media_cut, rows_cut:
    a cut ended the last media item, or the rows, inside a hash block.
    """

    lora: LoRA | None = None
    media: tuple[MediaItem, ...] = ()
    cache_salt: str | None = None
    embeds: tuple[bytes, ...] = ()
    num_rows: int = 0
    media_cut: bool = False
    rows_cut: bool = False

    def of_block(self, start: int, end: int, block_size: int) -> tuple[ExtraKey, ...]:
        """The keys of the block of tokens [start, end), in order.

        block_size: tokens a hash block, of which this is one, or several as a coarser block: that
        has the digests of all of them.
        """
        keys: list[ExtraKey] = []
        if self.lora is not None:
            name = self.lora.name.encode()
            keys.append((LORA, struct.pack("<I", len(name)) + name + self.lora.path.encode()))
        first = bisect_right(self.media, start, key=lambda item: item.end)
        for item in self.media[first:]:
            if item.offset >= end:
                break
            offset, identifier = struct.pack("<i", item.offset - start), item.identifier.encode()
            if self.media_cut and item is self.media[-1] and item.end < end:
                keys.append((CUT_MEDIA, offset + struct.pack("<I", item.end - start) + identifier))
            else:
                keys.append((MEDIA, offset + identifier))
        if self.cache_salt is not None and start == 0:
            keys.append((CACHE_SALT, self.cache_salt.encode()))
        if self.embeds:
            positions = range(start // block_size, end // block_size)
            keys += (self._rows_of(position, block_size) for position in positions)
        return tuple(keys)

    def cut(self, num_tokens: int, block_size: int) -> ExtraKeys:
        """The keys of a prompt that is cut to so many tokens.

        Media and embeddings behind the cut go. A block that the cut goes through never has the key
        that the whole had, whatever tokens follow; a second cut leaves what it alone would leave.
        """
        inside = num_tokens % block_size > 0
        media = tuple(item for item in self.media if item.offset < num_tokens)
        media_cut = self.media_cut and media == self.media
        if media and media[-1].end > num_tokens:
            last = media[-1]
            left = MediaItem(last.identifier, last.offset, num_tokens - last.offset)
            media, media_cut = (*media[:-1], left), inside
        fewer = num_tokens < self.num_rows
        return evolve(
            self,
            media=media,
            embeds=self.embeds[: -(-num_tokens // block_size)],
            num_rows=min(num_tokens, self.num_rows),
            media_cut=media_cut,
            rows_cut=inside if fewer else self.rows_cut,
        )

    def hide_salt(self, root: bytes) -> ExtraKeys:
        """These keys with a digest in the place of the salt, for those who may not know it.

        root: of the key chains. The digest of a secret root tells nothing of a salt that can be
        guessed.
        """
        if self.cache_salt is None:
            return self
        digest = hashlib.sha256(HIDDEN + root + self.cache_salt.encode())
        return evolve(self, cache_salt=digest.hexdigest())

    def _rows_of(self, position: int, block_size: int) -> ExtraKey:
        """The key of the rows of a hash block."""
        if position >= len(self.embeds):
            return PROMPT_EMBEDS, NO_ROWS
        if self.rows_cut and position == len(self.embeds) - 1:
            num_left = self.num_rows - position * block_size
            return CUT_EMBEDS, struct.pack("<I", num_left) + self.embeds[position]
        return PROMPT_EMBEDS, self.embeds[position]


NO_EXTRA_KEYS = ExtraKeys()


def check_kinds(request: Request) -> None:
    """Raise WrongArgument unless each part of a request's extra keys is of its kind."""
    if not isinstance(request.media, Sequence) or isinstance(request.media, str):
        raise WrongArgument(
            name="media", expected="a sequence of MediaItem", value=repr(request.media)
        )
    parts: list[tuple[str, Any, type]] = [("media", item, MediaItem) for item in request.media]
    parts.append(("lora", request.lora, LoRA))
    parts.append(("prompt_embeds", request.prompt_embeds, PromptEmbeds))
    for name, part, kind in parts:
        if not isinstance(part, kind) and (name == "media" or part is not None):
            raise WrongArgument(name=name, expected=f"a {kind.__name__}", value=repr(part))


def read_extra_keys(request: Request, num_tokens: int, hash_block_size: int) -> ExtraKeys:
    """The extra keys of a request whose prompt has so many tokens.

    Raises InvalidExtraKey for an empty salt and for more media items in a block than its hash can
    count, UnsortedMedia for items that overlap, are out of order or reach past the prompt,
    CountMismatch for embeddings of another size than the prompt's.
    """
    if request.cache_salt is not None:
        _check_text("cache_salt", request.cache_salt)
    media = tuple(request.media)
    _check_media(request.request_id, media, num_tokens, hash_block_size)
    embeds: tuple[bytes, ...] = ()
    if request.prompt_embeds is not None:
        data, row = request.prompt_embeds.data, request.prompt_embeds.bytes_per_token
        if len(data) != num_tokens * row:
            raise CountMismatch(
                request=repr(request.request_id),
                name="bytes of prompt embeddings",
                given=len(data),
                expected=num_tokens * row,
            )
        step = hash_block_size * row
        parts = (data[first : first + step] for first in range(0, len(data), step))
        embeds = tuple(hashlib.sha256(part).digest() for part in parts)
    num_rows = num_tokens if embeds else 0
    return ExtraKeys(request.lora, media, request.cache_salt, embeds, num_rows)


def is_extra_key(tag: int, value: bytes) -> bool:
    """Whether a block can have this extra key: its value has the form of its tag."""
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


def vllm_key(tag: int, value: bytes) -> tuple[Any, ...]:
    """An extra key as vLLM has it: its kind by name, then what makes it up.

    vLLM cuts nothing: what a cut left has kinds that vLLM has not.
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
                request=repr(request_id),
                position=position,
                offset=item.offset,
                length=item.length,
                first=first,
                num_tokens=num_tokens,
            )
        first = item.end
    for position, (item, later) in enumerate(zip(media, media[MAX_MEDIA:], strict=False)):
        if later.offset // block_size == (item.end - 1) // block_size:
            expected = f"at most {MAX_MEDIA} items in a block"
            count = f"{MAX_MEDIA + 1} from item {position} on"
            raise InvalidExtraKey(name="media", expected=expected, value=count)


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_text(name: str, value: Any) -> None:
    """Raise InvalidExtraKey unless a value is a non-empty str that has a UTF-8 form."""
    try:
        if isinstance(value, str) and value.encode():
            return
    except UnicodeEncodeError:
        pass
    raise InvalidExtraKey(name=name, expected=TEXT, value=repr(value))
