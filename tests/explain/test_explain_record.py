# SPDX-License-Identifier: Apache-2.0
"""`kvcore explain RECORD`: a record says what an observer of its calls said while they ran."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kvcore import KVCacheManager
from kvcore.explain.explanation import Explanation
from kvcore.explain.observed import observed
from kvcore.explain.observer import AdmissionObserver
from kvcore.record.recorder import Recorder
from kvcore.replay.configuration import make_config
from kvcore.replay.explain.command import main
from kvcore.replay.loop import Loop
from kvcore.replay.results import Options
from kvcore.replay.synthetic import generate
from tests.conftest import Backend

OPTIONS = Options(num_blocks=600, bounds=False)
Recorded = Callable[[Backend], tuple[Path, list[Explanation]]]


def record(folder: Path, backend: Backend, *, late: bool = False) -> list[Explanation]:
    """Record the loop of `kvcore replay` in small files; what an observer explains meanwhile.

    late: the record begins when requests are there.
    """
    explained: list[Explanation] = []
    manager = KVCacheManager(make_config(OPTIONS), backend)
    recorder = Recorder(folder, segment_bytes=1 << 16, keep_segments=100)
    if not late:
        manager.start_recording(recorder)
    observer = AdmissionObserver(manager, explained.append)
    loop = Loop(generate("documents", 12, 7), OPTIONS, observed(manager, observer))
    while loop.step() is not None:
        if late and manager.num_free_blocks < OPTIONS.num_blocks - 1:
            manager.start_recording(recorder)
            break  # its first state is enough
    manager.stop_recording()
    return explained


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Return a function that gives a backend's record, made once, and its explanations."""

    @cache
    def of(backend: Backend) -> tuple[Path, list[Explanation]]:
        folder = tmp_path_factory.mktemp(backend) / "record"
        return folder, record(folder, backend)

    return of


def test_a_record_is_explained_as_its_calls_were(
    recorded: Recorded, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, explained = recorded(backend)
    assert len(list(folder.iterdir())) > 2
    words = [str(folder), "--backend", backend, "--json", "--by", "request"]
    assert main(words) == 0
    reported = json.loads(capsys.readouterr().out)
    firsts = [each for each in explained if not each.again]
    assert reported["ideal"] == sum(each.ideal for each in firsts)
    assert reported["hits"] == sum(each.hits for each in firsts)
    assert reported["missed"] == sum(reported["causes"].values()) > 0
    shown = [(each["request"], *each["lengths"].values()) for each in reported["requests"]]
    assert shown == [(each.request, *each.lengths) for each in explained]
    name = explained[-1].request
    assert main([str(folder), "--request", name]) == 0
    assert f"request {name}, step " in capsys.readouterr().out


def test_a_record_without_its_beginning_is_refused(
    recorded: Recorded, tmp_path: Path, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "late", backend, late=True)
    assert main([str(tmp_path / "late")]) == 2
    assert "it begins with 1 request, whose past it does not contain" in capsys.readouterr().err
    shutil.copytree(recorded(backend)[0], tmp_path / "gap")
    second, third = sorted((tmp_path / "gap").iterdir())[1:3]
    second.unlink()
    assert main([str(tmp_path / "gap")]) == 2
    assert f"some calls before {third.name} are missing" in capsys.readouterr().err
