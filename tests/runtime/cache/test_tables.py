# SPDX-License-Identifier: Apache-2.0
"""Block tables against a dict of lists that takes the commands one by one; slots by definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvcore_runtime.cache.apply import batch_columns
from kvcore_runtime.cache.errors import (
    BeyondTable,
    InvalidSize,
    SlotsOverflow,
    TableGap,
    TableOutOfRange,
    UnequalLists,
)
from kvcore_runtime.cache.table_merge import entries_of
from kvcore_runtime.cache.tables import PADDING_BLOCK, BlockTables

from kvcore.types.commands import Command, CutTable, Free, SetTable, close

MAX_ROWS, MAX_BLOCKS, NUM_GROUPS, BLOCK_SIZE = 4, 6, 2, 3

Model = dict[tuple[int, int], list[int]]


def make_tables(num_groups: int = NUM_GROUPS) -> BlockTables:
    return BlockTables(MAX_ROWS, MAX_BLOCKS, 40, BLOCK_SIZE, num_groups=num_groups)


def apply(tables: BlockTables, *commands: Command) -> None:
    tables.apply(batch_columns(close(0, commands)))


def take(model: Model, command: Command) -> None:
    """Apply a command to lists."""
    if isinstance(command, SetTable):
        table = model.setdefault((command.group_id, command.row), [])
        table[command.position : command.position + 1] = [command.block]
    elif isinstance(command, CutTable):
        del model.setdefault((command.group_id, command.row), [])[command.length :]


def assert_equals(tables: BlockTables, model: Model) -> None:
    for group_id in range(tables.num_groups):
        for row in range(MAX_ROWS):
            table = model.get((group_id, row), [])
            assert tables.row_blocks(row, group_id) == table
            padding = tables.blocks[group_id, row, len(table) :]
            assert padding.tolist() == [PADDING_BLOCK] * (MAX_BLOCKS - len(table))
        assert tables.blocks[group_id, tables.max_rows].tolist() == [PADDING_BLOCK] * MAX_BLOCKS
        assert tables.lengths[group_id, tables.max_rows] == 0


@st.composite
def batches(draw: st.DrawFn) -> list[list[Command]]:
    """Draw batches of table changes that a manager could emit, without skipped positions."""
    model: Model = {}
    made = []
    for _ in range(draw(st.integers(1, 4))):
        commands: list[Command] = []
        for _ in range(draw(st.integers(0, 12))):
            row = draw(st.integers(0, MAX_ROWS - 1))
            group_id = draw(st.integers(0, NUM_GROUPS - 1))
            length = len(model.get((group_id, row), []))
            command: Command
            if draw(st.integers(0, 3)) == 0:
                command = CutTable(row, group_id, draw(st.integers(0, length)))
            else:
                position = min(length, draw(st.integers(0, MAX_BLOCKS - 1)))
                if draw(st.booleans()):
                    position = min(length, MAX_BLOCKS - 1)
                # Block 0 is the null block: it stands behind a window.
                command = SetTable(row, group_id, position, draw(st.integers(0, 99)))
            take(model, command)
            commands.append(command)
        made.append(commands)
    return made


@settings(max_examples=150, deadline=None)
@given(batches())
def test_tables_equal_the_commands_taken_one_by_one(made: list[list[Command]]) -> None:
    tables, model = make_tables(), Model()
    address, slots = tables.blocks.data_ptr(), tables.slots.data_ptr()
    for commands in made:
        apply(tables, *commands)
        for command in commands:
            take(model, command)
        assert_equals(tables, model)
    assert (tables.blocks.data_ptr(), tables.slots.data_ptr()) == (address, slots)


@settings(max_examples=60, deadline=None)
@given(batches())
def test_entries_are_what_is_written_where_in_any_order(made: list[list[Command]]) -> None:
    """One kernel writes them on a GPU, so no place comes twice; -7 stands for a cleared place."""
    tables = make_tables()
    for commands in made:
        planned = tables.plan(batch_columns(close(0, commands)))
        places, values = entries_of(planned, tables.blocks[0].numel(), -7)
        assert len(places.unique()) == len(places)
        written = tables.blocks.clone().view(-1)
        written[places] = torch.where(values == -7, PADDING_BLOCK, values).to(torch.int32)
        tables.commit(planned)
        assert torch.equal(written, tables.blocks.view(-1))


def test_a_place_that_is_cleared_says_so_in_the_entries() -> None:
    tables = make_tables()
    apply(tables, *(SetTable(1, 1, position, 5 + position) for position in range(3)))
    columns = batch_columns(close(0, [CutTable(1, 1, 1), SetTable(1, 1, 1, 9)]))
    places, values = entries_of(tables.plan(columns), tables.blocks[0].numel(), -7)
    first = tables.blocks[0].numel() + MAX_BLOCKS
    assert dict(zip(places.tolist(), values.tolist(), strict=True)) == {first + 1: 9, first + 2: -7}


def test_last_write_of_a_position_wins() -> None:
    tables = make_tables()
    apply(tables, SetTable(0, 0, 0, 5), SetTable(0, 0, 1, 6), SetTable(0, 0, 0, 7))
    assert tables.row_blocks(0) == [7, 6]


def test_cut_then_set_of_the_same_row_keeps_what_was_set_after() -> None:
    tables = make_tables()
    apply(tables, *(SetTable(1, 0, position, 10 + position) for position in range(4)))
    apply(tables, CutTable(1, 0, 1), SetTable(1, 0, 1, 20), Free(3, False))
    assert tables.row_blocks(1) == [10, 20]
    apply(tables, SetTable(1, 0, 2, 30), CutTable(1, 0, 0), SetTable(1, 0, 0, 40))
    assert tables.row_blocks(1) == [40]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (SetTable(4, 0, 0, 1), "row 4 is outside the block tables, which take rows 0 to 3"),
        (SetTable(-1, 0, 0, 1), "row -1"),
        (SetTable(0, 2, 0, 1), "group 2 .* 0 to 1"),
        (SetTable(0, 0, 6, 1), "position 6 .* 0 to 5"),
        (SetTable(0, 0, 0, -1), "block -1"),
        (CutTable(0, 0, 7), "length 7 .* 0 to 6"),
    ],
)
def test_change_outside_the_tables_names_the_numbers_and_changes_nothing(
    command: Command, text: str
) -> None:
    tables = make_tables()
    with pytest.raises(TableOutOfRange, match=text):
        apply(tables, SetTable(0, 0, 0, 1), command)
    assert_equals(tables, {})


@pytest.mark.parametrize(
    "commands",
    [
        (SetTable(2, 1, 2, 9),),
        (CutTable(2, 1, 3),),
        (CutTable(2, 1, 0), SetTable(2, 1, 1, 9)),
        (SetTable(2, 1, 1, 9), CutTable(2, 1, 0), SetTable(2, 1, 2, 8)),
    ],
)
def test_a_skipped_position_is_a_gap_and_changes_nothing(commands: tuple[Command, ...]) -> None:
    tables = make_tables()
    apply(tables, SetTable(2, 1, 0, 4))
    with pytest.raises(TableGap, match="row 2, group 1"):
        apply(tables, *commands)
    assert_equals(tables, {(1, 2): [4]})


def test_slots_are_block_times_block_size_plus_place() -> None:
    tables = make_tables(1)
    apply(tables, *(SetTable(0, 0, position, 7 - position) for position in range(3)))
    apply(tables, SetTable(2, 0, 0, 9))
    slots = tables.slot_mapping([2, 0, 0], [1, 2, 8], [2, 4, 1])
    expected = [9 * 3 + 1, 9 * 3 + 2, 7 * 3 + 2, 6 * 3, 6 * 3 + 1, 6 * 3 + 2, 5 * 3 + 2]
    assert slots.tolist() == expected
    assert slots.data_ptr() == tables.slots.data_ptr()
    padded = tables.slot_mapping([2], [0], [1], pad_to=4)
    assert padded.tolist() == [27, 0, 0, 0]
    assert tables.slot_mapping([], [], []).tolist() == []


def test_each_group_has_its_own_block_size_and_slots() -> None:
    tables = BlockTables(MAX_ROWS, MAX_BLOCKS, 40, (4, 2), num_groups=2)
    apply(tables, SetTable(1, 0, 0, 5), *(SetTable(1, 1, place, 7 + place) for place in range(2)))
    coarse = tables.slot_mapping([1], [1], [3])
    fine = tables.slot_mapping([1], [1], [3], group_id=1)
    assert coarse.tolist() == [5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3]
    assert fine.tolist() == [7 * 2 + 1, 8 * 2, 8 * 2 + 1]
    with pytest.raises(BeyondTable, match="group 1: position 4 needs 3 blocks, the table has 2"):
        tables.slot_mapping([1], [0], [5], group_id=1)
    with pytest.raises(UnequalLists, match="groups has 2 items and block_size has 1"):
        BlockTables(MAX_ROWS, MAX_BLOCKS, 40, (4,), num_groups=2)


def test_slots_that_do_not_exist_are_refused_before_any_is_filled() -> None:
    tables = make_tables(1)
    apply(tables, SetTable(0, 0, 0, 5), SetTable(0, 0, 1, 6))
    tables.slots.fill_(77)
    with pytest.raises(BeyondTable, match="position 6 needs 3 blocks, the table has 2"):
        tables.slot_mapping([0, 0], [0, 4], [1, 3])
    with pytest.raises(BeyondTable, match=f"row {MAX_ROWS}"):
        tables.slot_mapping([tables.max_rows], [0], [1])
    with pytest.raises(SlotsOverflow, match="42 slots are requested, the slot mapping holds 40"):
        tables.slot_mapping([0] * 7, [0] * 7, [6] * 7)
    with pytest.raises(UnequalLists, match="rows has 2 items and counts has 1"):
        tables.slot_mapping([0, 0], [0, 0], [1])
    with pytest.raises(SlotsOverflow, match="41 slots are requested, the slot mapping holds 40"):
        tables.slot_mapping([0], [0], [1], pad_to=41)
    with pytest.raises(UnequalLists, match="rows has 1 items and starts has 1"):
        tables.slot_mapping(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1))
    for requested, group_id, text in (
        (([0], [-1], [1]), 0, "position -1"),
        (([0], [0], [-1]), 0, "count -1"),
        (([0], [0], [19]), 0, "count 19 .* 0 to 18"),
        (([MAX_ROWS + 1], [0], [0]), 0, "row 5 .* 0 to 4"),
        (([0], [0], [1]), 1, "group 1 .* 0 to 0"),
    ):
        with pytest.raises(TableOutOfRange, match=text):
            tables.slot_mapping(*requested, group_id=group_id)
    assert torch.equal(tables.slots, torch.full_like(tables.slots, 77))


def test_slots_may_be_filled_to_the_last_and_a_row_may_ask_for_none() -> None:
    tables = make_tables(1)
    apply(tables, *(SetTable(0, 0, position, 5 + position) for position in range(6)))
    full = tables.slot_mapping([0, 0, 0], [0, 0, 0], [18, 18, 4])
    assert full.shape == (40,)
    assert tables.slot_mapping([0], [0], [1], pad_to=40).tolist() == [15] + [0] * 39
    assert tables.slot_mapping([1, 0], [4, 0], [0, 1]).tolist() == [15]


def test_tables_of_no_rows_are_refused() -> None:
    wrong: list[tuple[Any, str]] = [
        ((0, 1, 1, 1), "max_rows=0"),
        ((True, 1, 1, 1), "max_rows=True"),
        ((1, 1.5, 1, 1), "max_blocks=1.5"),
        ((1, 1, 1, (0,)), "block_size=0"),
    ]
    for sizes, text in wrong:
        with pytest.raises(InvalidSize, match=text):
            BlockTables(*sizes)
    with pytest.raises(UnequalLists, match="groups has 1 items and block_size has 2"):
        BlockTables(1, 1, 1, (4, 4))
