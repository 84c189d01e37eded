# SPDX-License-Identifier: Apache-2.0
"""Batches on tensors against a dict of blocks that takes the commands in program order."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from kvcore_runtime.cache.apply import Runtime, batch_columns
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.errors import (
    BadSegments,
    BatchNotNext,
    BlockOutOfRange,
    CopyHazard,
    NotSkipped,
    TableOutOfRange,
    UnsupportedCommand,
)
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.segments import (
    COPYING,
    Copying,
    Run,
    run_program_order,
    run_segments,
)
from kvcore_runtime.cache.tables import BlockTables
from msgspec.structs import replace

from kvcore.types.commands import (
    Allocate,
    Batch,
    Command,
    CopyOnWrite,
    CutTable,
    Evict,
    EvictAll,
    Free,
    SetTable,
    SwapIn,
    SwapOut,
    Touch,
    Zero,
    close,
)
from kvcore.types.keys import KEY_SIZE
from tests.runtime.cache.orders import run_parallel, run_shuffled

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4
RUNS: dict[str, Run] = {
    "segments": run_segments,
    "program order": run_program_order,
    "shuffled": functools.partial(run_shuffled, seed=5),
    "parallel": run_parallel,
}

Contents = dict[tuple[str, int], float]


def make_runtime(order: Any = "block_major") -> Runtime:
    """Return a runtime whose device block i holds i + 1 everywhere, its host block i -i - 1."""
    layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=2, order=order)
    cache = Cache(layout, NUM_BLOCKS, NUM_HOST_BLOCKS)
    for block in range(NUM_BLOCKS):
        cache.blocks.data[block] = block + 1
    for block in range(NUM_HOST_BLOCKS):
        cache.host_blocks.data[block] = -block - 1
    return Runtime(cache, BlockTables(4, 4, 16, 2))


def contents(runtime: Runtime) -> Contents:
    """Return the one value that each block holds."""
    found = {}
    for tier in (runtime.cache.blocks, runtime.cache.host_blocks):
        for block in range(tier.num_blocks):
            values = tier.data[block].unique().tolist()
            assert len(values) == 1, f"{tier.name} block {block} is torn: {values}"
            found[tier.name, block] = values[0]
    return found


def taken(before: Contents, commands: list[Command]) -> Contents:
    """Apply commands to a dict, one after the other."""
    held = dict(before)
    for command in commands:
        target = command.writes()
        if target is not None:
            source = command.reads()
            held[target] = 0.0 if source is None else held[source]
    return held


def random_commands(seed: int) -> list[Command]:
    """Draw copying commands among few blocks, so that hazards and segments are many."""
    pick = random.Random(seed)
    made: list[Command] = []
    for _ in range(pick.randint(0, 12)):
        source, target = pick.sample(range(NUM_BLOCKS), 2)
        host = pick.randrange(NUM_HOST_BLOCKS)
        made.append(
            pick.choice(
                [
                    Zero(target),
                    CopyOnWrite(source, target),
                    SwapOut(source, host),
                    SwapIn(host, target),
                    Allocate(target),
                    Free(source, True),
                ]
            )
        )
    return made


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
@pytest.mark.parametrize("name", RUNS)
def test_every_order_of_a_segment_gives_what_program_order_gives(name: str, order: Any) -> None:
    most_segments = 0
    for seed in range(60):
        runtime = make_runtime(order)
        commands = random_commands(seed)
        expected = taken(contents(runtime), commands)
        batch = close(0, commands)
        runtime.apply(batch, RUNS[name])
        assert contents(runtime) == expected, f"seed {seed}: {commands}"
        most_segments = max(most_segments, *batch.column("segment"), 0)
    assert most_segments >= 3


def test_the_orders_differ_where_segments_are_wrong() -> None:
    """With one segment for all, some order breaks a chain, so the law above is not vacuous."""
    chain: list[Command] = [CopyOnWrite(0, 1), CopyOnWrite(1, 2), CopyOnWrite(2, 3)]
    outcomes = set()
    for run in RUNS.values():
        runtime = make_runtime()
        copies = [Copying(each.kind, 0, *values(each)) for each in chain]
        try:
            run(runtime.cache, copies)
        except CopyHazard:
            continue
        outcomes.add(tuple(contents(runtime).values()))
    assert len(outcomes) > 1


def test_a_shuffle_is_one() -> None:
    """Each order of a chain that is wrongly one segment shows in the result; seeds find several."""
    outcomes = set()
    for seed in range(8):
        runtime = make_runtime()
        pairs = [(0, 1), (1, 2), (2, 3)]
        run_shuffled(runtime.cache, [Copying(CopyOnWrite.kind, 0, *each) for each in pairs], seed)
        outcomes.add(tuple(contents(runtime).values()))
    assert len(outcomes) > 1


def values(command: Command) -> tuple[int, int]:
    assert isinstance(command, CopyOnWrite)
    return command.source, command.target


def test_swap_out_then_in_of_other_blocks_in_one_batch() -> None:
    runtime = make_runtime()
    runtime.apply(close(0, [SwapOut(2, 1), Free(2, False), Allocate(2), SwapIn(0, 2), Zero(5)]))
    held = contents(runtime)
    assert (held["host", 1], held["device", 2], held["device", 5]) == (3.0, -1.0, 0.0)


def test_commands_without_content_change_no_tensor() -> None:
    runtime = make_runtime()
    before = contents(runtime)
    key = bytes(KEY_SIZE)
    runtime.apply(close(0, [Allocate(1), Touch(2), Evict(3, key), EvictAll(), Free(1, False)]))
    assert contents(runtime) == before


def test_tables_change_with_the_batch_and_an_empty_batch_counts() -> None:
    runtime = make_runtime()
    runtime.apply(close(0, []))
    runtime.apply(close(1, [Allocate(3), SetTable(1, 0, 0, 3), Allocate(4), SetTable(1, 0, 1, 4)]))
    assert runtime.tables.row_blocks(1) == [3, 4]
    runtime.apply(close(2, [CutTable(1, 0, 1), Free(4, False)]))
    assert runtime.tables.row_blocks(1) == [3]
    assert runtime.next_number == 3


def test_batches_are_skipped_forward_or_not_at_all() -> None:
    runtime = make_runtime()
    runtime.skip(0)
    runtime.apply(close(0, [Zero(1)]))
    runtime.skip(1)
    runtime.skip(4)
    with pytest.raises(NotSkipped, match="batch 3 cannot be the next one, 4 is"):
        runtime.skip(3)
    runtime.apply(close(4, [Zero(2)]))


def assert_refused(batch: Batch, error: type[Exception], text: str) -> None:
    runtime = make_runtime()
    before = contents(runtime)
    with pytest.raises(error, match=text):
        runtime.apply(batch)
    assert contents(runtime) == before
    assert not runtime.tables.lengths.any()
    assert runtime.next_number == 0


@pytest.mark.parametrize("number", [1, 7, -1])
def test_cmd_once_a_batch_out_of_order_is_refused(number: int) -> None:
    assert_refused(close(number, [Zero(1)]), BatchNotNext, f"batch {number} .* batch 0 is next")


def test_cmd_once_a_batch_is_not_applied_twice() -> None:
    runtime = make_runtime()
    batch = close(0, [Zero(1)])
    runtime.apply(batch)
    with pytest.raises(BatchNotNext, match="batch 0 is applied, but batch 1 is next"):
        runtime.apply(batch)


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        (CopyOnWrite(1, 6), BlockOutOfRange, "block 6 .* 6 blocks of the device"),
        (SwapOut(1, 4), BlockOutOfRange, "block 4 .* 4 blocks of the host"),
        (SwapIn(-1, 1), BlockOutOfRange, "block -1 .* host"),
        (Zero(99), BlockOutOfRange, "block 99"),
        (Allocate(6), BlockOutOfRange, "block 6"),
        (Free(-2, True), BlockOutOfRange, "block -2"),
        (Free(6, True), BlockOutOfRange, "block 6"),
        (Touch(6), BlockOutOfRange, "block 6"),
        (Evict(6, bytes(KEY_SIZE)), BlockOutOfRange, "block 6"),
        (SetTable(9, 0, 0, 1), TableOutOfRange, "row 9"),
        (SetTable(0, 0, 0, 6), BlockOutOfRange, "block 6"),
    ],
)
def test_a_batch_with_one_bad_id_changes_nothing(
    command: Command, error: type[Exception], text: str
) -> None:
    commands = [Zero(0), Allocate(3), SetTable(0, 0, 0, 1), command]
    assert_refused(close(0, commands), error, text)


def with_column(batch: Batch, column: int, values: list[int]) -> Batch:
    changed = batch_columns(batch).clone()
    changed[column] = torch.tensor(values, dtype=torch.int32)
    return replace(batch, buffer=bytearray(changed.numpy().tobytes()))


def test_a_hazard_inside_a_segment_is_refused() -> None:
    chain = close(0, [Zero(5), CopyOnWrite(0, 1), CopyOnWrite(1, 2)])
    assert chain.column("segment").tolist() == [0, 0, 1]
    wrong = with_column(chain, 1, [0, 0, 0])
    assert_refused(wrong, CopyHazard, "block 1 of the device tier is read after written")
    twice = with_column(close(0, [Zero(5), Zero(5)]), 1, [0, 0])
    assert_refused(twice, CopyHazard, "block 5 of the device tier is written twice")
    late = with_column(close(0, [SwapOut(1, 0), SwapIn(1, 1)]), 1, [0, 0])
    assert_refused(late, CopyHazard, "block 1 of the device tier is written after read")


def test_falling_segments_and_unknown_kinds_are_refused() -> None:
    falling = with_column(close(0, [Zero(1), Zero(2)]), 1, [1, 0])
    assert_refused(falling, BadSegments, "segment 0 follows segment 1")
    unknown = with_column(close(0, [Zero(1), Zero(2)]), 0, [6, 14])
    assert_refused(unknown, UnsupportedCommand, "kind 14")


def test_the_copying_kinds_are_those_whose_commands_write() -> None:
    writing = {
        each.kind
        for each in (Zero(1), CopyOnWrite(1, 2), SwapOut(1, 1), SwapIn(1, 1), Allocate(1))
        if each.writes() is not None
    }
    assert set(COPYING) == writing
