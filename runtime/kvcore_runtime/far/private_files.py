# SPDX-License-Identifier: Apache-2.0
"""Directories and files that only the user of the process may read or write.

A file exists completely or not at all: it is written under a temporary name, then renamed. Only
regular files are read, so nothing else under a name can block a read or redirect it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from pathlib import Path

from kvcore.far.tier import FarStatus, View
from kvcore_runtime.cache.errors import TierUnusable

TEMPORARY = ".new-"
OLD_S = 3600.0
"""The age at which the writer of a temporary file is taken to have died."""

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FULL = (errno.ENOSPC, errno.EDQUOT)
# The errors of opening anything but a file: a link, a socket, a directory.
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def make_private(path: Path) -> None:
    """Make a directory, and missing ones above it, for this user alone, whatever the umask.

    Raises TierUnusable if it cannot be made, or if other users may use it. Its mode is then left as
    it is, since the directory may hold more than pages.
    """
    try:
        for missing in (each for each in reversed(path.parents) if not each.exists()):
            with contextlib.suppress(FileExistsError):  # another process was faster
                missing.mkdir(mode=DIRECTORY_MODE)
                missing.chmod(DIRECTORY_MODE)
        path.mkdir(mode=DIRECTORY_MODE)
        path.chmod(DIRECTORY_MODE)
    except OSError as error:
        if not path.is_dir():
            raise TierUnusable(place=path, reason=error.strerror or type(error).__name__) from error
        _check_private(path)


def _check_private(path: Path) -> None:
    info = path.stat()
    if info.st_uid != os.geteuid():
        reason = f"it belongs to user {info.st_uid}, not to user {os.geteuid()}"
        raise TierUnusable(place=path, reason=reason, owner=info.st_uid)
    if info.st_mode & _OTHERS:
        mode = stat.S_IMODE(info.st_mode)
        reason = f"other users may use it, its mode is {mode:o}"
        reason += f"; make it {DIRECTORY_MODE:o}, or name another directory"
        raise TierUnusable(place=path, reason=reason, mode=mode)


def is_file(file: Path) -> bool:
    """Return whether a regular file exists at this path."""
    with contextlib.suppress(OSError):
        return stat.S_ISREG(file.lstat().st_mode)
    return False


def read_file(file: Path, view: View) -> int | FarStatus:
    """Fill a view from a file. Returns the file's size, 0 if the sizes differ, or a status."""
    try:
        with open(file, "rb", buffering=0, opener=_open_at_once) as opened:
            info = os.fstat(opened.fileno())
            got = opened.readinto(view) if stat.S_ISREG(info.st_mode) else 0
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            return FarStatus.DAMAGED
        return FarStatus.MISSING if error.errno == errno.ENOENT else FarStatus.FAILED
    return info.st_size if got == len(view) else 0


def write_file(file: Path, view: View, *, sync: bool) -> FarStatus:
    """Write a file completely or not at all. Returns OK, FULL or FAILED. sync: await the disk."""
    temporary = file.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        make_private(file.parent)
        with open(temporary, "xb", buffering=0, opener=_open_private) as opened:
            written = opened.write(view)
            if sync:
                os.fsync(opened.fileno())
        if written == len(view):
            temporary.replace(file)
            return FarStatus.OK
        status = FarStatus.FULL
    except OSError as error:
        status = FarStatus.FULL if error.errno in _FULL else FarStatus.FAILED
    except TierUnusable:
        status = FarStatus.FAILED
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
    return status


def remove_old(path: Path) -> None:
    """Remove the temporary files of writers that died."""
    for file in path.rglob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - file.lstat().st_mtime > OLD_S:
                file.unlink()


def _open_private(path: str, flags: int) -> int:
    """Open a file for this user alone, whatever the umask."""
    descriptor = os.open(path, flags, FILE_MODE)
    os.fchmod(descriptor, FILE_MODE)
    return descriptor


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without following a link or waiting for the writer of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
