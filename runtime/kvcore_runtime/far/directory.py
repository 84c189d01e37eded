# SPDX-License-Identifier: Apache-2.0
"""A store of pages as files in a directory, with a limit of bytes.

Above the limit, the least recently used files without a lease are removed, down to 90 % of it.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.far.kept_files import SUFFIX, KeptFiles
from kvcore_runtime.far.private_files import (
    is_file,
    make_private,
    read_file,
    remove_old,
    write_file,
)


class DirectoryStore:
    """See `BlockingStore`; the directory is made with mode 700.

    max_bytes: of all files; each of several processes with the same limit may exceed it by 5 %
    before it counts what the others wrote. sync: wait for the disk; without it, the checksum finds
    pages that a power cut left incomplete. Raises TierUnusable, InvalidTier.
    """

    def __init__(self, path: Path | str, *, max_bytes: int | None = None, sync: bool = False):
        if max_bytes is not None and max_bytes < 1:
            raise InvalidTier(name="max_bytes", value=max_bytes, expected="at least one page")
        self.path, self._max_bytes, self._sync = Path(path), max_bytes, sync
        make_private(self.path)
        self._kept = None if max_bytes is None else KeptFiles(self.path, max_bytes)
        remove_old(self.path)

    def attach(self, memory: View, slot_bytes: int) -> None:
        """See `FarTier`."""
        del memory
        if self._max_bytes is not None and self._max_bytes < slot_bytes:
            expected = f"at least one page, {slot_bytes} bytes"
            raise InvalidTier(name="max_bytes", value=self._max_bytes, expected=expected)

    def file(self, name: str) -> Path:
        """Return the path of the page of a name, in a folder of two digits of its key."""
        folder, _, key = name.rpartition("/")
        return self.path / folder / key[:2] / f"{key}{SUFFIX}"

    def find(self, names: Sequence[str], lease_s: float) -> list[bool]:
        """See `BlockingStore`; a page that is found is not evicted for `lease_s`."""
        files = [self.file(name) for name in names]
        found = [is_file(file) for file in files]
        if self._kept is not None:
            here = [at for at, is_here in enumerate(found) if is_here]
            self._kept.lease([names[at] for at in here], lease_s)
            for at in here:
                with contextlib.suppress(OSError):
                    os.utime(files[at], follow_symlinks=False)
        return found

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        """See `BlockingStore`."""
        return [self._read(name, view) for name, view in zip(names, views, strict=True)]

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        statuses = [self._write(name, view) for name, view in zip(names, views, strict=True)]
        if self._kept is not None:
            self.remove(self._kept.leaving())
        return statuses

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`; anything but a file stays."""
        for name in names:
            with contextlib.suppress(OSError):
                self.file(name).unlink()
            if self._kept is not None:
                self._kept.removed(name)

    def close(self) -> None:
        """See `BlockingStore`; no file is kept open."""

    def _read(self, name: str, view: View) -> int | FarStatus:
        got = read_file(self.file(name), view)
        if self._kept is not None and not isinstance(got, FarStatus):
            self._kept.used(name, got)
        return got

    def _write(self, name: str, view: View) -> FarStatus:
        file = self.file(name)
        if is_file(file):
            return FarStatus.OK
        status = write_file(file, view, sync=self._sync)
        if self._kept is not None and status is FarStatus.OK:
            self._kept.used(name, len(view), is_new=True)
        return status
