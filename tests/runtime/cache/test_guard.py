# SPDX-License-Identifier: Apache-2.0
"""Guard mode: what is poisoned when, and which reads and writes are errors."""

from __future__ import annotations

from typing import Any

import pytest
from kvcore_runtime.attention.visibility import FULL, Visibility
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.errors import StaleRead, UnownedWrite
from kvcore_runtime.cache.guard import Reads
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables

from kvcore.types.commands import (
    Allocate,
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

KEY = bytes(KEY_SIZE)


def make_runtime(order: Any = "block_major", guard: bool = True) -> Runtime:
    layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=2, order=order)
    return Runtime(Cache(layout, 5, 2, guard=guard), BlockTables(2, 4, 16, 2))


def apply(runtime: Runtime, *commands: Command) -> None:
    runtime.apply(close(runtime.next_number, commands))


def write(runtime: Runtime, block: int, value: float = 1.0) -> None:
    """Write a whole block as a forward pass does."""
    runtime.cache.blocks.data[block] = value


def poisoned(runtime: Runtime) -> set[int]:
    """Return blocks that are NaN as a whole; none may be NaN in part."""
    found = set()
    for block in range(runtime.cache.num_blocks):
        isnan = runtime.cache.blocks.data[block].isnan()
        assert isnan.all() == isnan.any(), f"block {block} is poisoned in part"
        if isnan.all():
            found.add(block)
    return found


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
def test_a_block_is_poisoned_when_it_has_neither_owner_nor_key(order: Any) -> None:
    runtime = make_runtime(order)
    apply(runtime, Allocate(1), Allocate(2), Allocate(3))
    assert poisoned(runtime) == {0, 1, 2, 3, 4}
    for block in (1, 2, 3):
        write(runtime, block)
    apply(runtime, Free(1, False), Free(2, True))
    assert poisoned(runtime) == {0, 1, 4}
    apply(runtime, Evict(2, KEY), Evict(3, KEY))
    assert poisoned(runtime) == {0, 1, 2, 4}
    apply(runtime, Free(3, False))
    assert poisoned(runtime) == {0, 1, 2, 3, 4}


def test_evict_all_poisons_cached_blocks_and_leaves_owned_ones() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1), Allocate(2), Allocate(3))
    for block in (1, 2, 3):
        write(runtime, block)
    apply(runtime, Free(1, True), Free(2, True), Touch(2), EvictAll())
    assert poisoned(runtime) == {0, 1, 4}
    assert not runtime.guard or not runtime.guard.keyed.any()


def test_a_touched_block_keeps_its_content_and_an_allocated_one_does_not() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1), Allocate(2))
    write(runtime, 1)
    write(runtime, 2)
    apply(runtime, Free(1, True), Free(2, True), Touch(1), Evict(2, KEY), Allocate(2))
    assert poisoned(runtime) == {0, 2, 3, 4}


def test_allocating_poisons_what_a_stray_write_left_behind() -> None:
    runtime = make_runtime()
    write(runtime, 4)
    apply(runtime, Allocate(4))
    assert poisoned(runtime) == {0, 1, 2, 3, 4}


def test_commands_run_one_at_a_time_so_that_a_copy_precedes_its_source_s_poison() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1))
    write(runtime, 1, 3.0)
    apply(runtime, Allocate(2), CopyOnWrite(1, 2), Free(1, False), Allocate(1), Zero(1))
    assert runtime.cache.blocks.data[2].unique().tolist() == [3.0]
    assert runtime.cache.blocks.data[1].unique().tolist() == [0.0]


def test_without_guard_nothing_is_poisoned_or_checked() -> None:
    runtime = make_runtime(guard=False)
    apply(runtime, Allocate(1), Free(1, False), SetTable(0, 0, 0, 1), SwapIn(1, 3))
    runtime.check_reads(Reads([0], [0], [2], ["r"]))
    runtime.check_content(Reads([0], [0], [2], ["r"]))
    assert poisoned(runtime) == set()


def test_reading_a_freed_block_names_block_request_and_step() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1), SetTable(0, 0, 0, 1), Allocate(3), SetTable(0, 0, 1, 3))
    runtime.check_reads(Reads([0], [0], [3], ["r7"]))
    apply(runtime, Free(3, True))
    runtime.check_reads(Reads([0], [0], [2], ["r7"]))
    with pytest.raises(StaleRead, match="step 1, request r7: reads block 3") as caught:
        runtime.check_reads(Reads([0], [0], [3], ["r7"]))
    reason = "it has no owner, and is in row 0, group 0"
    fields = {"step": 1, "request": "r7", "block": 3, "reason": reason, "row": 0, "group_id": 0}
    assert caught.value.fields == fields


def test_reading_past_the_table_is_a_stale_read() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1), SetTable(1, 0, 0, 1))
    with pytest.raises(StaleRead, match="row 1, group 0 has 1 blocks, 3 tokens lie in 2"):
        runtime.check_reads(Reads([1], [0], [3], ["r"]))
    apply(runtime, CutTable(1, 0, 0))
    with pytest.raises(StaleRead, match="has 0 blocks"):
        runtime.check_reads(Reads([1], [0], [1], ["r"]))


def test_null_entries_behind_a_window_are_not_read_and_others_are_stale() -> None:
    layout = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2)
    cache = Cache(layout, 5, guard=True, groups=[(1, 2), (1, 2)])
    kept = (FULL, Visibility(kind="sliding_window", window=3))
    runtime = Runtime(cache, BlockTables(2, 4, 16, 2, num_groups=2), kept=kept)
    apply(runtime, Allocate(1), Allocate(2), Allocate(3), Allocate(4))
    for block in (1, 2, 3, 4):
        write(runtime, block)
    tables = [
        SetTable(0, 0, 0, 1),
        SetTable(0, 0, 1, 2),
        SetTable(0, 1, 0, 3),
        SetTable(0, 1, 1, 4),
    ]
    apply(runtime, *tables)
    runtime.check_reads(Reads([0], [0], [4], ["r"]))
    apply(runtime, SetTable(0, 1, 0, 0), Free(3, False))
    assert runtime.tables.row_blocks(0, 1) == [0, 4]
    # The query at position 4 sees 2, 3 and 4; the one at 3 sees 1, which lies in the null block.
    apply(runtime, Allocate(3), SetTable(0, 0, 2, 3), SetTable(0, 1, 2, 3))
    write(runtime, 3)
    runtime.check_reads(Reads([0], [4], [5], ["r"]))
    runtime.check_content(Reads([0], [4], [5], ["r"]))
    with pytest.raises(StaleRead, match="reads block 0: it has no owner, and is in row 0, group 1"):
        runtime.check_reads(Reads([0], [3], [5], ["r"]))
    assert poisoned(runtime) == {0}


@pytest.mark.parametrize("order", ["block_major", "layer_major"])
def test_a_slot_that_the_forward_pass_left_out_is_found_by_its_nan(order: Any) -> None:
    runtime = make_runtime(order)
    apply(runtime, Allocate(2), SetTable(0, 0, 0, 2), Allocate(4), SetTable(0, 0, 1, 4))
    keys, values = runtime.cache.layer(1)
    for layer in range(2):
        for part in runtime.cache.layer(layer):
            part[2] = 1.0
            part[4, 0] = 1.0
    runtime.check_content(Reads([0], [0], [3], ["r"]))
    values[4, 0, 0, 1] = float("nan")
    runtime.check_content(Reads([0], [0], [2], ["r"]))
    with pytest.raises(StaleRead, match="request r: reads block 4: position 2 of row 0 holds NaN"):
        runtime.check_content(Reads([0], [0], [3], ["r"]))
    assert not keys[4, 0].isnan().any()


def test_an_error_names_the_step_in_which_it_happened() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1), SetTable(0, 0, 0, 1))
    with pytest.raises(StaleRead, match="step 0, request r: reads block 1: position 0"):
        runtime.check_content(Reads([0], [0], [1], ["r"]))
    apply(runtime)
    with pytest.raises(StaleRead, match="step 1, request r: reads block 1: position 0"):
        runtime.check_content(Reads([0], [0], [1], ["r"]))
    with pytest.raises(StaleRead, match="step 2, request None: reads block 3"):
        apply(runtime, SwapOut(3, 0))
    with pytest.raises(UnownedWrite, match="step 2: Zero writes block 3"):
        apply(runtime, Zero(3))


def test_what_was_evicted_may_not_be_copied() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1))
    write(runtime, 1)
    apply(runtime, Free(1, True), Evict(1, KEY))
    with pytest.raises(StaleRead, match="block 1: it has neither owner nor key"):
        apply(runtime, SwapOut(1, 0))


def test_content_is_checked_from_the_first_position_that_is_seen() -> None:
    """A window of four begins inside a block of two; the slot before it may hold anything."""
    layout = CacheLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2)
    kept = (Visibility(kind="sliding_window", window=4),)
    runtime = Runtime(Cache(layout, 5, guard=True), BlockTables(2, 4, 16, 2), kept=kept)
    for position, block in enumerate((4, 2, 3)):
        apply(runtime, Allocate(block), SetTable(0, 0, position, block))
        write(runtime, block)
    data = runtime.cache.blocks.data
    data[4, :, :, 0] = float("nan")
    runtime.check_content(Reads([0], [4], [5], ["r"]))
    data[2, :, :, 1] = float("nan")
    with pytest.raises(StaleRead, match="reads block 2: position 3 of row 0 holds NaN"):
        runtime.check_content(Reads([0], [4], [5], ["r"]))


def test_an_entry_of_a_table_is_an_owner() -> None:
    """After a cancel, the tables are sent again, but `Allocate` is not."""
    runtime = make_runtime()
    apply(runtime, SetTable(0, 0, 0, 3))
    runtime.check_reads(Reads([0], [0], [2], ["r"]))
    apply(runtime, Zero(3))
    runtime.check_content(Reads([0], [0], [2], ["r"]))


@pytest.mark.parametrize(
    ("commands", "error", "text"),
    [
        ([Allocate(2), CopyOnWrite(1, 2)], StaleRead, "block 1: it has neither owner nor key"),
        ([Allocate(1), Free(1, False), SwapOut(1, 0)], StaleRead, "block 1"),
        ([Allocate(1), SwapIn(1, 1)], StaleRead, "block 1: no SwapOut has written"),
        ([Allocate(1), CopyOnWrite(1, 3)], UnownedWrite, "CopyOnWrite writes block 3"),
        ([Zero(3)], UnownedWrite, "step 0: Zero writes block 3, which has no owner"),
        ([Allocate(1), SwapOut(1, 0), SwapIn(0, 4)], UnownedWrite, "SwapIn writes block 4"),
    ],
)
def test_copies_of_what_nobody_owns_are_errors(
    commands: list[Command], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        apply(make_runtime(), *commands)


def test_swap_out_of_a_cached_block_and_back_is_allowed() -> None:
    runtime = make_runtime()
    apply(runtime, Allocate(1))
    write(runtime, 1, 5.0)
    apply(runtime, Free(1, True), SwapOut(1, 1))
    apply(runtime, Allocate(4), SwapIn(1, 4))
    assert runtime.cache.blocks.data[4].unique().tolist() == [5.0]
