# SPDX-License-Identifier: Apache-2.0
"""Measure a CUDA device's time for the commands of a batch, as shares of its own bandwidth.

Run: `make gpu-check`, or `python -m benches.gpu`. Each side is one call over the same memory
(random pages; one contiguous operation of as many bytes). Both are queued in turn on one stream
behind work that outlasts the calls, as a forward pass would, and timed by the device's events; a
share is the median over rounds of (contiguous time / pages' time): 1.0 is the device's own copy
speed, or that of its bus for swaps. Goal: 0.9. The time of the caller is its own figure. Without a
CUDA device it says so. `--device cpu` measures by the clock, to try the program itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import attrs
import torch
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.tables import BlockTables
from msgspec.structs import replace

from benches.copies import Operation, operations, page_layout
from kvcore.types.commands import (
    Batch,
    Command,
    CopyOnWrite,
    SetTable,
    SwapIn,
    SwapOut,
    Zero,
    close,
)

PAGE_KIB = (2048, 512, 64, 8)
GOAL = 0.9
RUNNING = 1024
TABLE_BLOCKS = 512
AHEAD_CYCLES = 40_000_000
"""The device first waits this long (some 20 ms), so that it never waits for a call."""


@attrs.frozen(kw_only=True)
class Taken:
    """The seconds of an operation on the device, and of its caller."""

    device: float
    caller: float


@attrs.frozen(kw_only=True)
class Timer:
    """Times operations on a device."""

    device: torch.device

    def measure(self, work: Operation) -> Taken:
        """Run the work and wait for it."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            work()
            taken = time.perf_counter() - begin
            return Taken(device=taken, caller=taken)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        begin = time.perf_counter()
        work()
        caller = time.perf_counter() - begin
        end.record()
        end.synchronize()
        return Taken(device=float(start.elapsed_time(end)) / 1e3, caller=caller)

    def compare(self, whole: Operation, pages: Operation, rounds: int) -> tuple[float, Taken]:
        """Return the median ratio (whole over pages) on the device, and the medians of pages."""
        whole(), pages()
        shares, taken = [], []
        for turn in range(rounds):
            order = (whole, pages) if turn % 2 else (pages, whole)
            times = {each: self.measure(each) for each in order}
            shares.append(times[whole].device / times[pages].device)
            taken.append(times[pages])
        return statistics.median(shares), medians(taken)


def medians(taken: Sequence[Taken]) -> Taken:
    """Return the medians of several measurements."""
    return Taken(
        device=statistics.median(each.device for each in taken),
        caller=statistics.median(each.caller for each in taken),
    )


def measure_pages(timer: Timer, page_kib: int, num_pages: int, rounds: int) -> None:
    """Print the shares of copy-on-write, swaps and zeros of this many pages."""
    cache = Cache(page_layout(page_kib, "block_major"), 2 * num_pages, num_pages, timer.device)
    for name, (pages, whole) in operations(cache, num_pages, seed=0).items():
        share, taken = timer.compare(whole, pages, rounds)
        moved = num_pages * page_kib / 1024 / 1024
        print(
            f"{name:12} {num_pages:5} pages of {page_kib:5} KiB: {share:5.2f} of one contiguous "
            f"operation (goal {GOAL}), {moved / taken.device:7.1f} GiB/s of pages, "
            f"{taken.caller * 1e6:5.0f} us of the caller"
        )


def measure_tables(timer: Timer, rounds: int) -> None:
    """Print what the table commands of a decode step of all running requests take."""
    tables = BlockTables(RUNNING, TABLE_BLOCKS, RUNNING, 16, device=timer.device)
    runtime = Runtime(Cache(page_layout(8, "block_major"), RUNNING + 1, 1, timer.device), tables)
    taken = []
    for place in range(min(rounds + 1, TABLE_BLOCKS)):
        batch = close(place, [SetTable(row, 0, place, row + 1) for row in range(RUNNING)])
        taken.append(timer.measure(partial(runtime.apply, batch)))
    median = medians(taken[1:])  # the first run compiles
    print(
        f"tables: one entry for each of {RUNNING} requests: {median.device * 1e6:.0f} us of the "
        f"device, {median.caller * 1e6:.0f} us of the caller"
    )


def busy_batch() -> Batch:
    """Return a batch with copies, swaps both ways, zeros and table changes."""
    commands: list[Command] = [SwapOut(1, 0), SwapOut(2, 1), SwapIn(3, 3), SwapIn(4, 4)]
    commands += [CopyOnWrite(5, 6), Zero(7)]
    return close(0, commands + [SetTable(row, 0, 0, row + 1) for row in range(64)])


def count_launches(device: torch.device) -> None:
    """Print the kernels and transfers that one batch of every kind queues."""
    for page_kib in PAGE_KIB:
        tables = BlockTables(64, 4, 64, 16, device=device)
        runtime = Runtime(Cache(page_layout(page_kib, "block_major"), 80, 8, device), tables)
        runtime.apply(busy_batch())  # compiles
        runtime.apply(replace(busy_batch(), number=1))
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
            runtime.apply(replace(busy_batch(), number=2))
            runtime.cache.synchronize()
        queued = [each.name for each in profile.events() if each.device_type.name == "CUDA"]
        transfers = sum("emcpy" in name for name in queued)
        print(
            f"a batch of 2 + 2 swaps, a copy, a zero and 64 table entries, pages of {page_kib} "
            f"KiB: {len(queued) - transfers} launches, {transfers} transfers"
        )


def main() -> None:
    """Print the figures, or a note that there is no device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program")
    parser.add_argument("--pages", type=int, default=1000, help="pages per call")
    parser.add_argument("--rounds", type=int, default=21, help="measurements per line")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benches.gpu: there is no CUDA device here, nothing is measured")
        return
    torch.set_num_threads(1)
    timer = Timer(device=torch.device(options.device))
    if options.device == "cuda":
        print(torch.cuda.get_device_name())
    for page_kib in PAGE_KIB:
        measure_pages(timer, page_kib, options.pages, options.rounds)
    measure_tables(timer, options.rounds)
    if options.device == "cuda":
        count_launches(timer.device)


if __name__ == "__main__":
    main()
