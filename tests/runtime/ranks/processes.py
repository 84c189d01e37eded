# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of a test."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

Run = Callable[[Path, int, int, str], None]
WAIT_S = 120.0
# A fork has torch already, whose import takes seconds.
PROCESSES = (
    multiprocessing.get_context("fork")
    if sys.platform == "linux"
    else multiprocessing.get_context("spawn")
)


@contextlib.contextmanager
def ranks(folder: Path, world: int, story: str, run: Run) -> Iterator[list[BaseProcess]]:
    """Yield the processes of all ranks; none is left behind. run: what each does."""
    started: list[BaseProcess] = [
        PROCESSES.Process(target=run, args=(folder, rank, world, story)) for rank in range(world)
    ]
    try:
        with warnings.catch_warnings():
            # Python warns about the threads that a fork lacks; it does not wait for any of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            for each in started:
                each.start()
        yield started
    finally:
        for each in started:
            if each.pid is not None:
                each.kill()
                each.join()
            each.close()


def errors(folder: Path, rank: int) -> str:
    """Return what a rank has reported."""
    return (folder / f"errors{rank}").read_text()
