# SPDX-License-Identifier: Apache-2.0
"""Stores blocks in the files of a directory, named by key.

A file exists completely or not at all: it is written under a temporary name, synchronised, then
renamed. If a power failure undoes the renaming, only that block is lost, and the temporary file of
a dead writer is never used. A file describes itself: a header (magic, sizes, key, description of
the layout), the page, and a SHA-256 of both. A reader trusts only these: a cut, torn or flipped
file is damaged, and is removed. A store replaces a file that is not complete or has another
description. Salt, adapters and media of a request are in its keys, so they need no rule here. The
description distinguishes models and layouts, which keys do only if the hash seeds differ. Keys of
several processes agree if their hash seeds do. Only the user of the process may read or write the
directory and its files. The digest detects damage, not intent: it has no secret, so every writer of
the directory is trusted. Only regular files are read, so nothing else under a key's name can block
a read or redirect it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import struct
import uuid
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kvcore.types.keys import KEY_SIZE
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.errors import (
    BlockDamaged,
    BlockForeign,
    BlockMissing,
    TierError,
    TierFailed,
    TierUnusable,
)

MAGIC = b"kvblock1"
SUFFIX = ".kv"
_HEADER = struct.Struct(f"<8sIQ{KEY_SIZE}s")  # magic, bytes of description, bytes of page, key
_CHECKSUM_SIZE = hashlib.sha256().digest_size
_DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# The errors of opening something other than a file: a link, a socket, a directory.
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
# The length of another description in an error.
_SAID_SIZE_MAX = 1024


class DirectoryTier:
    """Pages by key in one directory, which is created with mode 700 if missing.

    description: of the pages, written into each file and expected in it: `describe` makes one for a
    cache. num_written: files written here, without those that existed already. Raises TierUnusable
    if the directory cannot be created, or if other users may use it; its mode is not changed, since
    the directory may hold more than blocks.
    """

    def __init__(self, path: Path | str, description: str) -> None:
        self.path = Path(path)
        self._description = description.encode()
        self.num_written = 0
        try:
            _make_private(self.path)
        except OSError as error:
            raise TierUnusable(place=self.path, reason=_say(error)) from error

    def __contains__(self, key: bytes) -> bool:
        """Whether a regular file has this key's name; only `load` checks its content."""
        try:
            return stat.S_ISREG(self.file(key).lstat().st_mode)
        except OSError:
            return False

    def file(self, key: bytes) -> Path:
        """Return the path of this key's page, which need not exist."""
        return self.path / f"{key.hex()}{SUFFIX}"

    def store(self, key: bytes, page: Tensor) -> None:
        """Write a page, unless a complete one exists: the same key means the same content.

        page: its bytes, [n] uint8, contiguous, on the CPU. Raises TierFailed; then no new file is
        left.
        """
        if self._has_whole(key, page.numel()):
            return
        header = _HEADER.pack(MAGIC, len(self._description), page.numel(), key)
        parts = [header, self._description, page.numpy().tobytes()]
        checksum = _checksum(*parts)
        temporary = self.path / f".{key.hex()}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb", opener=_open_private) as file:
                file.writelines((*parts, checksum))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.file(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise TierFailed(key=key.hex(), place=self.path, reason=_say(error)) from error
        self.num_written += 1

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        """Read a page of this many bytes, [num_bytes] uint8; a damaged file is removed.

        Raises BlockMissing, BlockDamaged, BlockForeign, TierFailed.
        """
        try:
            return self._read(key, num_bytes)
        except BlockDamaged:
            with contextlib.suppress(OSError):
                self.file(key).unlink(missing_ok=True)
            raise

    def _has_whole(self, key: bytes, num_bytes: int) -> bool:
        """Whether `load` would return this page now; reads it, so that a damaged file is
        rewritten.
        """
        try:
            self._read(key, num_bytes)
        except TierError:
            return False
        return True

    def _read(self, key: bytes, num_bytes: int) -> Tensor:
        """Read a page like `load`, but remove nothing."""
        try:
            with open(self.file(key), "rb", opener=_open_at_once) as file:
                info = os.fstat(file.fileno())
                if not stat.S_ISREG(info.st_mode):
                    raise self._damaged(key, "it is not a regular file")
                content = self._content(file, info.st_size, key, num_bytes)
        except FileNotFoundError:
            raise BlockMissing(key=key.hex(), place=self.path) from None
        except OSError as error:
            if error.errno in _NOT_REGULAR:
                raise self._damaged(key, "it is not a regular file") from error
            raise TierFailed(key=key.hex(), place=self.path, reason=_say(error)) from error
        start = _HEADER.size + len(self._description)
        return torch.frombuffer(content, dtype=torch.uint8)[start : start + num_bytes]

    def _content(self, file: BinaryIO, file_size: int, key: bytes, num_bytes: int) -> bytearray:
        """Return the page of a complete file with this key and description; sizes are checked
        before it is read.
        """
        header = file.read(_HEADER.size)
        if file_size < _HEADER.size + _CHECKSUM_SIZE or len(header) < _HEADER.size:
            raise self._damaged(key, f"it has {file_size} bytes, fewer than a header")
        magic, description_size, page_size, found = _HEADER.unpack(header)
        if magic != MAGIC:
            raise self._damaged(key, f"it begins with {magic!r}, expected {MAGIC!r}")
        size = _HEADER.size + description_size + page_size + _CHECKSUM_SIZE
        if file_size != size:
            raise self._damaged(key, f"it has {file_size} bytes, expected {size}")
        if description_size != len(self._description) or page_size != num_bytes:
            description = file.read(min(description_size, _SAID_SIZE_MAX))
            raise self._foreign(key, description, page_size, num_bytes)
        content = bytearray(header + file.read(size - _HEADER.size))
        if _checksum(memoryview(content)[:-_CHECKSUM_SIZE]) != content[-_CHECKSUM_SIZE:]:
            raise self._damaged(key, "its checksum does not fit its content")
        if found != key:
            raise self._damaged(key, f"it holds block {found.hex()}")
        description = bytes(content[_HEADER.size : _HEADER.size + description_size])
        if description != self._description:
            raise self._foreign(key, description, page_size, num_bytes)
        return content

    def _damaged(self, key: bytes, reason: str) -> BlockDamaged:
        return BlockDamaged(key=key.hex(), place=self.path, reason=reason)

    def _foreign(
        self, key: bytes, description: bytes, page_size: int, num_bytes: int
    ) -> BlockForeign:
        return BlockForeign(
            key=key.hex(),
            place=self.path,
            num_bytes=page_size,
            description=description.decode(errors="replace"),
            expected_bytes=num_bytes,
            expected_description=self._description.decode(),
        )


def describe(cache: Cache, model: str) -> str:
    """Describe a cache's pages: the model that wrote them, element type, shapes by group.

    model: a unique name of the model, for example from `identify`; also put it into the `hash_seed`
    of the manager, so that two models do not use the same files.
    """
    shapes = " ".join("x".join(map(str, group.layout.page_shape)) for group in cache.groups)
    return f"model {model} {cache.layout.dtype} groups {shapes}"


def _checksum(*parts: bytes | memoryview) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _make_private(path: Path) -> None:
    """Create a directory, and missing parents, only for this user, regardless of the umask. Raises
    TierUnusable, OSError.
    """
    try:
        for missing in (each for each in reversed(path.parents) if not each.exists()):
            missing.mkdir(mode=_DIRECTORY_MODE)
            missing.chmod(_DIRECTORY_MODE)
        path.mkdir(mode=_DIRECTORY_MODE)
        path.chmod(_DIRECTORY_MODE)
    except OSError:
        if not path.is_dir():
            raise
        info = path.stat()
        if info.st_uid != os.geteuid():
            reason = f"it belongs to user {info.st_uid}, not to user {os.geteuid()}"
            raise TierUnusable(place=path, reason=reason, owner=info.st_uid) from None
        if info.st_mode & _OTHERS:
            mode = stat.S_IMODE(info.st_mode)
            reason = f"other users may use it, its mode is {mode:o}"
            reason += f"; make it {_DIRECTORY_MODE:o}, or name another directory"
            raise TierUnusable(place=path, reason=reason, mode=mode) from None


def _open_private(path: str, flags: int) -> int:
    """Open a file only for this user, regardless of the umask."""
    descriptor = os.open(path, flags, _FILE_MODE)
    os.fchmod(descriptor, _FILE_MODE)
    return descriptor


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without following a link or waiting for the writer of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _say(error: OSError) -> str:
    return error.strerror or type(error).__name__
