# SPDX-License-Identifier: Apache-2.0
"""A store of pages as files in a directory, with a limit of bytes.

Above the limit, the least recently used files without a lease are removed, down to 90 % of it.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvcore.far.errors import InvalidTier
from kvcore.far.tier import FarStatus, View
from kvcore_runtime.far.private_files import (
    is_file,
    make_private,
    read_file,
    remove_old,
    write_file,
)

SUFFIX = ".kv"
SHARE_KEPT = 0.9


class DirectoryStore:
    """See `BlockingStore`; the directory is made with mode 700.

    max_bytes: of all files. sync: wait for the disk; without it, the checksum finds pages that a
    power cut left incomplete. Raises TierUnusable, InvalidTier.
    """

    def __init__(self, path: Path | str, *, max_bytes: int | None = None, sync: bool = False):
        if max_bytes is not None and max_bytes < 1:
            raise InvalidTier(name="max_bytes", value=max_bytes, expected="at least one page")
        self.path, self._max_bytes, self._sync = Path(path), max_bytes, sync
        self._lock = threading.Lock()
        self._files: dict[str, tuple[float, int]] = {}  # by name: time of its last use, bytes
        self._leases: dict[str, float] = {}
        make_private(self.path)
        for file in self.path.rglob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                name = str(file.relative_to(self.path).parent.parent / file.stem)
                info = file.lstat()
                self._files[name] = (max(info.st_atime, info.st_mtime), info.st_size)
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
        found = [is_file(self.file(name)) for name in names]
        end = time.time() + lease_s
        with self._lock:
            self._leases |= {name: end for name, here in zip(names, found, strict=True) if here}
        return found

    def get(self, names: Sequence[str], views: Sequence[View]) -> list[int | FarStatus]:
        """See `BlockingStore`."""
        return [self._read(name, view) for name, view in zip(names, views, strict=True)]

    def put(self, names: Sequence[str], views: Sequence[View]) -> list[FarStatus]:
        """See `BlockingStore`."""
        statuses = [self._write(name, view) for name, view in zip(names, views, strict=True)]
        self.remove(self._leaving())
        return statuses

    def remove(self, names: Sequence[str]) -> None:
        """See `BlockingStore`; anything but a file stays."""
        for name in names:
            with contextlib.suppress(OSError):
                self.file(name).unlink()
            with self._lock:
                self._files.pop(name, None)

    def close(self) -> None:
        """See `BlockingStore`; no file is kept open."""

    def _read(self, name: str, view: View) -> int | FarStatus:
        got = read_file(self.file(name), view)
        if not isinstance(got, FarStatus):
            self._note(name, got)
        return got

    def _write(self, name: str, view: View) -> FarStatus:
        file = self.file(name)
        if not is_file(file):
            if not write_file(file, view, sync=self._sync):
                return FarStatus.FAILED
            self._note(name, len(view))
        return FarStatus.OK

    def _note(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._files[name] = (time.time(), num_bytes)

    def _leaving(self) -> list[str]:
        """Return the names of the files to remove so that the others are within the limit."""
        with self._lock:
            size = sum(num_bytes for _, num_bytes in self._files.values())
            if self._max_bytes is None or size <= self._max_bytes:
                return []
            now, leaving = time.time(), []
            self._leases = {name: end for name, end in self._leases.items() if end > now}
            for name in sorted(self._files.keys() - self._leases, key=lambda x: self._files[x]):
                if size > SHARE_KEPT * self._max_bytes:
                    leaving.append(name)
                    size -= self._files[name][1]
            return leaving
