# SPDX-License-Identifier: Apache-2.0
"""`kvcore replay RECORD`, and the variable that lets an engine record."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from kvcore import KVCacheManager, _twin
from kvcore.record.checksum import crc32c
from kvcore.record.reader import is_record, read_calls
from kvcore.record.recorder import record_if_requested
from kvcore.record.segment import WORDS, read_segment
from kvcore.replay.command import main
from kvcore.trace.calls import perform_on
from tests.conftest import Backend
from tests.record.records import CONFIG, record, story

FIRST = "00000000.kvcrec"


def test_a_record_is_known_by_what_it_is(tmp_path: Path, backend: Backend) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    assert is_record(tmp_path / "record")
    assert is_record(tmp_path / "record" / FIRST)
    (tmp_path / "record" / "1.kvcrec").write_bytes(b"")
    assert is_record(tmp_path / "record" / "1.kvcrec")
    (tmp_path / "trace.jsonl").write_text("{}")
    for name in ("", "trace.jsonl", "no", "\0"):
        assert not is_record(tmp_path / name)


def test_a_record_is_made_again(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    both = "both" if _twin.available() else "python"
    for words in (["--backend", backend], ["--backend", both], ["--from", "3", "--to", "9"]):
        assert main([str(tmp_path / "record"), *words]) == 0
        assert capsys.readouterr().out.endswith("every outcome equals the recorded one\n")


def test_a_range_without_a_call_is_refused(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    assert main([str(tmp_path / "record")]) == 0
    num_calls = int(capsys.readouterr().out.split()[0])
    last = str(num_calls - 1)
    assert main([str(tmp_path / "record"), "--from", last, "--to", last]) == 0
    assert (
        capsys.readouterr().out
        == f"{num_calls} calls in 1 file\nevery outcome equals the recorded one\n"
    )
    for words in (["--from", str(num_calls)], ["--from", "9", "--to", "8"]):
        assert main([str(tmp_path / "record"), *words]) == 2
        said = f"kvcore replay: no call of {tmp_path / 'record'} is in this range\n"
        assert capsys.readouterr() == ("", said)


def test_a_different_outcome_is_named_with_both(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    file = tmp_path / "record" / FIRST
    data = bytearray(file.read_bytes())
    at, frame = next(each for each in read_segment(file).frames if len(each[1]) > 20)
    place = at + frame.rindex(b"\x19")  # take_batch ends the step: its outcome is a checksum
    data[place + 2] ^= 1
    length, _ = WORDS.unpack_from(data, at - 8)
    data[at - 4 : at] = struct.pack("<I", crc32c(data[at : at + length]))
    file.write_bytes(data)
    assert main([str(file), "--backend", backend]) == 1
    reported = capsys.readouterr().out
    assert f"call 2 differs on the {backend} backend: take_batch()" in reported
    assert "recorded: done " in reported
    assert "replayed: done " in reported
    assert main([str(file), "--backend", backend, "--from", "3"]) == 0
    assert main([str(file), "--backend", backend, "--to", "1"]) == 0


def test_what_cannot_be_read_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), "python")
    file = tmp_path / "record" / FIRST
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    assert main([str(file)]) == 2
    assert capsys.readouterr().err == (
        f"kvcore replay: {file} is damaged at byte 64: the state is incomplete\n"
    )


def test_damage_behind_the_state_is_counted(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    file = tmp_path / "record" / FIRST
    data = bytearray(file.read_bytes())
    at, _ = read_segment(file).frames[2]
    data[at] ^= 1
    file.write_bytes(data)
    assert main([str(file), "--backend", backend]) == 0
    reported = re.search(r"(\d+) bytes after damage were left out", capsys.readouterr().out)
    assert reported is not None
    padding = len(data) - at + 8 - int(reported[1])
    assert padding in range(8)


def test_a_file_that_is_gone_is_told_and_the_next_one_is_replayed(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "record"
    record(folder, CONFIG, story(), backend, segment_bytes=1)
    files = sorted(folder.iterdir())
    first, gone, *_ = [len(list(read_calls(read_segment(file)))) for file in files]
    files[1].unlink()
    assert main([str(folder), "--backend", backend]) == 0
    reported = capsys.readouterr().out
    assert f"{len(story()) - gone} calls in {len(files) - 1} files" in reported
    assert f"{gone} calls missing before a later file" in reported
    assert main([str(folder), "--backend", backend, "--to", str(first - 1)]) == 0
    assert "missing" not in capsys.readouterr().out


def test_an_engine_records_each_manager_in_a_folder_of_its_own(
    tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = KVCacheManager(CONFIG, backend)
    record_if_requested(quiet)
    monkeypatch.setenv("KVCORE_RECORD", str(tmp_path / "records"))
    for _ in range(2):
        manager = KVCacheManager(CONFIG, backend)
        record_if_requested(manager)
        for call in story()[:3]:
            perform_on(manager, call)
        manager.stop_recording()
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == ["0000", "0001"]
    for name in ("0000", "0001"):
        calls = read_calls(read_segment(tmp_path / "records" / name / FIRST))
        assert [call.name for call in calls] == ["add_request", "allocate_slots", "take_batch"]
