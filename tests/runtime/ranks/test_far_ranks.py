# SPDX-License-Identifier: Apache-2.0
"""A far tier of two ranks: each keeps its slice, and a page counts if all ranks have it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.model.model import tiny_model

from kvcore import KVCacheManager, Request
from tests.runtime.ranks.far_rank import CONFIG, OPTIONS, model_requests, run
from tests.runtime.ranks.processes import WAIT_S, errors, ranks

NUM_BLOCKS = 4
"""Full blocks of the first prompt, all of which may be loaded."""


def answer(folder: Path, story: str) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Answer requests with two ranks: their tokens, loaded and stored pages."""
    with ranks(folder, 2, story, run) as processes:
        for rank, each in enumerate(processes):
            each.join(WAIT_S)
            assert each.exitcode == 0, errors(folder, rank)
    (folder / "meet").unlink()
    (folder / "answered").unlink()
    answers, num_loaded, num_stored = torch.load(folder / "answers.pt")
    return answers, num_loaded, num_stored


def alone() -> dict[str, tuple[int, ...]]:
    """Answer all requests in one process, without a far tier."""
    engine = Engine(tiny_model(), CONFIG, OPTIONS)
    for request in model_requests():
        engine.add_request(request)
    return {each.request_id: each.tokens for each in engine.run()}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the pages of all requests."""
    folder = tmp_path_factory.mktemp("stored")
    answers, num_loaded, num_stored = answer(folder, "whole")
    assert answers == alone()
    assert num_loaded == 0
    num_full = sum((len(each.prompt) + 5) // 16 for each in model_requests())
    assert num_stored == num_full
    assert len(list(folder.rglob("*.kv"))) == 2 * num_full
    return folder


@pytest.fixture
def folder(stored: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    shutil.copytree(stored / "pages", tmp_path / "pages")
    return tmp_path


def page(folder: Path, rank: int, block: int) -> Path:
    """Return the file of a rank's slice of a block of the first prompt."""
    manager = KVCacheManager(CONFIG)
    request = model_requests()[0]
    manager.add_request(Request(request.request_id, request.prompt))
    (keys,) = manager.get_block_keys(request.request_id)
    (found,) = folder.glob(f"pages/*/*/{rank}.2/*/{keys[block].hex()}.kv")
    return found


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("hurt", "num_right"),
    [
        pytest.param([], NUM_BLOCKS, id="nothing"),
        pytest.param([(Path.unlink, 1, 2)], 2, id="rank 1 misses the third"),
        pytest.param([(damage, 1, 1)], 1, id="rank 1 finds the second damaged"),
        pytest.param(
            [(damage, 0, 3), (damage, 1, 2)], 2, id="rank 0 has three in a row, rank 1 two"
        ),
        pytest.param([(damage, 1, 0)], 0, id="rank 1 has none in a row"),
    ],
)
def test_the_pages_that_all_ranks_have_in_a_row_are_loaded(
    hurt: list[tuple[Callable[[Path], None], int, int]], num_right: int, folder: Path
) -> None:
    for change, rank, block in hurt:
        change(page(folder, rank, block))
    answers, num_loaded, _ = answer(folder, "one")
    assert answers == {"r0": alone()["r0"]}
    assert num_loaded == num_right
    if hurt:  # what was wrong has been stored anew
        answers, num_loaded, num_stored = answer(folder, "one")
        assert (num_loaded, num_stored) == (NUM_BLOCKS, 0)
        assert answers == {"r0": alone()["r0"]}


def test_no_request_waits_for_a_rank_whose_store_does_not_answer(folder: Path) -> None:
    answers, num_loaded, _ = answer(folder, "late")
    assert answers == {"r0": alone()["r0"]}
    assert num_loaded == 0


def test_a_rank_that_dies_while_it_fetches_is_lost(folder: Path) -> None:
    with ranks(folder, 2, "dies", run) as processes:
        processes[0].join(WAIT_S)
        assert processes[0].exitcode == 1
    assert "RankLost: a rank was lost at batch " in errors(folder, 0)


def test_an_order_that_a_rank_cannot_carry_out_ends_the_steps(folder: Path) -> None:
    with ranks(folder, 2, "refuses", run) as processes:
        processes[0].join(WAIT_S)
        assert processes[0].exitcode == 1
        processes[1].join(WAIT_S)
        assert processes[1].exitcode == 0, errors(folder, 1)
    assert "StepFailed: batch " in errors(folder, 0)
    assert "is not wanted" in errors(folder, 1)


@pytest.mark.parametrize(
    ("story", "reason"),
    [
        ("apart", "it has orders for a far tier, and this rank has none"),
        ("few", "rank 0 has 24 slots of a far tier, this rank 9"),
    ],
)
def test_a_rank_that_cannot_keep_its_slices_is_refused(
    story: str, reason: str, tmp_path: Path
) -> None:
    with ranks(tmp_path, 2, story, run) as processes:
        processes[0].join(WAIT_S)
        assert processes[0].exitcode == 1
        processes[1].join(WAIT_S)
    assert "StepFailed: batch 0 could not be applied" in errors(tmp_path, 0)
    assert reason in errors(tmp_path, 1)
