# SPDX-License-Identifier: Apache-2.0
"""Stores and loads in batches: their place among other commands, and how they end."""

from typing import Any

import pytest
import torch
from kvcore_runtime.cache.apply import Runtime
from kvcore_runtime.cache.cache import Cache
from kvcore_runtime.cache.errors import (
    BlockMissing,
    BlockOutOfRange,
    CopyHazard,
    NoTier,
    StaleRead,
    TierFailed,
    UnownedWrite,
)
from kvcore_runtime.cache.layout import CacheLayout
from kvcore_runtime.cache.tables import BlockTables
from torch import Tensor

from kvcore.types.commands import Allocate, Command, CopyOnWrite, Free, Load, Store, Zero, close
from kvcore.types.keys import make_key

KEYS = [make_key(bytes([number]) * 32, 0) for number in range(4)]


class Shelf:
    """A tier in memory that fails on demand."""

    def __init__(self) -> None:
        self.pages: dict[bytes, Tensor] = {}
        self.broken: set[bytes] = set()

    def store(self, key: bytes, page: Tensor) -> None:
        if key in self.broken:
            raise TierFailed(key=key.hex(), place="the shelf", reason="broken")
        self.pages[key] = page.clone()

    def load(self, key: bytes, num_bytes: int) -> Tensor:
        if key not in self.pages:
            raise BlockMissing(key=key.hex(), place="the shelf")
        page = self.pages[key]
        assert page.numel() == num_bytes
        return page


def make_runtime(shelf: Shelf | None, order: Any = "block_major", guard: bool = False) -> Runtime:
    layout = CacheLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=2, order=order)
    cache = Cache(layout, 6, 2, guard=guard)
    return Runtime(cache, BlockTables(2, 4, 16, 2), external=shelf)


def apply(runtime: Runtime, *commands: Command) -> list[tuple[int, bool]]:
    runtime.apply(close(runtime.next_number, commands))
    return [(each.operation, each.done) for each in runtime.take_finished()]


def content(runtime: Runtime, block: int) -> list[float]:
    values: list[float] = runtime.cache.blocks.data[block].flatten().tolist()
    return values


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("order", ["block_major", "layer_major"])
def test_a_stored_block_is_loaded_into_another(order: Any, guard: bool) -> None:
    shelf = Shelf()
    runtime = make_runtime(shelf, order, guard)
    assert apply(runtime, Allocate(1), Allocate(4)) == []
    runtime.cache.blocks.data[1] = torch.arange(16.0).view(2, 2, 2, 1, 2)
    assert apply(runtime, Store(7, 1, KEYS[0])) == [(7, True)]
    runtime.cache.blocks.data[1] = -1.0
    assert apply(runtime, Load(9, KEYS[0], 4), Store(8, 1, KEYS[1])) == [(9, True), (8, True)]
    assert content(runtime, 4) == list(range(16))
    assert runtime.take_finished() == []


def test_a_page_is_the_same_bytes_in_every_layout() -> None:
    shelf = Shelf()
    for number, order in enumerate(("block_major", "layer_major")):
        runtime = make_runtime(shelf, order)
        runtime.cache.blocks.data[3] = torch.arange(16.0).view(2, 2, 2, 1, 2)
        apply(runtime, Store(0, 3, KEYS[number]))
    assert torch.equal(shelf.pages[KEYS[0]], shelf.pages[KEYS[1]])


@pytest.mark.parametrize("guard", [False, True])
def test_program_order_holds_across_segments(guard: bool) -> None:
    """A load comes before its copy, and a store before what overwrites its block."""
    shelf = Shelf()
    runtime = make_runtime(shelf, guard=guard)
    apply(runtime, *(Allocate(block) for block in (1, 2, 3)))
    runtime.cache.blocks.data[1] = 5.0
    apply(runtime, Store(0, 1, KEYS[0]), Zero(1))
    ended = apply(runtime, Load(1, KEYS[0], 2), CopyOnWrite(2, 3), Zero(2), Store(2, 3, KEYS[1]))
    assert ended == [(1, True), (2, True)]
    assert set(content(runtime, 1)) == {0.0}
    assert set(content(runtime, 2)) == {0.0}
    assert set(content(runtime, 3)) == {5.0}
    assert torch.equal(shelf.pages[KEYS[1]], shelf.pages[KEYS[0]])


@pytest.mark.parametrize("guard", [False, True])
def test_one_that_fails_stops_nobody_else_and_changes_no_block(guard: bool) -> None:
    shelf = Shelf()
    shelf.broken.add(KEYS[1])
    runtime = make_runtime(shelf, guard=guard)
    apply(runtime, *(Allocate(block) for block in (1, 2, 3)))
    for block in (1, 2, 3):
        runtime.cache.blocks.data[block] = float(block)
    runtime.apply(
        close(
            1,
            [
                Store(0, 1, KEYS[0]),
                Store(1, 2, KEYS[1]),
                Load(2, KEYS[2], 3),
                Store(3, 2, KEYS[3]),
            ],
        )
    )
    ended = {each.operation: each.error for each in runtime.take_finished()}
    assert ended.keys() == {0, 1, 2, 3}
    assert ended[0] is None
    assert isinstance(ended[1], TierFailed)
    assert isinstance(ended[2], BlockMissing)
    assert ended[3] is None
    assert set(content(runtime, 3)) == {3.0}
    assert shelf.pages.keys() == {KEYS[0], KEYS[3]}


def test_an_error_that_is_not_the_tier_s_is_the_caller_s() -> None:
    class Wrong(Shelf):
        def load(self, _key: bytes, _num_bytes: int) -> Tensor:
            raise ZeroDivisionError

    runtime = make_runtime(Wrong())
    apply(runtime, Allocate(1))
    with pytest.raises(ZeroDivisionError):
        apply(runtime, Load(0, KEYS[0], 1))


def test_a_page_may_begin_at_any_byte() -> None:
    """A page behind a file's header begins at any byte; the block's words have eight bytes."""
    shelf = Shelf()
    runtime = make_runtime(shelf)
    apply(runtime, Allocate(1), Allocate(2))
    runtime.cache.blocks.data[1] = torch.arange(16.0).view(2, 2, 2, 1, 2)
    apply(runtime, Store(0, 1, KEYS[0]))
    page = shelf.pages[KEYS[0]]
    shelf.pages[KEYS[0]] = torch.cat([torch.zeros(3, dtype=torch.uint8), page])[3:]
    assert apply(runtime, Load(1, KEYS[0], 2)) == [(1, True)]
    assert content(runtime, 2) == list(range(16))


def test_a_batch_is_checked_before_anything_changes() -> None:
    runtime = make_runtime(Shelf())
    for commands, error, message in (
        ([Zero(1), Store(0, 6, KEYS[0])], BlockOutOfRange, "block 6 is not one of the 6 blocks"),
        ([Zero(1), Load(0, KEYS[0], 9)], BlockOutOfRange, "block 9"),
    ):
        runtime.cache.blocks.data[1] = 3.0
        with pytest.raises(error, match=message):
            apply(runtime, *commands)
        assert set(content(runtime, 1)) == {3.0}
    assert runtime.next_number == 0
    without = make_runtime(None)
    with pytest.raises(NoTier, match="batch 0 holds operation 4"):
        apply(without, Store(4, 1, KEYS[0]))
    assert without.next_number == 0


@pytest.mark.parametrize(
    ("commands", "how"),
    [
        ([Load(0, KEYS[0], 2), CopyOnWrite(2, 3)], "read after written"),
        ([Load(0, KEYS[0], 2), Store(1, 2, KEYS[1])], "read after written"),
        ([Load(0, KEYS[0], 2), Load(1, KEYS[1], 2)], "written twice"),
        ([Store(0, 2, KEYS[0]), Zero(2)], "written after read"),
        ([Store(0, 2, KEYS[0]), Load(1, KEYS[1], 2)], "written after read"),
    ],
)
def test_a_hazard_inside_a_segment_is_refused(commands: list[Command], how: str) -> None:
    batch = close(0, commands)
    batch.column("segment")[1] = 0
    with pytest.raises(CopyHazard, match=f"block 2 of the device tier is {how}"):
        make_runtime(Shelf()).apply(batch)


def test_guard_mode_knows_what_may_be_stored_and_loaded() -> None:
    runtime = make_runtime(Shelf(), guard=True)
    with pytest.raises(StaleRead, match="block 2: it has neither owner nor key"):
        apply(runtime, Store(0, 2, KEYS[0]))
    with pytest.raises(UnownedWrite, match="Load writes block 2, which has no owner"):
        apply(runtime, Load(0, KEYS[0], 2))
    apply(runtime, Allocate(2))
    runtime.cache.blocks.data[2] = 1.0
    assert apply(runtime, Free(2, True), Store(3, 2, KEYS[0])) == [(3, True)]
