# SPDX-License-Identifier: Apache-2.0
"""A directory of blocks among other users, and what may stand under a block's name."""

import hashlib
import os
import signal
import socket
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvcore_runtime.cache.directory import DirectoryTier
from kvcore_runtime.cache.errors import (
    BlockDamaged,
    BlockForeign,
    BlockMissing,
    TierError,
    TierFailed,
    TierUnusable,
)

from kvcore.types.keys import make_key

KEY = make_key(bytes(range(32)), 0)
OTHER = make_key(bytes(range(32)), 1)
PAGE = torch.arange(40, dtype=torch.uint8)
HEADER_SIZE = 8 + 4 + 8 + 36


def make_tier(path: Path) -> DirectoryTier:
    return DirectoryTier(path / "blocks", "a model")


@pytest.fixture
def tier(tmp_path: Path) -> DirectoryTier:
    return make_tier(tmp_path)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.fixture
def deadline() -> Iterator[None]:
    """A call that waits is interrupted by an error, after five seconds."""

    def late(_number: int, _frame: object) -> None:
        raise AssertionError("the call waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def names(tier: DirectoryTier) -> list[str]:
    return sorted(each.name for each in tier.path.iterdir())


def assert_whole(tier: DirectoryTier) -> None:
    """The block is there, under its name and nothing else, and it can be loaded."""
    assert names(tier) == [f"{KEY.hex()}.kv"]
    assert KEY in tier
    assert mode(tier.file(KEY)) == 0o600
    assert tier.load(KEY, 40).tolist() == PAGE.tolist()


@pytest.mark.parametrize("mask", [0, 0o022, 0o277, 0o777])
def test_modes_are_private_whatever_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    tier = make_tier(tmp_path)
    tier.store(KEY, PAGE)
    assert mode(tier.path) == 0o700
    assert_whole(tier)


def test_a_directory_is_made_with_those_above_it_for_this_user_alone(
    tmp_path: Path, umask: Callable[[int], int]
) -> None:
    umask(0)
    tier = DirectoryTier(str(tmp_path / "a" / "b"), "a model")
    tier.store(KEY, PAGE)
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    assert_whole(tier)


@pytest.mark.parametrize("wide", [0o755, 0o750, 0o710, 0o702, 0o777])
def test_a_directory_that_others_may_use_is_refused_and_left_as_it_is(
    tmp_path: Path, wide: int
) -> None:
    path = tmp_path / "blocks"
    path.mkdir()
    path.chmod(wide)
    with pytest.raises(TierUnusable, match=f"others? .* mode is {wide:o}; make it 700"):
        DirectoryTier(path, "a model")
    assert mode(path) == wide
    path.chmod(0o700)
    DirectoryTier(path, "a model").store(KEY, PAGE)


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    with pytest.raises(TierUnusable, match=f"belongs to user {mine}, not to user {mine + 1}"):
        DirectoryTier(tmp_path, "a model")


def put_fifo(place: Path) -> None:
    os.mkfifo(place)


def put_link(place: Path) -> None:
    """A link to a whole page of this key."""
    elsewhere = DirectoryTier(place.parent.parent / "elsewhere", "a model")
    elsewhere.store(KEY, PAGE)
    place.symlink_to(elsewhere.file(KEY))


def put_dangling_link(place: Path) -> None:
    place.symlink_to(place.parent.parent / "nowhere")


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


@pytest.mark.parametrize("put", [put_fifo, put_link, put_dangling_link, put_socket])
def test_only_a_regular_file_is_a_block(
    tier: DirectoryTier, put: Callable[[Path], None], deadline: None
) -> None:
    del deadline
    put(tier.file(KEY))
    assert KEY not in tier
    with pytest.raises(BlockDamaged, match="it is not a regular file"):
        tier.load(KEY, 40)
    assert names(tier) == [], "what cannot be read is removed"
    put_again = put if put is not put_link else put_dangling_link
    put_again(tier.file(KEY))
    tier.store(KEY, PAGE)
    assert_whole(tier)


def test_what_a_link_leads_to_is_neither_read_nor_changed(tier: DirectoryTier) -> None:
    put_link(tier.file(KEY))
    target = tier.file(KEY).resolve()
    before = target.read_bytes()
    with pytest.raises(BlockDamaged):
        tier.load(KEY, 40)
    tier.file(KEY).symlink_to(target)
    target.write_bytes(b"precious")
    tier.store(KEY, PAGE)
    assert_whole(tier)
    assert target.read_bytes() == b"precious" != before


def test_a_directory_under_a_block_s_name_is_said_and_left(tier: DirectoryTier) -> None:
    tier.file(KEY).mkdir()
    assert KEY not in tier
    with pytest.raises(BlockDamaged, match="it is not a regular file"):
        tier.load(KEY, 40)
    with pytest.raises(TierFailed, match="Is a directory"):
        tier.store(KEY, PAGE)
    assert names(tier) == [f"{KEY.hex()}.kv"]
    assert tier.num_written == 0


def cut(tier: DirectoryTier) -> None:
    place = tier.file(KEY)
    place.write_bytes(place.read_bytes()[:-1])


def empty(tier: DirectoryTier) -> None:
    tier.file(KEY).write_bytes(b"")


def flip(tier: DirectoryTier) -> None:
    place = tier.file(KEY)
    content = bytearray(place.read_bytes())
    content[HEADER_SIZE + len("a model") + 20] ^= 1
    place.write_bytes(content)


def spoil_digest(tier: DirectoryTier) -> None:
    place = tier.file(KEY)
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)


def of_another_format(tier: DirectoryTier) -> None:
    """Whole, with a digest that fits."""
    content = b"kvblock2" + tier.file(KEY).read_bytes()[8:-32]
    tier.file(KEY).write_bytes(content + hashlib.sha256(content).digest())


def name_another(tier: DirectoryTier) -> None:
    tier.store(OTHER, PAGE)
    tier.file(OTHER).replace(tier.file(KEY))


def of_another_model(tier: DirectoryTier) -> None:
    tier.file(KEY).unlink()
    DirectoryTier(tier.path, "b model").store(KEY, PAGE)


def of_a_longer_description(tier: DirectoryTier) -> None:
    tier.file(KEY).unlink()
    DirectoryTier(tier.path, "a model " * 1000).store(KEY, PAGE)


def of_another_size(tier: DirectoryTier) -> None:
    tier.file(KEY).unlink()
    tier.store(KEY, PAGE[:32].clone())


SPOILT: dict[Callable[[DirectoryTier], None], tuple[type[TierError], str]] = {
    cut: (BlockDamaged, "it has 134 bytes, expected 135"),
    empty: (BlockDamaged, "it has 0 bytes, fewer than a header"),
    flip: (BlockDamaged, "its checksum does not fit its content"),
    spoil_digest: (BlockDamaged, "its checksum does not fit its content"),
    of_another_format: (BlockDamaged, "it begins with b'kvblock2', expected b'kvblock1'"),
    name_another: (BlockDamaged, f"it holds block {OTHER.hex()}"),
    of_another_model: (BlockForeign, "40 bytes of 'b model', expected 40 bytes of 'a model'"),
    of_a_longer_description: (BlockForeign, "holds 40 bytes of '(a model ){128}', expected 40"),
    of_another_size: (BlockForeign, "32 bytes of 'a model', expected 40 bytes of 'a model'"),
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda each: each.__name__)
def test_what_is_not_this_block_whole_is_said_and_stored_anew(
    tier: DirectoryTier, spoil: Callable[[DirectoryTier], None]
) -> None:
    error, message = SPOILT[spoil]
    for loads_first in (True, False):
        tier.store(KEY, PAGE)
        spoil(tier)
        num_written = tier.num_written
        if loads_first:
            with pytest.raises(error, match=message):
                tier.load(KEY, 40)
        tier.store(KEY, PAGE)
        assert tier.num_written == num_written + 1
        assert_whole(tier)


def test_a_file_that_cannot_be_read_is_said_and_stored_anew(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.store(KEY, PAGE)
    open_any = os.open

    def refuse(path: str, flags: int, *rest: int) -> int:
        if str(path).endswith(".kv"):
            raise PermissionError(13, "Permission denied", str(path))
        return open_any(path, flags, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(TierFailed, match=f"{KEY.hex()} in .*: Permission denied"):
            tier.load(KEY, 40)
        assert KEY in tier
        tier.store(KEY, PAGE)
    assert tier.num_written == 2
    assert_whole(tier)


def test_a_directory_that_cannot_be_searched_has_nothing(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    tier.store(KEY, PAGE)
    monkeypatch.setattr(Path, "lstat", refuse)
    assert KEY not in tier


@pytest.mark.parametrize("kind", ["claims its size", "claims another size", "another model"])
def test_sizes_are_checked_before_anything_large_is_read(tier: DirectoryTier, kind: str) -> None:
    """A sparse file of 64 MiB under a block's name."""
    tier.store(KEY, PAGE)
    large, place = 1 << 26, tier.file(KEY)
    header = bytearray(place.read_bytes()[:HEADER_SIZE])
    if kind == "claims its size":
        header[12:20] = (large - HEADER_SIZE - len("a model") - 32).to_bytes(8, "little")
    if kind == "another model":
        header[8:12] = (large - HEADER_SIZE - 40 - 32).to_bytes(4, "little")
    with place.open("wb") as file:
        file.write(header)
        file.truncate(large)
    expected = BlockDamaged if kind == "claims another size" else BlockForeign
    tracemalloc.start()
    try:
        with pytest.raises(expected):
            tier.load(KEY, 40)
        tier.store(KEY, PAGE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert_whole(tier)


def test_a_whole_block_is_not_written_again(tier: DirectoryTier) -> None:
    tier.store(KEY, PAGE)
    before = tier.file(KEY).stat()
    DirectoryTier(tier.path, "a model").store(KEY, PAGE)
    assert tier.file(KEY).stat().st_ino == before.st_ino
    assert tier.num_written == 1


def test_a_writer_that_dies_over_a_damaged_file_leaves_what_was_there(
    tier: DirectoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(_number: int) -> None:
        raise Killed

    tier.store(KEY, PAGE)
    flip(tier)
    damaged = tier.file(KEY).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", die)
        with pytest.raises(Killed):
            tier.store(KEY, PAGE)
    assert tier.file(KEY).read_bytes() == damaged
    for left in tier.path.glob(".*"):
        assert mode(left) == 0o600
    with pytest.raises(BlockDamaged):
        tier.load(KEY, 40)
    with pytest.raises(BlockMissing):
        tier.load(KEY, 40)
