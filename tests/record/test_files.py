# SPDX-License-Identifier: Apache-2.0
"""The files of a record: they survive any death and any damage, and never stop a manager."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import warnings
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from kvcore import Config, KVCacheManager, Request
from kvcore.check.search.parity import whole
from kvcore.record.checksum import crc32c
from kvcore.record.errors import (
    AlreadyRecording,
    DamagedRecord,
    InvalidRecorder,
    NewerRecord,
    NotARecord,
)
from kvcore.record.reader import RecordedCall, read_calls, segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import HEADER_SIZE, padded, read_segment
from kvcore.replay.records.rerun import rerun
from kvcore.trace.calls import Call, perform_on
from kvcore.types.errors import WrongArgument
from tests.conftest import Backend, need_twin
from tests.record.records import CONFIG, check_replays, record, story

FIRST = "00000000.kvcrec"
SMALL = Config(4, 2, hash_seed=b"x")
LARGE_BLOCKS = Config(4, 64, hash_seed=b"x")
"""A pool for prompts that are larger than a file, with few hashes to compute."""
FEW = story()[:4]


def small_record(folder: Path, backend: Backend = "python") -> bytes:
    """Return the bytes of a record of a few calls."""
    record(folder, SMALL, FEW, backend)
    return (folder / FIRST).read_bytes()


def calls_in(path: Path) -> list[RecordedCall]:
    """Return the calls of one file, those of the tail included."""
    return list(read_calls(read_segment(path)))


def state_end(data: bytes) -> int:
    """Return the end of the state, without which nothing can be replayed."""
    (size,) = struct.unpack_from("<I", data, HEADER_SIZE)
    return HEADER_SIZE + 8 + int(size)


@pytest.mark.parametrize("calls", [FEW, pytest.param(story(), marks=pytest.mark.slow)])
def test_a_record_cut_at_any_byte_gives_the_whole_steps_before(
    tmp_path: Path, calls: list[Call]
) -> None:
    record(tmp_path / "whole", CONFIG, calls, "python")
    data = (tmp_path / "whole" / FIRST).read_bytes()
    whole = calls_in(tmp_path / "whole" / FIRST)
    assert len(whole) >= len(calls)
    ends = [number + 1 for number, call in enumerate(whole) if call.name == "take_batch"]
    file, counts = tmp_path / "cut.kvcrec", []
    for size in range(len(data)):
        file.write_bytes(data[:size])
        if size < state_end(data):
            with pytest.raises(NotARecord if size < 8 else DamagedRecord) as raised:
                read_segment(file)
            assert raised.value.fields.get("offset", 0) in range(HEADER_SIZE + 1)
            continue
        found = calls_in(file)
        assert found == whole[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert set(counts) == {0, *ends, len(whole)}  # steps are whole or not there


@pytest.mark.parametrize("stride", [37, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_bit_changes_a_call(tmp_path: Path, stride: int) -> None:
    data = small_record(tmp_path / "whole")
    whole = calls_in(tmp_path / "whole" / FIRST)
    file, raised, dropped = tmp_path / "flipped.kvcrec", 0, 0
    state = range(8 * (HEADER_SIZE + 8), 8 * state_end(data))
    for bit in (*range(state.start), *state[::stride], *range(state.stop, 8 * len(data))):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            segment = read_segment(file)
        except (NotARecord, DamagedRecord):
            assert bit // 8 < state_end(data)
            raised += 1
            continue
        found = list(read_calls(segment))
        assert found == whole[: len(found)]
        dropped += segment.dropped_bytes > 0
    assert raised >= 8 * HEADER_SIZE
    assert dropped > 8 * 10


def test_a_tail_without_checksum_counts_what_was_committed(
    tmp_path: Path, backend: Backend
) -> None:
    manager = KVCacheManager(SMALL, backend)
    manager.start_recording(Recorder(tmp_path, segment_bytes=1 << 12))
    for number, call in enumerate(FEW):
        perform_on(manager, call)
        segment = read_segment(tmp_path / FIRST)
        assert len(list(read_calls(segment))) == number + 1
        assert segment.has_tail == (call.name != "take_batch")
        assert segment.dropped_bytes == 0


def test_bytes_of_a_call_that_was_not_committed_are_no_damage(tmp_path: Path) -> None:
    data = small_record(tmp_path / "whole")
    segment = read_segment(tmp_path / "whole" / FIRST)
    at, step = segment.frames[-1]
    length = struct.pack("<II", 1 << 31 | len(step), 0)
    file = tmp_path / "killed.kvcrec"
    file.write_bytes(data[: at - 8] + length + step + b"\7" * 20)
    found = read_segment(file)
    assert (found.frames, found.has_tail, found.dropped_bytes) == (segment.frames, True, 0)


def test_bytes_behind_a_frame_that_was_begun_are_not_lost(tmp_path: Path) -> None:
    data = small_record(tmp_path / "whole")
    segment = read_segment(tmp_path / "whole" / FIRST)
    at, _ = segment.frames[-1]
    file = tmp_path / "killed.kvcrec"
    for word, dropped in ((1 << 31, 0), (0, 28)):
        file.write_bytes(data[: at - 8] + struct.pack("<II", word, 0) + b"\7" * 20)
        found = read_segment(file)
        assert (found.frames, found.has_tail) == (segment.frames[:-1], False)
        assert found.dropped_bytes == dropped


KILLED = """
import os, signal, sys
from kvcore import Config, KVCacheManager, Request
from kvcore.record.recorder import Recorder

class Deadly:
    def __index__(self):
        self.count = getattr(self, "count", 0) + 1
        if self.count > {reads}:
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

manager = KVCacheManager(Config(8, 2), {backend!r})
manager.start_recording(Recorder({folder!r}))
manager.add_request(Request("a", [1, 2, 3]))
manager.allocate_slots("a", 3)
manager.take_batch()
manager.append(["a"], [4])
{death}
"""


def test_what_was_recorded_survives_a_kill(tmp_path: Path, backend: Backend) -> None:
    death = "os.kill(os.getpid(), signal.SIGKILL)"
    program = KILLED.format(folder=str(tmp_path), backend=backend, death=death, reads=0)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert [call.name for call in calls_in(tmp_path / FIRST)] == [
        *("add_request", "allocate_slots", "take_batch", "append")
    ]
    done = rerun(tmp_path, [backend])
    assert (done.num_calls, done.has_tail, done.died_in) == (4, True, None)
    assert done.difference is None


def test_a_record_ends_with_its_process(tmp_path: Path, backend: Backend) -> None:
    program = KILLED.format(folder=str(tmp_path), backend=backend, death="sys.exit(5)", reads=0)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 5
    segment = read_segment(tmp_path / FIRST)
    assert (segment.has_tail, segment.dropped_bytes) == (False, 0)
    offset, data = segment.frames[-1]
    assert (tmp_path / FIRST).stat().st_size == padded(offset + len(data))
    done = rerun(tmp_path, [backend])
    assert (done.num_calls, done.has_tail, done.difference) == (4, False, None)


def test_the_call_that_killed_the_process_is_the_last_one(tmp_path: Path) -> None:
    # Only the Python core reads the argument again, in the middle of the call.
    death = 'manager.truncate("a", Deadly())'
    program = KILLED.format(folder=str(tmp_path), backend="python", death=death, reads=1)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    last = calls_in(tmp_path / FIRST)[-1]
    assert (last.name, last.arguments, last.result) == (
        *("truncate", {"request_id": "a", "num_tokens": 1}, None),
    )
    done = rerun(tmp_path, ["python"])
    assert done.died_in == "truncate(request_id='a', num_tokens=1)"
    assert (done.num_calls, done.difference) == (4, None)


KILLED_IN_THE_TWIN = """
import os, signal, struct, threading
from kvcore import Config, KVCacheManager, Request
from kvcore.record.recorder import Recorder

def watch():
    while struct.unpack("<I", os.pread(file, 4, frame))[0] & 0x7FFFFFFF < 4_000_000:
        pass
    os.kill(os.getpid(), signal.SIGKILL)

manager = KVCacheManager(Config(8, 2), "rust")
recorder = Recorder({folder!r})
manager.start_recording(recorder)
file = os.open({folder!r} + "/{first}", os.O_RDONLY)
frame = -(-(72 + len(manager.encode())) // 8) * 8
threading.Thread(target=watch, daemon=True).start()
manager.add_request(Request("long", range(1_000_000)))
"""


def test_a_twin_that_is_killed_while_it_hashes_has_recorded_what(tmp_path: Path) -> None:
    need_twin()
    program = KILLED_IN_THE_TWIN.format(folder=str(tmp_path), first=FIRST)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    (last,) = calls_in(tmp_path / FIRST)
    assert (last.name, last.result) == ("add_request", None)
    assert list(last.arguments["request"].tokens) == list(range(1_000_000))
    died_in = rerun(tmp_path, ["rust"]).died_in
    assert died_in is not None
    assert died_in.startswith("add_request(request=Request(request_id='long'")


def test_segments_end_at_a_step_and_the_oldest_goes(tmp_path: Path, backend: Backend) -> None:
    folder = tmp_path / "record"
    states = record(folder, CONFIG, story(), backend, segment_bytes=40, keep_segments=3)
    names = [path.name for path in segment_files(folder)]
    assert len(names) == 3
    assert names[0] != FIRST
    assert not list(folder.glob("*.part"))
    for path in segment_files(folder)[:-1]:
        *_, last = read_calls(read_segment(path))
        assert last.name == "take_batch"
    made = check_replays(folder, states, backend)
    done = rerun(folder, [backend], first=len(story()) - made)
    assert (done.num_calls, done.num_segments, done.difference) == (made, 3, None)
    assert rerun(folder, [backend]) == done
    with pytest.raises(InvalidRecorder, match="the record begins with call"):
        rerun(folder, [backend], first=0)


def test_an_engine_chooses_when_a_file_ends(tmp_path: Path, backend: Backend) -> None:
    manager = KVCacheManager(SMALL, backend)
    recorder = Recorder(tmp_path, segment_bytes=1, rotate=False)
    recorder.rotate()
    manager.start_recording(recorder)
    for call in FEW:
        perform_on(manager, call)
    assert len(segment_files(tmp_path)) == 1
    recorder.rotate()
    manager.free("a")
    manager.stop_recording()
    recorder.rotate()
    assert len(segment_files(tmp_path)) == 2
    assert [call.number for call in calls_in(segment_files(tmp_path)[1])] == [len(FEW)]
    assert rerun(tmp_path, [backend]).num_segments == 2


def test_a_restored_state_begins_a_file(tmp_path: Path, backend: Backend) -> None:
    manager = KVCacheManager(SMALL, backend)
    before = manager.encode()
    manager.start_recording(Recorder(tmp_path))
    perform_on(manager, FEW[0])
    manager.restore(before)
    perform_on(manager, FEW[0])
    manager.stop_recording()
    assert read_segment(segment_files(tmp_path)[1]).state == before
    assert rerun(tmp_path, [backend]).difference is None


def test_a_call_larger_than_the_file_makes_it_grow(tmp_path: Path, backend: Backend) -> None:
    manager = KVCacheManager(LARGE_BLOCKS, backend)
    manager.start_recording(Recorder(tmp_path, segment_bytes=1))
    manager.add_request(Request("long", range(200_000)))
    manager.stop_recording()
    (call,) = calls_in(tmp_path / FIRST)
    assert call.arguments["request"].tokens.tolist() == list(range(200_000))
    assert len(segment_files(tmp_path)) == 2


class FullDisk(Recorder):
    """A recorder whose disk is full after a given number of allocations, and of flushes."""

    left = 0

    def use(self) -> None:
        """Take a part of the disk."""
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _allocate(self, size: int) -> mmap:
        self.use()
        return super()._allocate(size)

    def flush(self, end: int) -> bool | None:
        self._try(self.use)
        return super().flush(end)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("left", range(4))
def test_a_full_disk_ends_the_record_and_not_the_manager(
    tmp_path: Path, backend: Backend, left: int, sync: bool
) -> None:
    manager, fresh = (KVCacheManager(LARGE_BLOCKS, backend) for _ in range(2))
    recorder = FullDisk(tmp_path, segment_bytes=1, sync=sync)
    recorder.left = left
    calls = [Call("add_request", (Request("long", range(200_000)),)), *FEW, *FEW]
    expected = [perform_on(fresh, call) for call in calls]
    values: list[Any] = []

    def run() -> None:
        manager.start_recording(recorder)
        values.extend(perform_on(manager, call) for call in calls)

    with pytest.warns(RuntimeWarning, match=r"has ended: .*No space left") as warned:
        run()
    assert len(warned) == 1
    assert [*map(whole, values)] == [*map(whole, expected)]
    assert isinstance(recorder.error, OSError)
    assert manager.encode() == fresh.encode()
    made = [call for path in tmp_path.glob("*.kvcrec") for call in calls_in(path)]
    assert len(made) < len(calls)
    manager.stop_recording()
    manager.start_recording(Recorder(tmp_path / "again"))
    manager.take_batch()
    manager.stop_recording()
    assert len(calls_in(tmp_path / "again" / FIRST)) == 1


def test_a_warning_that_is_an_error_does_not_reach_the_call(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (tmp_path / "no").read_bytes())
    manager, recorder = KVCacheManager(SMALL, backend), Recorder(tmp_path / "record")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.start_recording(recorder)
    assert isinstance(recorder.error, FileNotFoundError)
    perform_on(manager, FEW[0])


def test_sync_writes_every_step_to_the_disk(tmp_path: Path, backend: Backend) -> None:
    states = record(tmp_path / "record", SMALL, FEW, backend, sync=True)
    check_replays(tmp_path / "record", states, backend)


def test_misuse_is_told_and_changes_nothing(tmp_path: Path, backend: Backend) -> None:
    manager = KVCacheManager(SMALL, backend)
    recorder = Recorder(tmp_path / "one")
    manager.start_recording(recorder)
    with pytest.raises(AlreadyRecording, match="the manager has a record already"):
        manager.start_recording(Recorder(tmp_path / "two"))
    with pytest.raises(AlreadyRecording, match=r"recorder .* has a record already"):
        KVCacheManager(SMALL, backend).start_recording(recorder)
    with pytest.raises(AlreadyRecording, match=r"folder .* has a record already"):
        Recorder(tmp_path / "one")
    with pytest.raises(WrongArgument, match="must be a Recorder"):
        manager.start_recording(tmp_path)  # type: ignore[arg-type] # what is wrong
    wrong: list[dict[str, Any]] = [{"segment_bytes": 0}, {"keep_segments": 0}, {"tokens": "words"}]
    for options in wrong:
        with pytest.raises(InvalidRecorder):
            Recorder(tmp_path / "two", **options)
    manager.add_request(Request("a", [1]))
    manager.stop_recording()
    manager.stop_recording()
    assert len(calls_in(tmp_path / "one" / FIRST)) == 1


def test_what_is_no_record_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(NotARecord, match="contains no file"):
        rerun(tmp_path, ["python"])
    data = bytearray(small_record(tmp_path))
    data[8:12] = struct.pack("<I", 2)
    data[60:64] = struct.pack("<I", crc32c(data[:60]))
    (tmp_path / FIRST).write_bytes(data)
    with pytest.raises(NewerRecord, match="it has format 2, this kvcore reads 1"):
        rerun(tmp_path, ["python"])
