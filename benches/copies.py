# SPDX-License-Identifier: Apache-2.0
"""Compare copies of randomly placed pages with one contiguous copy_ of as many bytes.

Both sides take turns in one process, on the same memory, and are measured by process CPU
time and wall time; a ratio is the median over rounds of (contiguous time / pages' time): 1.0 is
memory speed. One thread; all memory was written before, since reads of untouched memory cost
nothing. Placement is random with a fixed seed, and no two pages are neighbours on both sides. Goals
(CPU): at least 0.9 from 512 KiB a page, 0.5 at 64 KiB.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import attrs
import torch
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.copies import copy_blocks, swap_in, swap_out, zero_blocks
from kvcore_runtime.cache.layout import CacheLayout, Order

PAGE_KIB = (8, 64, 512, 2048)
GOALS = {512: 0.9, 2048: 0.9, 64: 0.5}
PAYLOAD_MIB = 64
NUM_LAYERS = 4

Operation = Callable[[], object]


@attrs.frozen(kw_only=True)
class Figure:
    """One measured line: medians of the ratios by CPU time and by wall time."""

    operation: str
    order: str
    page_kib: int
    num_pages: int
    cpu_ratio: float
    wall_ratio: float


def page_layout(page_kib: int, order: Order) -> CacheLayout:
    """Return an fp16 layout of NUM_LAYERS layers whose page has this many KiB."""
    head_dim = 64
    block_size = page_kib * 1024 // (NUM_LAYERS * 2 * head_dim * 2)
    return CacheLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=1,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float16,
        order=order,
    )


def operations(cache: Cache, num_pages: int, seed: int) -> dict[str, tuple[Operation, Operation]]:
    """Return the copying commands on random pages, each with a contiguous operation of equal size.

    cache: of 2 * num_pages device blocks and at least num_pages host blocks, which are written.
    """
    for tier in (cache.blocks, cache.host_blocks):
        tier.data.fill_(1.0)
    placed = random.Random(seed)
    blocks = placed.sample(range(2 * num_pages), 2 * num_pages)
    sources, targets = blocks[:num_pages], blocks[num_pages:]
    hosts = placed.sample(range(cache.num_host_blocks), num_pages)
    first, second = cache.blocks.pieces.view(-1).chunk(2)
    host = cache.host_blocks.pieces.view(-1)[-first.numel() :]
    return {
        "CopyOnWrite": (
            lambda: copy_blocks(cache, sources, targets),
            lambda: second.copy_(first),
        ),
        "SwapOut": (
            lambda: swap_out(cache, sources, hosts),
            lambda: host.copy_(first, non_blocking=True),
        ),
        "SwapIn": (
            lambda: swap_in(cache, hosts, targets),
            lambda: second.copy_(host, non_blocking=True),
        ),
        "Zero": (lambda: zero_blocks(cache, targets), lambda: second.zero_()),
    }


def measure(page_kib: int, order: Order, rounds: int, seed: int) -> list[Figure]:
    """Measure the ratios of the four operations at one page size and order."""
    num_pages = PAYLOAD_MIB * 1024 // page_kib
    cache = Cache(page_layout(page_kib, order), 2 * num_pages, 2 * num_pages)
    figures = []
    for name, (pages, whole) in operations(cache, num_pages, seed).items():
        cpu, wall = _ratios(whole, pages, rounds)
        figures.append(
            Figure(
                operation=name,
                order=order,
                page_kib=page_kib,
                num_pages=num_pages,
                cpu_ratio=round(cpu, 3),
                wall_ratio=round(wall, 3),
            )
        )
    return figures


def _ratios(whole: Operation, pages: Operation, rounds: int) -> tuple[float, float]:
    whole()
    pages()
    cpu, wall = [], []
    for turn in range(rounds):
        times = {}
        for each in (whole, pages) if turn % 2 else (pages, whole):
            start_cpu, start_wall = time.process_time_ns(), time.perf_counter_ns()
            each()
            end_wall, end_cpu = time.perf_counter_ns(), time.process_time_ns()
            times[each] = (end_cpu - start_cpu, end_wall - start_wall)
        cpu.append(times[whole][0] / times[pages][0])
        wall.append(times[whole][1] / times[pages][1])
    return statistics.median(cpu), statistics.median(wall)


def main() -> None:
    """Print the figures, one per line, with the goal if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="measurements per line")
    parser.add_argument("--seed", type=int, default=0, help="seed of the placement")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    orders: tuple[Order, ...] = ("block_major", "layer_major")
    for order in orders:
        for page_kib in PAGE_KIB:
            for figure in measure(page_kib, order, options.rounds, options.seed):
                if options.json:
                    print(json.dumps(attrs.asdict(figure)))
                else:
                    print(_line(figure))


def _line(figure: Figure) -> str:
    goal = GOALS.get(figure.page_kib) if figure.order == "block_major" else None
    if figure.operation == "Zero":
        goal = None
    wanted = f"  goal {goal:.2f}" if goal is not None else ""
    return (
        f"{figure.operation:<12} {figure.order:<12} "
        f"{figure.page_kib:>5} KiB x {figure.num_pages:<5} of one contiguous operation: "
        f"cpu {figure.cpu_ratio:5.2f}  wall {figure.wall_ratio:5.2f}{wanted}"
    )


if __name__ == "__main__":
    main()
