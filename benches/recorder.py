# SPDX-License-Identifier: Apache-2.0
"""Measure what a flight recorder costs: the manager's CPU time with and without it, and bytes.

Run: python -m benches.recorder [TRACE] [--blocks 16384] [--requests 1000] [--rounds 15]. Without a
TRACE the workload is made up. The loop of `kvcore replay` is recorded once. Then the calls of its
record are made on fresh managers, without a recorder, with one and with one by keys in turn, and
again by `kvcore replay`'s way of reading a record; of each stretch of calls the least of the rounds
is kept, in processor time of this thread, because machines are noisy: only the ratios mean
something.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from kvcore import Config, Hit, KVCacheManager
from kvcore.record.calls import SHAPES
from kvcore.record.fields import LastHit
from kvcore.record.reader import read_calls, segment_files
from kvcore.record.recorder import Recorder
from kvcore.record.segment import read_segment
from kvcore.replay.configuration import make_config
from kvcore.replay.loop import Loop
from kvcore.replay.records.rerun import rerun
from kvcore.replay.records.what_if import what_if
from kvcore.replay.request_trace import TraceReader
from kvcore.replay.results import Options
from kvcore.replay.synthetic import generate
from kvcore.replay.workload import TraceRequest

SEED = 1
REPLAYS = 5
STRETCH = 250
"""Calls that are timed at once."""
BY_POSITION = {"hit", "tokens", "done"}
Made = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call: its name, positional arguments and keyword arguments."""


def record_loop(requests: Iterable[TraceRequest], options: Options, folder: Path) -> float:
    """Record the loop of `kvcore replay`; returns its virtual seconds."""
    manager = KVCacheManager(make_config(options), "rust")
    manager.start_recording(Recorder(folder, keep_segments=1 << 20))
    loop = Loop(requests, options, manager)
    while loop.step() is not None:
        pass
    manager.stop_recording()
    return loop.now


def recorded_calls(folder: Path, options: Options) -> tuple[list[Made], int]:
    """Return the calls of a record with their hits, and the bytes of their tokens."""
    manager, calls, token_bytes = KVCacheManager(make_config(options), "rust"), list[Made](), 0
    hits: dict[str, Hit] = {}
    for path in segment_files(folder):
        for call in read_calls(read_segment(path)):
            given = dict(call.arguments)
            if isinstance(given.get("hit"), LastHit):
                given["hit"] = hits[given["request_id"]]
            tokens = given["request"].tokens if "request" in given else given.get("tokens", ())
            token_bytes += 4 * len(tokens)
            value = getattr(manager, call.name)(**given)
            if isinstance(value, Hit):
                hits[given["request_id"]] = value
            by_name = set(SHAPES[call.name].options) - BY_POSITION
            named = {name: given.pop(name) for name in by_name & set(given)}
            calls.append((call.name, tuple(given.values()), named))
    return calls, token_bytes


def seconds(manager: KVCacheManager, calls: Sequence[Made]) -> tuple[list[float], float]:
    """Return the CPU seconds of this thread for each stretch of the calls, and of the process for
    all of them.
    """
    made = [(getattr(manager, name), args, named) for name, args, named in calls]
    stretches, started = list[float](), time.process_time()
    for first in range(0, len(made), STRETCH):
        stretch = made[first : first + STRETCH]
        start = time.thread_time()
        for method, args, named in stretch:
            method(*args, **named)
        stretches.append(time.thread_time() - start)
    return stretches, time.process_time() - started


def main() -> None:
    """Print the ratio and the bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    options = Options(num_blocks=given.blocks, bounds=False)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base, "record")
        trace = TraceReader(given.trace) if given.trace else generate("turns", given.requests, SEED)
        virtual = record_loop(islice(trace, given.requests), options, folder)
        again, variant = measure_replays(folder, make_config(options))
        calls, token_bytes = recorded_calls(folder, options)
        size = num_bytes(folder)
        best, size_by_keys = measure(Path(base), calls, options, given.rounds)
    (plain, alone), (recording, process) = best["plain"], best["text"]
    print(f"{len(calls):,} calls, {1e6 * plain / len(calls):.2f} us each")
    print(f"recording / not: {recording / plain:.3f}, of the process {process / alone:.3f}")
    print(f"more a call: {1e9 * (recording - plain) / len(calls):.0f} ns")
    print(f"bytes per call, without tokens: {(size - token_bytes) / len(calls):.1f}")
    print(f"by keys / not: {best['keys'][0] / plain:.3f}, {size_by_keys / size:.2f} of the bytes")
    print(f"a variant with twice the blocks: {variant / again:.2f} of the replay of the record")
    print(f"replay of the record: {again / plain:.1f} of the calls' time, {virtual / again:,.0f} x")


def measure_replays(folder: Path, config: Config) -> tuple[float, float]:
    """Return the least CPU seconds of a replay of a record, and of one beside a variant."""
    again = variant = float("inf")
    more = {"more": attrs.evolve(config, num_blocks=2 * config.num_blocks)}
    for _ in range(REPLAYS):
        start = time.thread_time()
        assert rerun(folder, ["rust"]).difference is None
        again = min(again, time.thread_time() - start)
        start = time.thread_time()
        what_if(folder, more, "rust")
        variant = min(variant, time.thread_time() - start)
    return again, variant


def num_bytes(folder: Path) -> int:
    """Return the bytes of a record without the states in it."""
    files = segment_files(folder)
    return sum(path.stat().st_size - len(read_segment(path).state) for path in files)


def measure(
    base: Path, calls: Sequence[Made], options: Options, rounds: int
) -> tuple[dict[str, tuple[float, float]], int]:
    """Return the least seconds of the calls, with and without a recorder, and the bytes by keys."""
    best: dict[str, tuple[list[float], float]] = {}
    gc.disable()  # else a collection would burden one side
    names: tuple[Any, ...] = ("plain", "text", "keys")
    for number in range(len(names) * rounds):
        name = names[number % len(names)]
        manager = KVCacheManager(make_config(options), "rust")
        if name != "plain":
            recorder = Recorder(base / str(number), tokens=name, keep_segments=2)
            manager.start_recording(recorder)
        spent, process = seconds(manager, calls)
        least, least_process = best.get(name, (spent, process))
        best[name] = list(map(min, least, spent)), min(least_process, process)
        manager.stop_recording()
        gc.collect()
    gc.enable()
    sums = {name: (sum(least), process) for name, (least, process) in best.items()}
    return sums, num_bytes(base / str(number))


if __name__ == "__main__":
    main()
