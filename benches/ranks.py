# SPDX-License-Identifier: Apache-2.0
"""Measure what a step costs two ranks that compute nothing, beside gloo's own collectives.

Run: python -m benches.ranks. Rank 0 writes and sends a decode step of 12 sequences, the other one
reads it and reports; then both do the same with one broadcast and one reduction of gloo, in turns.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
import torch.distributed as dist
from kvcore_runtime.ranks.links import FIRST_BYTES, Links, connect
from kvcore_runtime.ranks.step_wire import RankPass, RankStep, decode_step, encode_step, step_size

from kvcore.types.commands import Batch

NUM_STEPS = 2000
NUM_WARM = 50
NUM_SEQUENCES = 12


def step(number: int) -> RankStep:
    """Make a step that decodes one token of each sequence."""
    rows = np.arange(NUM_SEQUENCES, dtype=np.uint32)
    computes = RankPass(rows=rows, starts=rows + 99, ends=rows + 100, tokens=rows, wanted=rows)
    return RankStep(batch=Batch(number, bytearray(), b""), computes=computes)


def send_step(links: Links, number: int) -> None:
    """Exchange a step and its report."""
    if links.rank == 0:
        links.number = number
        links.broadcast(encode_step(step(number)))
        assert links.collect() == number
    else:
        links.report(decode_step(links.broadcast()).batch.number)
        links.finish_report()


def use_collectives(links: Links, number: int) -> None:
    """Do the same by a broadcast of as many bytes, and a reduction of four numbers."""
    data = bytearray(FIRST_BYTES)
    if links.rank == 0:
        message = encode_step(step(number))
        data[: len(message)] = message
    dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, links.control)
    if links.rank:
        decode_step(bytes(data[: step_size(bytes(data))]))
    least = torch.tensor((number, 0, 0, 0))
    dist.all_reduce(least, dist.ReduceOp.MIN, links.control)
    assert least[0] == number


def run(rank: int, folder: Path) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    links = connect(rank, 2, f"file://{folder}/meet")
    ours, theirs = [], []
    for number in range(NUM_STEPS):
        started = time.perf_counter()
        send_step(links, number)
        between = time.perf_counter()
        use_collectives(links, number)
        ours.append((between - started) * 1e6)
        theirs.append((time.perf_counter() - between) * 1e6)
    if rank == 0:
        print(f"a step of {len(encode_step(step(0)))} bytes, us of rank 0 (lower quartile; median)")
        for name, times in (("step and report", ours), ("broadcast and reduction", theirs)):
            print(
                f"{name:24} {quantiles(times[NUM_WARM:])[0]:5.0f} {median(times[NUM_WARM:]):5.0f}"
            )
    links.gather(b"end")
    links.close()


def main() -> None:
    """Start two ranks on the loopback interface."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=run, args=(rank, Path(folder))) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


if __name__ == "__main__":
    main()
