# SPDX-License-Identifier: Apache-2.0
"""One directory of pages with a limit of bytes, and several processes that write there."""

import os
from pathlib import Path

import pytest
from kvcore_runtime.far import kept_files
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.kept_files import SCANS_APART, SHARE_KEPT, SHARE_UNCOUNTED

from kvcore.far.tier import FarStatus
from tests.runtime.far.test_far_directory import SIZE, empty, name, page

NUM_PAGES = 100
LIMIT = NUM_PAGES * SIZE


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the files as often as is due, whatever that costs."""
    monkeypatch.setattr(kept_files, "SCANS_APART", 0)


def put(store: DirectoryStore, number: int) -> None:
    assert store.put([name(number)], [page(number % 256)]) == [FarStatus.OK]


def num_files(store: DirectoryStore) -> int:
    return sum(each.is_file() for each in store.path.rglob("*"))


def set_times(store: DirectoryStore, count: int) -> None:
    """Let the first files be the oldest; the clock of a file system may be coarse."""
    for number in range(count):
        os.utime(store.file(name(number)), (1000 + number,) * 2)


@pytest.mark.usefixtures("often")
def test_processes_keep_one_limit(tmp_path: Path) -> None:
    stores = [DirectoryStore(tmp_path / "pages", max_bytes=LIMIT) for _ in range(3)]
    most = 0
    for number in range(4 * NUM_PAGES):
        put(stores[number % 3], number)
        most = max(most, num_files(stores[0]))
    assert most >= NUM_PAGES * SHARE_KEPT
    assert most <= NUM_PAGES * (1 + 3 * SHARE_UNCOUNTED)


@pytest.mark.usefixtures("often")
def test_what_another_process_finds_leaves_last(tmp_path: Path) -> None:
    first = DirectoryStore(tmp_path / "pages", max_bytes=10 * SIZE)
    second = DirectoryStore(tmp_path / "pages", max_bytes=10 * SIZE)
    for number in range(10):
        put(first, number)
    set_times(first, 10)
    assert first.find([name(0)], 1.0) == [True]
    put(second, 10)
    assert first.find([name(each) for each in range(11)], 1.0) == [
        each not in (1, 2) for each in range(11)
    ]


@pytest.mark.usefixtures("often")
def test_what_other_processes_removed_is_not_counted(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "pages", max_bytes=10 * SIZE)
    for number in range(10):
        put(store, number)
    set_times(store, 10)
    for number in range(5, 10):
        store.file(name(number)).unlink()
    put(store, 10)
    assert num_files(store) == 6, "there is room, so none of the oldest leaves"


def test_counts_take_a_tenth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, counts = 0.0, 0
    walk = kept_files._walk

    def walk_slowly(path: Path) -> object:
        nonlocal now, counts
        now, counts = now + 1.0, counts + 1
        return walk(path)

    monkeypatch.setattr(kept_files, "_walk", walk_slowly)
    monkeypatch.setattr("kvcore_runtime.far.kept_files.time.monotonic", lambda: now)
    store = DirectoryStore(tmp_path / "pages", max_bytes=2 * SIZE)
    for number in range(50):
        put(store, number)
        assert num_files(store) <= 2, "its own files are counted all the same"
        now += 1.0
    assert counts == 1 + 50 // (SCANS_APART + 1)


def test_without_a_limit_no_name_is_remembered(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "pages")
    put(store, 1)
    assert store.find([name(1)], 1.0) == [True]
    assert store.get([name(1)], [empty()]) == [SIZE]
    held = [each for each in vars(store).values() if isinstance(each, dict)]
    assert not any(held)
