# SPDX-License-Identifier: Apache-2.0
"""Blocks in the files of a directory, named by key.

Rules: a file is there whole or not at all: it is written under a temporary name, synchronised, then
renamed; a renaming that a power failure undoes costs a block and nothing else, and what a writer
that died has left under a temporary name is nobody's block. A file says what it holds: a header
(magic, sizes, key, description of the layout), the page, and a SHA-256 of all that. Whoever reads
it believes nothing else: what is cut, torn or flipped is damaged, is removed, and can be stored
anew. Salt, adapters and media of a request are in its keys, so they need no rule here. The
description tells models and layouts apart, which keys do only where the hash seed does: a file of
another description is left alone. Keys of several processes agree where their hash seeds do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import uuid
from pathlib import Path

import torch
from torch import Tensor

from kvcore.hashing import KEY_SIZE
from kvcore_runtime.cache import Cache
from kvcore_runtime.cache_errors import (
    BlockDamaged,
    BlockForeign,
    BlockMissing,
    TierFailed,
    TierUnusable,
)

MAGIC = b"kvblock1"
SUFFIX = ".kv"
_HEADER = struct.Struct(f"<8sIQ{KEY_SIZE}s")  # magic, bytes of description, bytes of page, key
_CHECKSUM_SIZE = hashlib.sha256().digest_size


class DirectoryTier:
    """Pages by key in one directory, which is made if it is not there.

    description: what the pages are, written into each file and expected in it: `describe` makes one
    of a cache. num_written: files written here, without those that were there already. Raises
    TierUnusable where the directory cannot be made.
    """

    def __init__(self, path: Path, description: str) -> None:
        self.path = path
        self._description = description.encode()
        self.num_written = 0
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TierUnusable(place=path, reason=_say(error)) from error

    def __contains__(self, key: bytes) -> bool:
        return self.file(key).exists()

    def file(self, key: bytes) -> Path:
        """Where the page of this key is, or would be."""
        return self.path / f"{key.hex()}{SUFFIX}"

    def store(self, key: bytes, page: Tensor) -> None:
        """Write a page, unless one is there: the same key means the same content.

        page: its bytes, [n] uint8, contiguous, on the CPU. Raises TierFailed; then no file is left.
        """
        if key in self:
            return
        header = _HEADER.pack(MAGIC, len(self._description), page.numel(), key)
        parts = [header, self._description, page.numpy().tobytes()]
        checksum = _checksum(*parts)
        temporary = self.path / f".{key.hex()}.{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as file:
                for part in (*parts, checksum):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.file(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise TierFailed(key=key.hex(), place=self.path, reason=_say(error)) from error
        self.num_written += 1

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """Read a page of so many bytes, [num_bytes] uint8; a damaged file is removed.

        Raises BlockMissing, BlockDamaged, BlockForeign, TierFailed.
        """
        place = self.file(key)
        try:
            content = bytearray(place.read_bytes())
        except FileNotFoundError:
            raise BlockMissing(key=key.hex(), place=self.path) from None
        except OSError as error:
            raise TierFailed(key=key.hex(), place=self.path, reason=_say(error)) from error
        reason = self._damage(content, key)
        if reason is not None:
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
            raise BlockDamaged(key=key.hex(), place=self.path, reason=reason)
        _, description_size, page_size, _ = _HEADER.unpack_from(content)
        start = _HEADER.size + description_size
        description = bytes(content[_HEADER.size : start])
        if description != self._description or page_size != num_bytes:
            raise BlockForeign(
                key=key.hex(),
                place=self.path,
                found=f"{page_size} bytes of {description.decode(errors='replace')!r}",
                expected=f"{num_bytes} bytes of {self._description.decode()!r}",
            )
        return torch.frombuffer(content, dtype=torch.uint8)[start : start + page_size]

    def _damage(self, content: bytearray, key: bytes) -> str | None:
        """What is wrong with a file, None if it is whole and of this key."""
        if len(content) < _HEADER.size + _CHECKSUM_SIZE:
            return f"it has {len(content)} bytes, fewer than a header"
        magic, description_size, page_size, found = _HEADER.unpack_from(content)
        if magic != MAGIC:
            return f"it begins with {magic!r}, expected {MAGIC!r}"
        size = _HEADER.size + description_size + page_size + _CHECKSUM_SIZE
        if len(content) != size:
            return f"it has {len(content)} bytes, expected {size}"
        if _checksum(memoryview(content)[:-_CHECKSUM_SIZE]) != content[-_CHECKSUM_SIZE:]:
            return "its checksum does not fit its content"
        return None if found == key else f"it holds block {found.hex()}"


def describe(cache: Cache, model: str) -> str:
    """What the pages of a cache are: the model that wrote them, element type, shapes by group.

    model: a name that no other model has, as `identify` makes one; then also say it in the
    `hash_seed` of the manager, so that two models do not want the same files.
    """
    shapes = " ".join("x".join(map(str, group.layout.page_shape)) for group in cache.groups)
    return f"model {model} {cache.layout.dtype} groups {shapes}"


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _say(error: OSError) -> str:
    return error.strerror or type(error).__name__
