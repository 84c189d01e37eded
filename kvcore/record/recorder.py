# SPDX-License-Identifier: Apache-2.0
"""A recorder: the files of one record, preallocated and mapped.

Invariants: what was stored in the mapping survives the death of the process. A segment gets its
name once its first state is complete, so every segment of a folder can be replayed. A failure of
the files ends the record with one warning; the manager goes on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakSet, finalize

from kvcore.record.checksum import crc32c
from kvcore.record.errors import AlreadyRecording, InvalidRecorder
from kvcore.record.segment import CONTINUES, FRAME_BYTES, HEADER_SIZE, KEYS, WORDS, Header, padded

T = TypeVar("T")
VARIABLE, TOKENS_VARIABLE = "KVCORE_RECORD", "KVCORE_RECORD_TOKENS"
SUFFIX = ".kvcrec"
ROOM = 2 * FRAME_BYTES
"""Spare bytes of a segment, for the step that exceeds its size."""


class Core(Protocol):
    """What makes the calls of a manager, and records them."""

    def rotate_recording(self) -> None:
        """Begin a new segment with the state now."""

    def leave_recording(self) -> None:
        """Forget the record, which another process goes on writing."""

    def stop_recording(self) -> None:
        """End the record, if any."""


class Recorder:
    """The files of a record, and how they are written: `manager.start_recording(Recorder(folder))`.

    folder: created if missing; must not contain a record yet. tokens: "text" keeps the tokens, the
    extra keys, the ids and the seed of the hashes, which are as secret as the prompts; "keys" keeps
    the hashes of full blocks instead, which must be SHA-256.
    segment_bytes: a file ends at the first step past this size. keep_segments: how many files are
    kept; the oldest is deleted. rotate: False if the engine itself calls `rotate`, because a new
    file begins with the state, which takes O(pool). sync: also flush each step to the disk. Raises
    InvalidRecorder, AlreadyRecording, OSError.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        tokens: Literal["text", "keys"] = "text",
        segment_bytes: int = 64 << 20,
        keep_segments: int = 8,
        rotate: bool = True,
        sync: bool = False,
    ) -> None:
        for name, value in (("segment_bytes", segment_bytes), ("keep_segments", keep_segments)):
            if not isinstance(value, int) or not 1 <= value < 1 << 31:
                raise InvalidRecorder(
                    name=name, value=value, reason="must be between 1 and 2**31 - 1"
                )
        if tokens not in ("text", "keys"):
            reason = 'must be "text" or "keys"'
            raise InvalidRecorder(name="tokens", value=tokens, reason=reason)
        self.folder = Path(folder)
        self.error: Exception | None = None
        """The error that ended the record, if any."""
        self.segment_bytes, self.keep_segments = segment_bytes, keep_segments
        self.rotates, self.sync, self.by_keys = rotate, sync, tokens == "keys"
        self._ending: finalize[[Core], object] | None = None
        self._number = 0
        self._file = -1
        self._map: mmap | None = None
        self._flushed = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.glob(f"*{SUFFIX}")):
            what = f"folder {self.folder}"
            raise AlreadyRecording(what=what, reason="use a new folder, or delete its files")

    def rotate(self) -> None:
        """Begin a new file with the manager's state now. Does nothing if no manager is recorded."""
        if (core := self._core()) is not None:
            core.rotate_recording()

    def start(self, manager: object, core: Core, *, one_way: bool) -> None:
        """Attach to a manager with this core: the record ends when the manager is dropped, at the
        latest when Python exits. one_way: whether tokens cannot be found from its hashes. Raises
        AlreadyRecording, InvalidRecorder.
        """
        if self._ending is not None or self._number:
            raise AlreadyRecording(what=f"recorder {self.folder}", reason="create a new one")
        self._check_hashing(one_way)
        self._ending = finalize(manager, _end, core)
        STARTED.add(self)

    def leave(self) -> None:
        """End the record in a forked process, without a change: the parent goes on writing it."""
        core = self._core()
        if self._file < 0 or self._ending is None or core is None:
            return
        self._ending.detach()
        reason = "it goes on in the process from which this one was forked"
        self.error = AlreadyRecording(what=f"folder {self.folder}", reason=reason)
        core.leave_recording()
        self._map = None
        self._close_file()

    def _core(self) -> Core | None:
        """Return the core of the recorded manager while that is alive."""
        alive = None if self._ending is None else self._ending.peek()
        return None if alive is None else alive[2][0]

    def open_segment(
        self, state: bytes, first_call: int, continues: bool, one_way: bool
    ) -> mmap | None:
        """Create a segment with its first frame and zeros after it; return its mapping. None: it
        failed.
        """
        flags = KEYS * self.by_keys | CONTINUES * continues
        header = Header(self._number, first_call, flags, _version())
        frame = WORDS.pack(len(state), crc32c(state)) + state
        end = padded(HEADER_SIZE + len(frame))
        name = self.folder / f"{self._number:08}{SUFFIX}"

        def make() -> mmap:
            self._check_hashing(one_way)
            part = name.with_suffix(".part")
            self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            made = self._allocate(end + self.segment_bytes + ROOM)
            made[:end] = (header.to_bytes() + frame).ljust(end, b"\0")
            part.rename(name)
            self._flushed = 0
            self._number += 1
            oldest = self._number - self.keep_segments - 1
            if oldest >= 0:
                (self.folder / f"{oldest:08}{SUFFIX}").unlink(missing_ok=True)
            return made

        made = self._try(make)
        if made is None or (self.sync and not self.flush(end)):
            return None
        return made

    def grow(self, size: int) -> mmap | None:
        """Grow the open segment to at least this many bytes; return its mapping. None: it
        failed.
        """
        return self._try(lambda: self._allocate(size + size // 4 + ROOM))

    def flush(self, end: int) -> bool | None:
        """Flush the segment to the disk up to `end`. None: it failed."""

        def write() -> bool:
            start = self._flushed // PAGESIZE * PAGESIZE
            assert self._map is not None
            self._map.flush(start, end - start)
            self._flushed = end
            return True

        return self._try(write)

    def close_segment(self, end: int) -> None:
        """Close the segment, which ends here."""
        self._map = None
        self._try(lambda: os.ftruncate(self._file, end))
        self._close_file()

    def _check_hashing(self, one_way: bool) -> None:
        """Raise InvalidRecorder if tokens could be found from the hashes of a record by keys."""
        if self.by_keys and not one_way:
            reason = "tokens can be found from hashes of siphash and xxh3, not from those of sha256"
            raise InvalidRecorder(name="tokens", value="keys", reason=reason)

    def _allocate(self, size: int) -> mmap:
        """Map the open file after allocating this size on the disk, so that no store can fail."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file, 0, size)
        else:
            os.ftruncate(self._file, size)
        self._map = mmap(self._file, size)
        return self._map

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _try(self, work: Callable[[], T]) -> T | None:
        """Return the value of `work`; if it fails, end the record and return None."""
        if self.error is not None:
            return None
        try:
            return work()
        except Exception as error:  # whatever the error, the manager goes on
            self.error = error
            self._map = None
            self._close_file()
        self._warn()
        return None

    def _warn(self) -> None:
        message = f"the record in {self.folder} has ended: {self.error}"
        with suppress(RuntimeWarning):  # warnings may be errors; `error` still holds it
            warnings.warn(message, RuntimeWarning, stacklevel=2)


STARTED: WeakSet[Recorder] = WeakSet()
"""The recorders that were started in this process."""


def _leave_all() -> None:
    """Leave the records of the process from which this one was forked."""
    for recorder in [*STARTED]:
        recorder.leave()
    STARTED.clear()


def _end(core: Core) -> None:
    """End the record, so that its file takes no spare room."""
    with suppress(Exception):  # another thread may be in a call: what it committed stays
        core.stop_recording()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


class Manager(Protocol):
    """A manager that can be recorded."""

    def start_recording(self, recorder: Recorder) -> None:
        """Record every call from now on."""


def record_if_requested(manager: Manager) -> None:
    """Record a manager if KVCORE_RECORD names a folder, in a new folder inside it.

    Each manager gets a numbered folder, so that restarted or parallel processes keep existing
    records. KVCORE_RECORD_TOKENS: what they keep of tokens, "text" or "keys". Raises OSError,
    InvalidRecorder.
    """
    base = os.environ.get(VARIABLE)
    if not base:
        return
    tokens: Any = os.environ.get(TOKENS_VARIABLE) or "text"
    manager.start_recording(Recorder(_new_folder(Path(base)), tokens=tokens))


def _new_folder(base: Path) -> Path:
    number = 0
    while True:
        try:
            (folder := base / f"{number:04}").mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # expensive, and rarely needed

    try:
        return version("kvcore")[:28]
    except PackageNotFoundError:
        return "unknown"
