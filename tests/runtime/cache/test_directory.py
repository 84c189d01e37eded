# SPDX-License-Identifier: Apache-2.0
"""Blocks in files: there whole or not at all, and nothing damaged or foreign is believed."""

import errno
import os
from pathlib import Path

import pytest
import torch
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.directory import DirectoryTier, describe
from kvcore_runtime.cache.errors import (
    BlockDamaged,
    BlockForeign,
    BlockMissing,
    TierFailed,
    TierUnusable,
)
from kvcore_runtime.cache.layout import CacheLayout
from torch import Tensor

from kvcore.types.keys import make_key

KEY = make_key(bytes(range(32)), 0)
OTHER = make_key(bytes(range(32)), 1)


def page(value: int = 7) -> Tensor:
    return torch.arange(value, value + 40, dtype=torch.uint8)


def make_tier(path: Path) -> DirectoryTier:
    return DirectoryTier(path / "blocks", "a model")


def names(tier: DirectoryTier) -> list[str]:
    return sorted(each.name for each in tier.path.iterdir())


def test_what_was_stored_is_loaded_by_whoever_comes_later(tmp_path: Path) -> None:
    make_tier(tmp_path).store(KEY, page())
    later = make_tier(tmp_path)
    assert KEY in later
    assert OTHER not in later
    assert later.load(KEY, 40).tolist() == page().tolist()
    assert names(later) == [f"{KEY.hex()}.kv"]


def test_a_key_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.store(KEY, page())
    before = tier.file(KEY).stat().st_ino
    tier.store(KEY, page())
    assert tier.file(KEY).stat().st_ino == before


def test_a_key_that_is_not_there_is_missing(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.store(KEY, page())
    with pytest.raises(BlockMissing, match=f"there is no block {OTHER.hex()} in "):
        tier.load(OTHER, 40)


def test_a_store_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tier = make_tier(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(TierFailed, match=f"{KEY.hex()} in .*: No space left on device"):
            tier.store(KEY, page())
    assert names(tier) == []
    tier.store(KEY, page())
    assert tier.load(KEY, 40).tolist() == page().tolist()


def test_a_writer_that_dies_leaves_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had written until then."""

    class Killed(BaseException):
        pass

    def die(_number: int) -> None:
        raise Killed

    tier = make_tier(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", die)
        with pytest.raises(Killed):
            tier.store(KEY, page())
    assert KEY not in tier
    with pytest.raises(BlockMissing):
        tier.load(KEY, 40)
    tier.store(KEY, page())
    assert tier.load(KEY, 40).tolist() == page().tolist()


def test_every_flipped_bit_is_damage(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.store(KEY, page())
    whole = tier.file(KEY).read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        tier.file(KEY).write_bytes(flipped)
        with pytest.raises(BlockDamaged, match=f"block {KEY.hex()} in .* is damaged"):
            tier.load(KEY, 40)
        assert KEY not in tier, "a damaged file is removed"
    tier.store(KEY, page())
    assert tier.file(KEY).read_bytes() == whole


def test_every_cut_file_is_damage(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.store(KEY, page())
    whole = tier.file(KEY).read_bytes()
    for content in (*(whole[:size] for size in range(len(whole))), whole + b"\0"):
        tier.file(KEY).write_bytes(content)
        with pytest.raises(BlockDamaged, match=f"it has {len(content)} bytes"):
            tier.load(KEY, 40)


def test_a_file_under_another_s_name_is_damage(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tier.store(KEY, page())
    tier.file(KEY).replace(tier.file(OTHER))
    with pytest.raises(BlockDamaged, match=f"it holds block {KEY.hex()}"):
        tier.load(OTHER, 40)


def test_blocks_of_another_model_are_left_alone(tmp_path: Path) -> None:
    make_tier(tmp_path).store(KEY, page())
    other = DirectoryTier(tmp_path / "blocks", "another one")
    with pytest.raises(BlockForeign, match="40 bytes of 'a model', expected 40 bytes of 'another"):
        other.load(KEY, 40)
    with pytest.raises(BlockForeign, match="40 bytes of 'a model', expected 44 bytes") as caught:
        make_tier(tmp_path).load(KEY, 44)
    assert caught.value.fields["num_bytes"] == 40
    assert caught.value.fields["expected_bytes"] == 44
    assert KEY in other


def test_a_directory_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("in the way")
    with pytest.raises(TierUnusable, match="File exists"):
        make_tier(tmp_path)
    (tmp_path / "blocks").unlink()
    tier = make_tier(tmp_path)
    tier.path.rmdir()
    with pytest.raises(TierFailed, match="No such file or directory"):
        tier.store(KEY, page())


def test_a_description_tells_models_types_and_shapes_apart() -> None:
    layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8)
    half = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=8, dtype=torch.float16)
    said = [
        describe(Cache(layout, 2), "m"),
        describe(Cache(layout, 2), "n"),
        describe(Cache(half, 2), "m"),
        describe(Cache(layout, 2, groups=[(2, 8), (1, 16)]), "m"),
    ]
    assert len(set(said)) == len(said)
    assert said[0] == describe(Cache(layout, 9, 3), "m")
