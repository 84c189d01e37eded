# SPDX-License-Identifier: Apache-2.0
"""What adapters share: the reports of tables and batches, default answers, and the source that a
written test includes.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcore.sanitizer import CacheGroup, Chunk, UnsupportedEngine
from kvcore.sanitizer.hunter.adapter import EngineAdapter, NotInstalled, load
from kvcore.sanitizer.hunter.driven import AbsentModules
from kvcore.sanitizer.hunter.engine_source import engine_source
from kvcore.sanitizer.hunter.kit import BatchReporter, around


class Noted:
    """A sanitizer that notes what is reported to it."""

    def __init__(self, num_groups: int = 1) -> None:
        self.groups = [CacheGroup(block_size=4)] * num_groups
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))

    def taken(self) -> list[tuple[Any, ...]]:
        calls, self.calls = self.calls, []
        return calls


def begun(num_groups: int = 1) -> tuple[BatchReporter, Noted]:
    """Return a reporter with a request."""
    noted = Noted(num_groups)
    it = BatchReporter(noted)
    it.begin("r0", [1], ("poet",))
    assert noted.taken() == [("begin", "r0", [1], ("poet",))]
    return it, noted


def test_a_request_begins_once() -> None:
    it, noted = begun()
    it.begin("r0", [1])
    assert noted.taken() == []


def test_a_table_is_reported_by_what_is_new() -> None:
    it, noted = begun()
    table = [3]
    it.show("r0", table)
    table.append(5)
    it.show("r0", table)
    it.show("r0", table)
    assert noted.taken() == [("extend", "r0", 0, [3]), ("extend", "r0", 0, [5])]


@pytest.mark.parametrize("table", [[3], [4, 5], [3, 4, 5]])
def test_a_table_that_has_changed_is_given_up_and_reported_anew(table: list[int]) -> None:
    it, noted = begun()
    it.show("r0", [3, 5])
    noted.taken()
    it.show("r0", table)
    assert noted.taken() == [("drop", "r0"), ("extend", "r0", 0, table)]


def test_a_change_in_one_group_reports_all_groups_anew() -> None:
    it, noted = begun(2)
    it.show("r0", [3], [7])
    noted.taken()
    it.show("r0", [3, 4], [8])
    assert noted.taken() == [
        ("drop", "r0"),
        ("extend", "r0", 0, [3, 4]),
        ("extend", "r0", 1, [8]),
    ]


def test_only_a_table_is_given_up() -> None:
    it, noted = begun()
    for _ in range(2):
        it.drop("r0")
        it.drop("nobody")
        assert noted.taken() == []
        it.show("r0", [3])
        it.drop("r0")
        assert noted.taken() == [("extend", "r0", 0, [3]), ("drop", "r0")]


def test_a_request_ends_after_its_last_batch() -> None:
    it, noted = begun()
    it.show("r0", [3])
    chunks = [Chunk("r0", 0, 4)]
    it.issue(chunks)
    it.issue(chunks)
    noted.taken()
    it.end("r0")
    assert noted.taken() == [("drop", "r0")]
    it.complete()
    assert noted.taken() == [("complete", 1)]
    it.complete()
    assert noted.taken() == [("complete", 2), ("end", "r0")]
    it.end("r0")
    assert noted.taken() == []


def test_a_request_without_a_batch_ends_at_once() -> None:
    it, noted = begun()
    it.show("r0", [3])
    it.ran([Chunk("r0", 0, 4)])
    noted.taken()
    it.end("r0")
    assert noted.taken() == [("end", "r0")]


def test_a_hook_stands_around_a_method() -> None:
    class Engine:
        def step(self, count: int) -> int:
            return count

    engine = Engine()

    @around(engine, "step")
    def stepped(inner: Any, count: int) -> int:
        return 10 + int(inner(count))

    assert engine.step(1) == 11
    assert Engine().step(1) == 1


def test_an_adapter_is_for_the_version_in_its_name() -> None:
    class Other(EngineAdapter):
        NAME = "pytest 0.0"

    class This(EngineAdapter):
        NAME = f"pytest {pytest.__version__}"

    assert This.version() == pytest.__version__
    with pytest.raises(UnsupportedEngine, match=r"pytest .* is not supported: .* with 0\.0"):
        Other.version()


class Absent(EngineAdapter):
    """An adapter for an engine that is not installed."""

    NAME = "an-engine-that-nobody-has 1.0"


def test_an_engine_that_is_not_installed_is_named() -> None:
    with pytest.raises(NotInstalled, match="an-engine-that-nobody-has"):
        load(f"{__name__}:Absent")


def test_the_source_of_an_engine_has_what_it_uses_and_no_more(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.py").write_text(
        "import os\n"
        "from kvcore.sanitizer.hunter.driven import Driven\n"
        "from kvcore.sanitizer.hunter.adapter import EngineAdapter\n"
        "from kvcore.sanitizer.hunter.kit import BatchReporter\n"
        "SIZE = 4\n"
        "def used() -> int:\n    return helped()\n"
        "def helped() -> int:\n    return SIZE\n"
        "def unused() -> int:\n    return 5\n"
        "class Engine(Driven):\n    size = used()\n"
        "class Followed(BatchReporter):\n    pass\n"
        "class Adapter(EngineAdapter):\n    Engine = Engine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    source = engine_source("small")
    space: dict[str, Any] = {}
    exec(compile(source, "engine", "exec"), space)
    assert space["Engine"].size == 4
    assert space["Engine"]().finish_batches() is None
    assert {"Adapter", "Followed", "unused", "Silent"}.isdisjoint(space)
    assert "kvcore" not in source


def test_absent_modules_are_stand_ins_except_for_the_present_ones_and_known_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("far", "far/near"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError")
    (tmp_path / "far/near/here.py").write_text("from far.away import Thing, size\n")
    (tmp_path / "far/real.py").write_text("from far.near.here import Thing\nfrom gone import it\n")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    packages, present = ("far", "far.near"), ("far.real",)
    AbsentModules(tmp_path, ("far.away", "far.real", "gone"), {"size": 4}, packages, present)
    real, here = map(importlib.import_module, ("far.real", "far.near.here"))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("far", "gone")]:
        del sys.modules[name]
    assert here.size == 4
    assert real.Thing(color="red").color == "red"
    assert isinstance(real.Thing.part, type)
    assert list(real.Thing) == []
    assert real.it()(len) is len
