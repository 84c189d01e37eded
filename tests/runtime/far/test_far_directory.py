# SPDX-License-Identifier: Apache-2.0
"""Pages in files: whole or not at all, private, within a limit; no other file is touched."""

import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from kvcore_runtime.cache.errors import TierUnusable
from kvcore_runtime.far import private_files
from kvcore_runtime.far.directory import DirectoryStore
from kvcore_runtime.far.threaded import ThreadedTier

from kvcore.far.errors import InvalidTier
from kvcore.far.page import PAYLOAD_START, PageOwner, begin_page, seal_page
from kvcore.far.tier import FarStatus
from kvcore.types.keys import make_key

PLACE = PageOwner(bytes(range(32)))
SIZE = PAYLOAD_START + 40


def key(number: int) -> bytes:
    return make_key(number.to_bytes(32, "little"), 0)


def name(number: int = 0) -> str:
    return PLACE.name(key(number))


def page(number: int = 0) -> memoryview:
    slot = memoryview(bytearray(SIZE))
    begin_page(slot, PLACE.identity, key(number))
    slot[PAYLOAD_START:] = bytes([number]) * 40
    seal_page(slot)
    return slot


def empty() -> memoryview:
    return memoryview(bytearray(SIZE))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "pages")


@pytest.fixture
def tier(store: DirectoryStore) -> Iterator[ThreadedTier]:
    made = ThreadedTier(store)
    yield made
    made.close(10)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def wait(tier: ThreadedTier, ticket: int | None) -> tuple[FarStatus, ...]:
    """Wait for the statuses of a ticket, at most half a minute."""
    assert ticket is not None
    end = time.monotonic() + 30
    while time.monotonic() < end:
        for done in tier.poll():
            assert done.ticket == ticket
            return done.statuses
        time.sleep(0.001)
    raise AssertionError(f"ticket {ticket} did not end")


@pytest.mark.parametrize("mask", [0, 0o022, 0o277, 0o777])
def test_what_was_put_is_had_by_whoever_comes_later(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    store = DirectoryStore(tmp_path / "a" / "pages")
    assert store.put([name(1), name(2)], [page(1), page(2)]) == [FarStatus.OK] * 2
    later, got = DirectoryStore(tmp_path / "a" / "pages"), [empty(), empty()]
    assert later.find([name(1), name(3)], 1.0) == [True, False]
    assert later.get([name(1), name(3)], got) == [SIZE, FarStatus.MISSING]
    assert got[0] == page(1)
    for folder in (tmp_path / "a", later.path, later.file(name(1)).parent):
        assert mode(folder) == 0o700
    assert mode(later.file(name(1))) == 0o600
    assert later.file(name(1)).parent.name == key(1).hex()[:2]


def test_what_is_there_is_not_written_again(store: DirectoryStore) -> None:
    store.put([name()], [page()])
    before = store.file(name()).stat().st_ino
    assert store.put([name()], [page()]) == [FarStatus.OK]
    assert store.file(name()).stat().st_ino == before


@pytest.mark.parametrize("wide", [0o755, 0o710, 0o702])
def test_a_directory_that_others_may_use_is_refused_and_left_as_it_is(
    tmp_path: Path, wide: int
) -> None:
    tmp_path.chmod(wide)
    with pytest.raises(TierUnusable, match=f"others? .* mode is {wide:o}; make it 700"):
        DirectoryStore(tmp_path)
    assert mode(tmp_path) == wide


def test_a_directory_that_cannot_be_had_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TierUnusable, match="File exists"):
        DirectoryStore(tmp_path / "file")
    with pytest.raises(InvalidTier, match="max_bytes is 0, expected at least one page"):
        DirectoryStore(tmp_path / "new", max_bytes=0)
    small = DirectoryStore(tmp_path / "small", max_bytes=SIZE - 1)
    with pytest.raises(InvalidTier, match=f"max_bytes is {SIZE - 1}, expected at least one page, "):
        ThreadedTier(small).attach(memoryview(bytearray(3 * SIZE)), SIZE)
    assert not (tmp_path / "new").exists()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(TierUnusable, match=f"belongs to user {mine}, not to user {mine + 1}"):
        DirectoryStore(tmp_path)


def test_processes_may_make_a_directory_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes a directory above just after this one has seen that there is none."""
    exists = Path.exists

    def exists_soon(path: Path) -> bool:
        found = exists(path)
        path.mkdir(mode=0o700, exist_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", exists_soon)
    store = DirectoryStore(tmp_path / "above" / "pages")
    assert store.put([name()], [page()]) == [FarStatus.OK]


def put_fifo(place: Path) -> None:
    os.mkfifo(place)


def put_link(place: Path) -> None:
    elsewhere = place.parents[5] / "elsewhere"
    elsewhere.write_bytes(page())
    place.symlink_to(elsewhere)


def put_directory(place: Path) -> None:
    place.mkdir()


def put_socket(place: Path) -> None:
    # The path of a socket is short, so it is made beside the test and moved.
    before = Path.cwd()
    os.chdir(place.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("s")
    finally:
        os.chdir(before)
    (place.parent / "s").rename(place)


@pytest.mark.parametrize("put", [put_fifo, put_link, put_directory, put_socket])
def test_only_a_regular_file_is_a_page(
    store: DirectoryStore, tier: ThreadedTier, put: Callable[[Path], None]
) -> None:
    """A FIFO does not block a read, and anything in the place of a page is replaced by one."""
    store.put([name()], [page()])
    store.file(name()).unlink()
    put(store.file(name()))
    assert store.find([name()], 1.0) == [False]
    assert wait(tier, tier.submit_load([name()], [empty()])) == (FarStatus.DAMAGED,)
    again = wait(tier, tier.submit_store([name()], [page()]))
    assert again == ((FarStatus.FAILED,) if put is put_directory else (FarStatus.OK,))
    if put is put_link:
        assert (store.path.parent / "elsewhere").read_bytes() == page()


@pytest.mark.parametrize("size", [0, 1, 111, SIZE - 1, SIZE + 1, 1 << 26])
def test_a_page_of_another_size_is_damaged_and_goes(
    store: DirectoryStore, tier: ThreadedTier, size: int
) -> None:
    store.put([name()], [page()])
    os.truncate(store.file(name()), size)
    assert wait(tier, tier.submit_load([name()], [empty()])) == (FarStatus.DAMAGED,)
    assert not store.file(name()).exists()
    assert wait(tier, tier.submit_store([name()], [page()])) == (FarStatus.OK,)
    assert wait(tier, tier.submit_load([name()], [empty()])) == (FarStatus.OK,)


def test_a_file_of_an_earlier_format_is_foreign_and_stays(
    store: DirectoryStore, tier: ThreadedTier
) -> None:
    store.put([name()], [page()])
    store.file(name()).write_bytes(b"kvblock1" + bytes(SIZE - 8))
    assert wait(tier, tier.submit_load([name()], [empty()])) == (FarStatus.FOREIGN,)
    assert store.file(name()).exists()


def test_a_writer_that_fails_or_dies_leaves_no_page(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {errno.ENOSPC: FarStatus.FULL, errno.EDQUOT: FarStatus.FULL}
    for number, status in {**numbers, errno.EROFS: FarStatus.FAILED}.items():
        error = OSError(number, os.strerror(number))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", Mock(side_effect=error))
            assert store.put([name()], [page()]) == [status]
    assert [each for each in store.path.rglob("*") if each.is_file()] == []
    old, new = (store.path / f"{private_files.TEMPORARY}{each}" for each in ("old", "new"))
    for file, age in ((old, 3700), (new, 3500)):
        file.write_bytes(b"half")
        os.utime(file, (time.time() - age,) * 2)
    DirectoryStore(store.path)
    assert (old.exists(), new.exists()) == (False, True)


def test_above_the_limit_the_longest_unused_leave_but_for_the_leased(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "pages", max_bytes=10 * SIZE)
    for number in range(10):
        store.put([name(number)], [page(number)])
    assert store.find([name(0)], 60.0) == [True]
    store.get([name(1)], [empty()])
    store.put([name(10)], [page(10)])
    assert store.find([name(each) for each in range(11)], 0.001) == [
        each not in (2, 3) for each in range(11)
    ]
    again = DirectoryStore(tmp_path / "pages", max_bytes=2 * SIZE)
    again.put([name(11)], [page(11)])
    left = [each for each in range(12) if store.file(name(each)).exists()]
    assert left == [11], "what was there when it was opened counts too"
