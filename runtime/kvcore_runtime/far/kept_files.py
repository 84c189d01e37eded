# SPDX-License-Identifier: Apache-2.0
"""What a directory of pages holds, and which of them leave above its limit of bytes.

Other processes may write there. So the files are counted anew after each twentieth of the limit
that this process has written, and before any leave, unless that takes more than a tenth of the
time. A file's time is that of its last use by anybody: who finds it sets it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SUFFIX = ".kv"
SHARE_KEPT = 0.9
SHARE_UNCOUNTED = 0.05
SCANS_APART = 10
"""Least time from one count to the next, in times of what the last one took."""


class KeptFiles:
    """The files of a directory: by name the time of their last use, and bytes."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._leases: dict[str, float] = {}
        self._files: dict[str, tuple[float, int]] = {}
        self._num_bytes = self._num_uncounted = 0
        self._next_scan = 0.0
        self._scan()

    def lease(self, names: Iterable[str], lease_s: float) -> None:
        """Note that these were found, and do not leave for a while."""
        end = time.time() + lease_s
        with self._lock:
            self._leases |= dict.fromkeys(names, end)

    def used(self, name: str, num_bytes: int, *, is_new: bool = False) -> None:
        """Note that a file was read or written."""
        with self._lock:
            self._num_bytes += num_bytes - self._files.get(name, (0.0, 0))[1]
            self._files[name] = (time.time(), num_bytes)
            self._num_uncounted += num_bytes * is_new

    def removed(self, name: str) -> None:
        """Note that a file is gone."""
        with self._lock:
            self._num_bytes -= self._files.pop(name, (0.0, 0))[1]

    def leaving(self) -> list[str]:
        """Return the names of the files to remove so that the others are within the limit."""
        is_above = self._num_bytes > self._max_bytes
        is_due = is_above or self._num_uncounted > SHARE_UNCOUNTED * self._max_bytes
        if is_due and time.monotonic() >= self._next_scan:
            self._scan()
        with self._lock:
            size, leaving = self._num_bytes, []
            if size <= self._max_bytes:
                return []
            now = time.time()
            self._leases = {name: end for name, end in self._leases.items() if end > now}
            for name in sorted(self._files.keys() - self._leases, key=lambda x: self._files[x]):
                if size > SHARE_KEPT * self._max_bytes:
                    leaving.append(name)
                    size -= self._files[name][1]
            return leaving

    def _scan(self) -> None:
        """Count the files anew."""
        started = time.monotonic()
        files = dict(_walk(self._path))
        with self._lock:
            self._files = files
            self._num_bytes, self._num_uncounted = sum(size for _, size in files.values()), 0
        ended = time.monotonic()
        self._next_scan = ended + SCANS_APART * (ended - started)


def _walk(path: Path) -> Iterator[tuple[str, tuple[float, int]]]:
    """Yield the files below the folders of a directory."""
    for folder, _, files in os.walk(path):
        if folder == str(path):
            continue
        place = Path(folder).parent.relative_to(path)
        for file in files:
            with contextlib.suppress(OSError):  # another process removed it
                if file.endswith(SUFFIX):
                    info = os.lstat(f"{folder}/{file}")
                    used = max(info.st_atime, info.st_mtime)
                    yield f"{place}/{file.removesuffix(SUFFIX)}", (used, info.st_size)
