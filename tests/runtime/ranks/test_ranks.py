# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of their own: the same answers and tables, and what each hears of a loss."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kvcore_runtime.engine.engine import Engine
from kvcore_runtime.model.model import tiny_model

from tests.runtime.ranks.rank import CONFIG, OPTIONS, SHAPE, TIMEOUT_S, model_requests

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0


@contextlib.contextmanager
def ranks(folder: Path, world: int, story: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield the processes of all ranks; none is left behind."""
    command = [sys.executable, "-m", "tests.runtime.ranks.rank", str(folder)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), story],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.wait()
            if each.stderr is not None:
                each.stderr.close()


def wait_for(folder: Path, name: str, processes: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + WAIT_S
    while not (folder / name).exists():
        ended = [each.communicate()[1] for each in processes if each.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answers_and_tables_are_those_of_one_process(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, "whole") as processes:
        for each in processes:
            _, errors = each.communicate(timeout=WAIT_S)
            assert each.returncode == 0, errors
    answers, counts, (num_steps, num_bytes) = torch.load(tmp_path / "answers.pt")
    engine = Engine(tiny_model(config=SHAPE), CONFIG, OPTIONS)
    for request in model_requests():
        engine.add_request(request)
    expected = {f"0.{each.request_id}#{each.sample}": each.tokens for each in engine.run()}
    assert answers == expected
    assert len(answers) == 24
    assert min(counts) > 0, "no swap, no copy or no eviction"
    assert torch.equal(torch.load(tmp_path / "tables0.pt"), torch.load(tmp_path / "tables1.pt"))
    assert num_steps == engine.metrics.num_steps
    assert num_bytes / num_steps < 1000


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)


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
    hurt: Callable[[subprocess.Popen[str]], None],
    seconds: float,
    tmp_path: Path,
) -> None:
    with ranks(tmp_path, world, "endless") as processes:
        wait_for(tmp_path, "running", processes)
        hurt(processes[victim])
        for number, each in enumerate(processes):
            if number != victim:
                _, errors = each.communicate(timeout=seconds)
                assert each.returncode == 1
                assert "RankLost: a rank was lost at batch " in errors


@pytest.mark.slow  # each process imports torch: most of these tests are for the long run
def test_a_batch_that_a_follower_cannot_apply_is_an_error_of_the_leader(tmp_path: Path) -> None:
    with ranks(tmp_path, 2, "small") as processes:
        errors = [each.communicate(timeout=WAIT_S)[1] for each in processes]
    assert "StepFailed: batch " in errors[0]
    assert "rank 1 says why" in errors[0]
    assert "rank 1 cannot apply batch" in errors[1]
    assert processes[0].returncode == 1
