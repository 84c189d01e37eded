# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of their own: the same answers and tables, and what each hears of a loss."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.model.model import tiny_model

from tests.runtime.ranks.processes import WAIT_S, errors, ranks
from tests.runtime.ranks.rank import CONFIG, OPTIONS, SHAPE, TIMEOUT_S, model_requests, run


def wait_for(folder: Path, name: str, processes: list[BaseProcess]) -> None:
    end = time.monotonic() + WAIT_S
    while not (folder / name).exists():
        for rank, each in enumerate(processes):
            assert each.is_alive(), errors(folder, rank)
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answers_and_tables_are_those_of_one_process(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, "whole", run) as processes:
        for rank, each in enumerate(processes):
            each.join(WAIT_S)
            assert each.exitcode == 0, errors(tmp_path, rank)
    answers, counts, (num_steps, num_bytes, spans) = torch.load(tmp_path / "answers.pt")
    engine = Engine(tiny_model(config=SHAPE), CONFIG, OPTIONS)
    for request in model_requests():
        engine.add_request(request)
    expected = {f"0.{each.request_id}#{each.sample}": each.tokens for each in engine.run()}
    assert answers == expected
    assert len(answers) == 24
    assert min(counts) > 0, "no swap, no copy or no eviction"
    assert torch.equal(torch.load(tmp_path / "tables0.pt"), torch.load(tmp_path / "tables1.pt"))
    assert num_steps == engine.metrics.num_steps
    assert num_bytes / num_steps < 300
    assert spans["kvcore.ranks.send"] == spans["kvcore.ranks.agree"] == num_steps


def kill(process: BaseProcess) -> None:
    process.kill()


def stop(process: BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("world", "victim", "hurt", "seconds"),
    [
        pytest.param(3, 2, kill, WAIT_S, id="a follower dies"),
        pytest.param(2, 0, kill, WAIT_S, id="the leader dies", marks=pytest.mark.slow),
        pytest.param(2, 1, stop, TIMEOUT_S + WAIT_S, id="a follower stops", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_is_an_error_on_every_survivor(
    world: int,
    victim: int,
    hurt: Callable[[BaseProcess], None],
    seconds: float,
    tmp_path: Path,
) -> None:
    with ranks(tmp_path, world, "endless", run) as processes:
        wait_for(tmp_path, "running", processes)
        hurt(processes[victim])
        for number, each in enumerate(processes):
            if number != victim:
                each.join(seconds)
                assert each.exitcode == 1
                assert "RankLost: a rank was lost at batch " in errors(tmp_path, number)


def test_a_batch_that_a_follower_cannot_apply_is_an_error_of_the_leader(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, "small", run) as processes:
        for each in processes:
            each.join(WAIT_S)
        assert processes[0].exitcode == 1
    assert "StepFailed: batch " in errors(tmp_path, 0)
    assert "rank 1 says why" in errors(tmp_path, 0)
    assert "rank 1 cannot apply batch" in errors(tmp_path, 1)
