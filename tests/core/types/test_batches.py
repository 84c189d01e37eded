# SPDX-License-Identifier: Apache-2.0
"""Batches: int32 columns that mean what the command objects say, in order and in segments."""

from __future__ import annotations

import struct

import pytest

from kvcore import (
    Allocate,
    Batch,
    Command,
    CopyOnWrite,
    CutTable,
    Evict,
    EvictAll,
    Free,
    Group,
    KVCacheManager,
    SetTable,
    SwapIn,
    SwapOut,
    Touch,
    Zero,
)
from kvcore.transitions import TRANSITIONS
from kvcore.types.commands import COLUMNS, close, segments
from tests.conftest import Backend
from tests.helpers.stories import add, admit, make, serve, step

# One command of each kind, with the row of numbers that the format gives it.
KEY = bytes(range(36))
ROWS: list[tuple[Command, list[int]]] = [
    (Allocate(5), [1, 5, 0, 0, 0]),
    (Touch(6), [2, 6, 0, 0, 0]),
    (Evict(7, KEY), [3, 7, 0, 0, 0]),
    (EvictAll(), [4, 0, 0, 0, 0]),
    (Free(8, False), [5, 8, 0, 0, 0]),
    (Free(8, True), [5, 8, 1, 0, 0]),
    (Zero(9), [6, 9, 0, 0, 0]),
    (CopyOnWrite(1, 2), [7, 1, 2, 0, 0]),
    (SwapOut(3, 4), [8, 3, 4, 0, 0]),
    (SwapIn(4, 3), [9, 4, 3, 0, 0]),
    (SetTable(1, 2, 3, 4), [12, 1, 2, 3, 4]),
    (CutTable(1, 2, 3), [13, 1, 2, 3, 0]),
]


@pytest.fixture
def swapping(backend: Backend) -> KVCacheManager:
    """Return two usable, zeroed blocks; the open batch swaps "a" out and gives "b" its block."""
    manager = make(
        backend, 3, groups=(Group(2, zero_new_blocks=True),), num_host_blocks=2, null_block=True
    )
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.swap_out(["a"])
    serve(manager, "b", [5])
    return manager


def columns(batch: Batch) -> dict[str, list[int]]:
    """Return all columns as lists."""
    return {name: batch.column(name).tolist() for name in COLUMNS}


@pytest.mark.seed("S004-16")
def test_the_columns_are_the_commands_in_order(swapping: KVCacheManager) -> None:
    batch = swapping.take_batch()
    # SwapOut 1->0, SwapOut 2->1, Free 2, Free 1 (cached), CutTable; then for b: Allocate 2, Zero 2,
    # which overwrites what the second SwapOut reads, hence a new segment; SetTable row 1.
    assert columns(batch) == {
        "kind": [8, 8, 5, 5, 13, 1, 6, 12],
        "segment": [0, 0, 0, 0, 0, 0, 1, 1],
        "a": [1, 2, 2, 1, 0, 2, 2, 1],
        "b": [0, 1, 0, 1, 0, 0, 0, 0],
        "c": [0, 0, 0, 0, 0, 0, 0, 0],
        "d": [0, 0, 0, 0, 0, 0, 0, 2],
    }


def test_reading_a_batch_gives_the_command_objects(swapping: KVCacheManager) -> None:
    batch = swapping.take_batch()
    assert len(batch) == 8
    assert list(batch) == [
        SwapOut(1, 0),
        SwapOut(2, 1),
        Free(2, False),
        Free(1, True),
        CutTable(0, 0, 0),
        Allocate(2),
        Zero(2),
        SetTable(1, 0, 0, 2),
    ]


def test_the_buffer_is_little_endian_rows_one_after_the_other(swapping: KVCacheManager) -> None:
    batch = swapping.take_batch()
    numbers = struct.unpack("<48i", batch.buffer)
    assert list(numbers[:8]) == [8, 8, 5, 5, 13, 1, 6, 12]
    assert list(numbers[40:]) == [0, 0, 0, 0, 0, 0, 0, 2]


def test_a_column_is_a_view_of_the_buffer(swapping: KVCacheManager) -> None:
    batch = swapping.take_batch()
    batch.column("d")[0] = 77
    assert struct.unpack_from("<i", batch.buffer, 40 * 4) == (77,)
    assert batch.column("d").format == "i"


def test_batches_are_numbered_from_zero_and_may_be_empty(backend: Backend) -> None:
    manager = make(backend)
    first = manager.take_batch()
    assert (first.number, len(first), list(first)) == (0, 0, [])
    assert first.column("kind").tolist() == []
    serve(manager, "a", [0])
    assert (manager.take_batch().number, manager.take_batch().number) == (1, 2)


def test_a_taken_batch_does_not_change_any_more(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0])
    batch = manager.take_batch()
    buffer = bytes(batch.buffer)
    serve(manager, "b", [1])
    assert bytes(batch.buffer) == buffer
    assert list(manager.take_batch()) == [Allocate(2), SetTable(1, 0, 0, 2)]


def test_an_eviction_names_its_key_by_place(backend: Backend) -> None:
    manager = make(backend, 4)
    serve(manager, "a", [0, 1, 2, 3])
    step(manager)
    first, second = (manager.state().device.keys[block] for block in (1, 2))
    manager.evict_blocks([2, 1])
    batch = manager.take_batch()
    assert batch.keys == (second or b"") + (first or b"")
    assert len(batch.keys) == 72
    assert (batch.column("a").tolist(), batch.column("b").tolist()) == ([2, 1], [0, 1])
    assert list(batch) == [Evict(2, second or b""), Evict(1, first or b"")]


def test_what_was_swapped_in_and_goes_out_again_waits_for_its_copy(backend: Backend) -> None:
    manager = make(backend, num_host_blocks=4)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    manager.swap_out(["a"])
    manager.evict_blocks([1])
    step(manager)
    manager.swap_in(["a"])
    manager.swap_out(["a"])
    batch = manager.take_batch()
    # Two copies in and two table entries; then both blocks are read after they were written.
    assert [type(each) for each in batch] == [
        *(Allocate, Allocate, SwapIn, SwapIn, SetTable, SetTable),
        *(SwapOut, SwapOut, Free, Free, CutTable),
    ]
    assert batch.column("segment").tolist() == [0] * 6 + [1] * 5


def test_a_segment_ends_where_a_copy_would_see_another_copy() -> None:
    assert segments([CopyOnWrite(1, 2), CopyOnWrite(1, 3)]) == [0, 0]  # both read 1
    assert segments([CopyOnWrite(1, 2), CopyOnWrite(2, 3)]) == [0, 1]  # read after written
    assert segments([CopyOnWrite(1, 2), CopyOnWrite(3, 1)]) == [0, 1]  # written after read
    assert segments([Zero(2), SwapIn(0, 2)]) == [0, 1]  # written twice
    assert segments([SwapOut(1, 2), SwapIn(2, 1)]) == [0, 1]  # there and back
    assert segments([SwapOut(1, 2), Zero(2)]) == [0, 0]  # host block 2, device block 2
    # Owners and tables are no content.
    assert segments([Zero(1), Free(1, False), Allocate(1), SetTable(0, 0, 0, 1)]) == [0] * 4


@pytest.mark.parametrize(("command", "row"), ROWS, ids=[str(command) for command, _ in ROWS])
def test_each_command_has_its_row_and_is_read_back(command: Command, row: list[int]) -> None:
    batch = close(3, [command])
    kind, segment, *values = struct.unpack("<6i", batch.buffer)
    assert ([kind, *values], segment) == (row, 0)
    assert batch.keys == (KEY if isinstance(command, Evict) else b"")
    assert (batch.number, list(batch)) == (3, [command])


def test_the_batch_is_what_the_calls_emitted_one_after_the_other() -> None:
    manager = make("python")
    add(manager, "a", [0, 1, 2])
    state = manager.state()
    emitted: list[Command] = []
    for name, args in (
        ("allocate_slots", ("a", 3)),
        ("fork", ("a", "b")),
        ("evict_blocks", ([1],)),
        ("free", ("a",)),
    ):
        outcome = TRANSITIONS[name](state, *args)
        emitted.extend(outcome.commands)
        state = outcome.state
    assert list(TRANSITIONS["take_batch"](state).value) == emitted
    assert len(emitted) > 6


def test_a_full_row_is_cut_in_the_batch_before_the_one_that_reuses_it(backend: Backend) -> None:
    manager = make(backend)
    serve(manager, "a", [0])
    step(manager)
    manager.free("a")
    manager.remove_request("a")
    assert add(manager, "b", [1]) == 1
    assert step(manager) == [Free(1, False), CutTable(0, 0, 0)]
    assert add(manager, "c", [2]) == 0
    admit(manager, "c")
    assert step(manager) == [Allocate(2), SetTable(0, 0, 0, 2)]
