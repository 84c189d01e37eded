# SPDX-License-Identifier: Apache-2.0
"""`kvcore view`: what it writes, and what it says of records that are not whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcore import KVCacheManager, Request
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.command import main as replay
from kvcore.view.command import main
from tests.conftest import Backend
from tests.record.records import CONFIG, record, story

FIRST = "00000000.kvcrec"


def test_the_page_names_nothing_outside_and_escapes_ids(tmp_path: Path, backend: Backend) -> None:
    manager = KVCacheManager(CONFIG, backend)
    manager.start_recording(Recorder(tmp_path / "record"))
    manager.add_request(Request("</script><b>", [1, 2]))
    manager.take_batch()
    manager.stop_recording()
    file = tmp_path / "page.html"
    assert main([str(tmp_path / "record"), "--html", str(file), "--backend", backend]) == 0
    page = file.read_text(encoding="utf-8")
    assert "://" not in page
    assert not re.findall(r"<(?:link|img|iframe)|\bsrc=|url\(|@import|fetch\(", page)
    assert '<b>"' not in page
    found = re.search(r'id="meta">(.*?)</script>', page)
    assert found is not None
    assert json.loads(found[1])["requests"] == ["</script><b>"]


def test_what_is_no_record_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "page.html")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").write_bytes(b"{}")
    for name, reason in (
        ("empty", "it contains no file *.kvcrec"),
        ("other", "it does not begin with the header of a segment"),
    ):
        assert main([str(tmp_path / name), "--html", page]) == 2
        reported = f"kvcore view: {tmp_path / name} is not a record: {reason}\n"
        assert capsys.readouterr().err == reported
    record(tmp_path / "record", CONFIG, story(), "python")
    assert main([str(tmp_path / "record"), "--html", str(tmp_path)]) == 2
    assert "a folder" in capsys.readouterr().err
    assert not Path(page).exists()


def test_a_page_never_replaces_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), "python")
    file = tmp_path / "record" / FIRST
    before = file.read_bytes()
    for given, make in (([], main), (["--what-if", "num_blocks=9"], replay)):
        assert make([str(tmp_path / "record"), "--html", str(file), *given]) == 2
        assert "it would replace what is read" in capsys.readouterr().err
        assert file.read_bytes() == before


def test_a_record_without_a_call_shows_its_state(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, [], backend)
    assert main([str(tmp_path / "record"), "--html", str(tmp_path / "page.html")]) == 0
    assert "page.html: 0 steps, " in capsys.readouterr().out


def test_damage_is_told_as_a_replay_tells_it(
    tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "record", CONFIG, story(), backend)
    file = tmp_path / "record" / FIRST
    data = bytearray(file.read_bytes())
    at, _ = read_segment(file).frames[2]
    data[at] ^= 1
    file.write_bytes(data)
    assert main([str(file), "--html", str(tmp_path / "page.html")]) == 0
    reported = capsys.readouterr().out
    assert "bytes after damage were left out" in reported
    assert "page.html: 2 steps, " in reported
    assert "bytes after damage were left out" in (tmp_path / "page.html").read_text()
