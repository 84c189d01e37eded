# SPDX-License-Identifier: Apache-2.0
"""Measure what a step costs two ranks that compute nothing, beside gloo's own collectives.

Run: python -m benches.ranks. Rank 0 writes and sends a decode step of 12 sequences, the other one
reads it and reports; then both do the same with one broadcast and one reduction of gloo, in turns.
CPU time is that of rank 0's process, gloo's threads included.
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
    times: dict[str, list[float]] = {each.__name__: [] for each in (send_step, use_collectives)}
    used = dict.fromkeys(times, 0.0)
    for number in range(NUM_STEPS):
        for exchange in (send_step, use_collectives):
            started, before = time.perf_counter(), time.process_time()
            exchange(links, number)
            times[exchange.__name__].append((time.perf_counter() - started) * 1e6)
            used[exchange.__name__] += (time.process_time() - before) * 1e6 / NUM_STEPS
    if rank == 0:
        print(f"a step of {len(encode_step(step(0)))} bytes, us of rank 0")
        print(f"{'':24} lower quartile  median  CPU, mean")
        names = ("step and report", "broadcast and reduction")
        for name, key in zip(names, times, strict=True):
            wall = times[key][NUM_WARM:]
            print(f"{name:24} {quantiles(wall)[0]:14.0f}  {median(wall):6.0f}  {used[key]:9.0f}")
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
