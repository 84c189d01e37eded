# SPDX-License-Identifier: Apache-2.0
"""Laws on batches: segments, columns, and that the order inside a segment does not matter."""

from __future__ import annotations

import random
from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvcore.oracle.contents import Contents, copy, read
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
    Tier,
    Touch,
    Zero,
    close,
    segments,
)

SIZE = 2
TIERS: tuple[Tier, ...] = ("device", "host")
BLOCKS = st.integers(0, 4)
KEYS = st.binary(min_size=36, max_size=36)
COPYING = (
    st.builds(Zero, BLOCKS)
    | st.tuples(BLOCKS, BLOCKS)
    .filter(lambda pair: pair[0] != pair[1])
    .map(lambda p: CopyOnWrite(*p))
    | st.builds(SwapOut, BLOCKS, BLOCKS)
    | st.builds(SwapIn, BLOCKS, BLOCKS)
)
TELLING = (
    st.builds(Allocate, BLOCKS)
    | st.builds(Touch, BLOCKS)
    | st.builds(Evict, BLOCKS, KEYS)
    | st.just(EvictAll())
    | st.builds(Free, BLOCKS, st.booleans())
    | st.builds(SetTable, BLOCKS, BLOCKS, BLOCKS, BLOCKS)
    | st.builds(CutTable, BLOCKS, BLOCKS, BLOCKS)
)
COMMANDS = st.lists(COPYING | TELLING, max_size=12)


def contents_before() -> Contents:
    """Another content in every slot of both tiers."""
    return {
        (tier, block): tuple((10 * block + slot, number) for slot in range(SIZE))
        for number, tier in enumerate(TIERS)
        for block in range(5)
    }


def in_order(commands: list[Command]) -> Contents:
    contents = contents_before()
    for command in commands:
        copy(contents, command, SIZE)
    return contents


def by_segment(commands: list[Command]) -> list[list[Command]]:
    numbered = zip(segments(commands), commands, strict=True)
    return [[each for _, each in run] for _, run in groupby(numbered, key=lambda pair: pair[0])]


@given(COMMANDS, st.randoms(use_true_random=False))
def test_any_order_inside_segments_gives_the_same_contents(
    commands: list[Command], shuffler: random.Random
) -> None:
    shuffled = []
    for segment in by_segment(commands):
        shuffler.shuffle(segment)
        shuffled += segment
    assert in_order(shuffled) == in_order(commands)


@given(COMMANDS)
def test_reading_all_then_writing_all_of_a_segment_gives_the_same_contents(
    commands: list[Command],
) -> None:
    contents = contents_before()
    for segment in by_segment(commands):
        copies = [each for each in segment if each.writes() is not None]
        sources = [read(contents, each.reads(), SIZE) for each in copies]
        for each, values in zip(copies, sources, strict=True):
            target = each.writes()
            assert target is not None
            contents[target] = values
    assert contents == in_order(commands)


@given(COMMANDS)
def test_a_new_segment_opens_only_at_a_hazard(commands: list[Command]) -> None:
    runs = by_segment(commands)
    for earlier, later in pairwise(runs):
        read_before = {each.reads() for each in earlier} - {None}
        written_before = {each.writes() for each in earlier} - {None}
        first = later[0]
        assert first.reads() in written_before or first.writes() in read_before | written_before


@given(COMMANDS)
def test_columns_give_back_the_commands(commands: list[Command]) -> None:
    batch = close(7, commands)
    assert list(batch) == commands
    assert list(batch.column("segment")) == segments(commands)
    assert list(Batch(7, bytearray(bytes(batch.buffer)), batch.keys)) == commands
