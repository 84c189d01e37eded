# SPDX-License-Identifier: Apache-2.0
"""`kvcore sanitize`: its exit codes, what it writes, and engines that take their process along."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvcore.sanitizer import UnsupportedEngine
from kvcore.sanitizer.hunter import report, session
from kvcore.sanitizer.hunter.adapter import KNOWN, NotInstalled, commit_of, load, python_of
from kvcore.sanitizer.hunter.command import main
from kvcore.sanitizer.hunter.engine_source import engine_source
from kvcore.sanitizer.hunter.template import Adapter
from kvcore.sanitizer.hunter.world import Abort, Arrive, HuntWorld
from tests.sanitizer import broken

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def named(adapter: type[Adapter]) -> str:
    """Return the name of an adapter of broken.py on the command line."""
    name = next(name for name, value in vars(broken).items() if value is adapter)
    return f"{broken.__name__}:{name}"


def failed_tests(folder: Path, *tests: Path) -> list[str]:
    """Return the stems of the written tests that fail; each file has one test."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", "no:cacheprovider"]
    paths = {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    ended = subprocess.run(
        [*command, *map(str, tests)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | paths,
    )
    failed = re.findall(r"^FAILED .*?(\w+)\.py::", ended.stdout, re.MULTILINE)
    assert f"{len(failed)} failed, {len(tests) - len(failed)} passed" in ended.stdout, ended.stdout
    return failed


def test_a_healthy_engine_ends_with_0_and_says_what_it_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["kvcore.sanitizer.hunter.template:Adapter", "--runs", "100", "--seed", "3"]) == 0
    out = capsys.readouterr()
    assert "seed 3" in out.err
    assert "reached: " in out.out
    assert "not reached: " in out.out


BUGS = {
    "crash": (
        "        for request, answer in zip(",
        "        assert len(batch) < 3\n        for request, answer in zip(",
    ),
    "leak": (
        "        self.release(request)\n        self.waiting",
        "        request.blocks[:1] = []\n        self.release(request)\n        self.waiting",
    ),
    "wrong-kv": ("self.free.remove(block)", "pass"),
}
"""By the name of its finding, a line of the template's engine and what stands there instead."""


PARTS = ("", "_engine")
"""Of the file names of the adapter and of its engine."""


def mutant(name: str, folder: Path) -> str:
    """Return the template with a bug in its engine, in a folder, by the name of its adapter."""
    template = ROOT / "kvcore" / "sanitizer" / "hunter" / "template.py"
    engine = template.with_stem("template_engine").read_text()
    line, other = BUGS[name]
    assert engine.count(line) == 1, line
    module = f"mutant_{name.replace('-', '_')}"
    (folder / f"{module}_engine.py").write_text(engine.replace(line, other))
    own = f"from {module}_engine import"
    text = template.read_text().replace("from kvcore.sanitizer.hunter.template_engine import", own)
    (folder / f"{module}.py").write_text(text)
    return f"{module}:Adapter"


@pytest.mark.parametrize("name", BUGS)
def test_a_finding_ends_with_1_and_its_written_test_fails(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = mutant(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    written = tmp_path / "written"
    options = ["--runs", "30", "--seed", "1", "--only", name, "--write", str(written), "--json"]
    assert main([engine, *options]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in summary["findings"]} == {name}
    assert summary["runs"] == 30
    test = min(written.glob("test_*.py"))
    text = test.with_name(test.stem.removeprefix("test_") + ".md").read_text()
    assert "## Steps" in text
    assert "1. r" in text
    assert ("kvcore" in test.read_text()) == (name == "wrong-kv")
    module = engine.partition(":")[0]
    line, other = BUGS[name]
    mended = test.with_stem(f"{test.stem}_mended")
    for file, copy in (
        *((tmp_path / f"{module}{part}.py", tmp_path / f"mended{part}.py") for part in PARTS),
        (test, mended),
    ):
        copy.write_text(file.read_text().replace(other, line).replace(module, "mended"))
    assert failed_tests(tmp_path, test, mended) == [test.stem]


def test_a_world_that_was_found_runs_again(tmp_path: Path) -> None:
    options = ["--runs", "30", "--seed", "1", "--write", str(tmp_path)]
    assert main([named(broken.Crashing), *options]) == 1
    world = next(tmp_path.glob("*.json"))
    assert main([named(broken.Crashing), "--replay", str(world)]) == 1
    assert main(["kvcore.sanitizer.hunter.template:Adapter", "--replay", str(world)]) == 0


ENDS_ITS_PROCESS = [(broken.Dying, "died"), (broken.Sleeping, "hang"), (broken.Flooding, "flood")]


@pytest.mark.parametrize(("adapter", "name"), ENDS_ITS_PROCESS)
def test_a_world_that_ends_its_process_is_found_again(
    adapter: type[Adapter],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.session.SILENT_SECONDS", 2.0)
    path = world_of_three(tmp_path)
    assert main([named(adapter), "--replay", str(path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["name"], found["world"]) == (name, json.loads(path.read_text()))


def world_of_three(folder: Path) -> Path:
    """Write a world whose only batch has three requests."""
    moves = tuple(Arrive(f"r{number}", (1, 2), 2) for number in range(3))
    path = folder / "world.json"
    path.write_text(json.dumps(HuntWorld({"block_size": 4}, 8, 16, 4, (*moves, "step")).to_json()))
    return path


def test_a_run_that_gets_no_processor_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.session.SILENT_SECONDS", 1.5)
    assert main([named(broken.Stopping), "--replay", str(world_of_three(tmp_path))]) == 0


def test_loading_the_engine_is_no_hang_of_a_world_that_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.session.SILENT_SECONDS", 4.0)  # loads 7 s
    path = tmp_path / "world.json"
    path.write_text(json.dumps(HuntWorld({"block_size": 4}, 8, 16, 4, ("step",)).to_json()))
    assert main([named(broken.LoadsLong), "--replay", str(path)]) == 0


def test_loading_the_engine_is_no_hang_of_a_hunt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.session.SILENT_SECONDS", 4.0)
    assert main([named(broken.LoadsLong), "--runs", "1", "--seed", "1"]) == 0


def test_an_engine_that_does_not_start_in_time_is_said_not_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.session.START_SECONDS", 2.0)
    assert main([named(broken.LoadsLong), "--runs", "1"]) != 0
    said = capsys.readouterr()
    assert "it did not start in 2 s of its own time" in said.err + said.out


def test_a_world_that_the_engine_refuses_is_not_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = HuntWorld({"block_size": 4, "mode": "odd"}, 8, 16, 4, ("step",))
    path = tmp_path / "world.json"
    path.write_text(json.dumps(world.to_json()))
    assert main([named(broken.Refuses), "--replay", str(path)]) == 3
    assert "refuses the options of this world" in capsys.readouterr().err


@pytest.mark.parametrize(("adapter", "name"), ENDS_ITS_PROCESS)
def test_an_engine_that_ends_its_process_is_found_and_the_hunt_goes_on(
    adapter: type[Adapter],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvcore.sanitizer.hunter.session.SILENT_SECONDS", 4.0)
    monkeypatch.setattr("kvcore.sanitizer.hunter.run.HUNG_SECONDS", 60.0)
    assert main([named(adapter), "--runs", "6", "--seed", "8", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in summary["findings"]} == {name}
    assert summary["runs"] == 4  # of the second process: the first one ended in its second run
    shortest = min(len(each["world"]["moves"]) for each in summary["findings"])
    assert shortest <= 12


def test_a_wrong_adapter_ends_with_3_and_is_no_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--runs", "1", "--seed", "1", "--json", "--write", str(tmp_path)]
    assert main([named(broken.BeginsTwice), *options]) == 3
    text = json.loads(capsys.readouterr().out)["findings"][0]["text"]
    assert "the adapter is wrong, not the engine" in text
    assert not list(tmp_path.iterdir())


def test_a_hunt_that_is_terminated_ends_its_engine_and_leaves_its_record(tmp_path: Path) -> None:
    record, folder = tmp_path / "record", tmp_path / "folder"
    folder.mkdir()
    text = "import sys; from kvcore.sanitizer.hunter.command import main; sys.exit(main())"
    adapter = "kvcore.sanitizer.hunter.template:Adapter"
    hunt = subprocess.Popen(
        [sys.executable, "-c", text, adapter, "--seed", "1", "--record", str(record)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
    )
    assert hunt.stderr is not None
    assert any("CPU s" in line for line in hunt.stderr)
    assert list(folder.iterdir())
    hunt.terminate()
    hunt.stderr.read()
    hunt.stderr.close()
    assert hunt.wait(20) == 128 + signal.SIGTERM
    assert not list(folder.iterdir())
    hunted = json.loads(record.read_text())
    assert hunted["interrupted"]
    assert hunted["runs"] > 0


def test_a_process_that_dies_before_its_first_run_does_not_blame_the_last_ones_world(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unfinished = tmp_path / "world"
    died = {"event": "ended", "name": "died", "text": "it"}
    processes = iter([[{"event": "start"}, died], [{"event": "found", "name": "died"}], [died]])

    def process(_: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        events = next(processes)
        if events[0]["event"] == "start":
            unfinished.write_text("0\n{}\n")
        yield from events

    monkeypatch.setattr(session, "_one_process", process)
    job = {"do": "hunt", "engine": "it", "seed": 1, "seconds": 9, "unfinished": str(unfinished)}
    *_, last = session.events(job)
    assert last == {"event": "unsupported", "text": "died before any run: it"}


def test_another_version_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([named(broken.Newer), "--runs", "1"]) == 2
    reported = "newer 2.0 is not supported: the adapter was tested with 1.0"
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nano-vllm", "mini-sglang"])
def test_a_checkout_at_another_commit_is_another_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "mini-sglang":
        pytest.importorskip("torch", reason="its adapter makes tensors")
    adapter = importlib.import_module(KNOWN[name].adapter.partition(":")[0])
    monkeypatch.setenv(KNOWN[name].checkout or "", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UnsupportedEngine, match="of an unknown commit is not supported"):
        adapter.Adapter.version()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "another"]):
        subprocess.run([*git, *command], check=True)
    with pytest.raises(UnsupportedEngine, match=r"[0-9a-f]{40} is not supported") as caught:
        adapter.Adapter.version()
    assert f"tested with {adapter.TESTED}" in str(caught.value)
    head = str(caught.value).split()[1]
    assert commit_of(name, head[:7]) == head[:7]


def test_an_engine_that_refuses_its_options_is_no_hunt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([named(broken.Refuses), "--runs", "5", "--seed", "1"]) == 3
    assert "worlds refused" in capsys.readouterr().out


def test_the_engine_of_a_report_is_the_adapters_file_without_kvcore() -> None:
    source = engine_source("kvcore.sanitizer.hunter.template")
    assert "kvcore" not in source
    assert "class Adapter" not in source
    namespace: dict[str, object] = {}
    exec(compile(source, "engine", "exec"), namespace)
    assert "Engine" in namespace


MINE = """from __future__ import annotations
import dataclasses
from kvcore.sanitizer.hunter import template

@dataclasses.dataclass
class Size:
    tokens: Unknown = 4

class Engine:
    def __init__(self, world: Unknown) -> None:
        self.size, self.live = Size(tokens=world.block_size), []
    def arrive(self, arrival) -> None:
        assert (arrival.samples, arrival.tenant) == (1, 0)
    def step(self) -> None: ...
    def finish_batches(self) -> None: ...

class Mine(template.Adapter):
    Engine = Engine
"""


def test_a_written_test_has_the_adapters_name_decorators_and_the_moves_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    arrivals = (Arrive("r0", (1,), 1, samples=2, tenant=1), Arrive("r1", (1,) * 99, 1))
    world = HuntWorld(
        {"block_size": 2}, 8, 16, 4, (*arrivals, "epoch", "reset", "step", Abort("r0"))
    )
    found = {"name": "crash", "where": "", "text": "it", "engine": "mine", "world": world.to_json()}
    written = report.test_of(found, "mine:Mine")
    assert "r1" not in written
    namespace: dict[str, Any] = {}
    exec(compile(written, "written", "exec"), namespace)
    assert "Mine" not in namespace
    namespace["test_crash"]()
    exec(report.test_of({**found, "name": "wrong-kv", "muted": []}, "mine:Mine"), namespace)
    assert namespace["Mine"].Engine.__module__ == "mine"


def test_each_known_engine_has_a_file_and_a_way_to_install_it() -> None:
    for name, known in KNOWN.items():
        module = known.module.replace(".", "/")
        assert (ROOT / "kvcore" / "sanitizer" / "engines" / f"{module}.py").exists(), name


def installed(name: str) -> str:
    """Return why an engine cannot be run here, or nothing."""
    try:
        if python_of(name) == sys.executable:
            load(name)
    except NotInstalled as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nano-vllm", "mini-sglang", "transformers", "vllm", "sglang", "sglang-host", "kvcore"]
)
def test_an_engine_that_is_installed_is_driven_without_a_harness_error(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if reason := installed(name):
        pytest.skip(reason)
    assert main([name, "--runs", "20", "--seed", "1", "--json"]) in (0, 1)
    summary = json.loads(capsys.readouterr().out)
    assert summary["steps"] > 50
