# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of V0's classes: the original's kind of error, and nothing changed, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.legacy.v0.block_table import BlockTable
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.naive_block import NaiveBlock
from kvcore.legacy.v0.prefix_caching_block import (
    Block,
    Device,
    NoFreeBlocksError,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
)
from kvcore.types.errors import KvcoreError
from tests.conftest import Backend
from tests.legacy.v0.small import SIZE, allocator, two_tiers, unchanged

Case = tuple[str, Callable[..., object], type[BaseException], str]


class Held:
    """An allocator of five blocks: one shared, one part full, one evictable, two free."""

    def __init__(self, backend: Backend) -> None:
        self.allocator = allocator(backend, 5)
        self.full = self.allocator.allocate_immutable_block(None, [1, 1])
        self.shared = self.allocator.fork(self.full)[0]
        self.part = self.allocator.allocate_mutable_block(self.full)
        self.part.append_token_ids([2])
        evictable = self.allocator.allocate_immutable_block(None, [3, 3])
        self.gone = PrefixCachingBlock(None, [1, 1], SIZE, self.allocator)
        self.allocator.free(evictable, keep_block_object=True)
        self.foreign = PrefixCachingBlock(None, [], SIZE, self.allocator, block_id=99)


BLOCKS: list[Case] = [
    ("allocate no tokens", lambda a, _: a.allocate_immutable_block(None, []), AssertionError, "0"),
    ("allocate None", lambda a, _: a.allocate_immutable_block(None, None), TypeError, ""),
    (
        "allocate a short one among full ones",
        lambda a, _: a.allocate_immutable_blocks(None, [[7, 7], [8]]),
        AssertionError,
        "has 2 tokens, 1 are given",
    ),
    (
        "allocate what has no hash",
        lambda a, _: a.allocate_immutable_blocks(None, [[7, 7], [[8], 8]]),
        TypeError,
        "unhashable",
    ),
    (
        "allocate with an extra hash that has none",
        lambda a, _: a.allocate_immutable_block(None, [7, 7], extra_hash=[]),
        TypeError,
        "unhashable",
    ),
    (
        "allocate behind a part-full block",
        lambda a, held: a.allocate_immutable_block(held.part, [7, 7]),
        AssertionError,
        "2 tokens cannot follow",
    ),
    (
        "allocate more than there are",
        lambda a, _: a.allocate_immutable_blocks(None, [[n, n] for n in range(4, 8)]),
        NoFreeBlocksError,
        "4 blocks are needed, 3 of 5 are free",
    ),
    (
        "allocate behind a naive block",
        lambda a, _: a.allocate_mutable_block(NaiveBlock(None, [], SIZE, a)),
        AssertionError,
        "NaiveBlock",
    ),
    ("free twice", lambda a, held: a.free(held.gone), AssertionError, "unallocated"),
    ("free a stranger", lambda a, held: a.free(held.foreign), KeyError, "block 99 is not known"),
    (
        "swap out one twice",
        lambda a, held: a.swap_out([held.part, held.part]),
        AssertionError,
        "an object of block 1 with 1 tokens is given 2 times",
    ),
    (
        "swap out what is gone after what is not",
        lambda a, held: a.swap_out([held.full, held.gone]),
        AssertionError,
        "it has no id, and 2 tokens",
    ),
    (
        "swap in what is held",
        lambda a, held: a.swap_in([held.gone, held.part]),
        AssertionError,
        "1",
    ),
    ("fork what is gone", lambda a, held: a.fork(held.gone), AssertionError, "no id"),
    (
        "copy what is gone",
        lambda a, held: a.cow_block_if_not_appendable(held.gone),
        AssertionError,
        "",
    ),
    ("access no block", lambda a, _: a.mark_blocks_as_accessed([0, None], 1.0), KeyError, "None"),
    ("access at no time", lambda a, _: a.mark_blocks_as_accessed([0], None), ValueError, "None"),
    ("access a free block", lambda a, _: a.mark_blocks_as_accessed([0, 4], 1.0), ValueError, "4"),
    ("place of no id", lambda a, _: a.get_physical_block_id("0"), ValueError, "'0'"),
    ("computed, a stranger", lambda a, _: a.block_is_computed(5), KeyError, "block 5"),
    (
        "append too much",
        lambda _, held: held.part.append_token_ids([4, 5]),
        AssertionError,
        "1 empty",
    ),
    ("append what has no hash", lambda _, held: held.part.append_token_ids([[]]), TypeError, ""),
    ("append to a full one", lambda _, held: held.full.append_token_ids([4]), AssertionError, "0"),
    ("evict what is held", lambda a, _: a.evictor.remove(0), ValueError, "block 0"),
    ("no such policy", lambda _, held: type(held.allocator)(1, 1, None, 7), ValueError, "7"),
    ("no room in a block", lambda _, held: type(held.allocator)(1, 0), ValueError, "block_size"),
]


@pytest.mark.parametrize(
    ("call", "kind", "text"), [c[1:] for c in BLOCKS], ids=[c[0] for c in BLOCKS]
)
def test_a_wrong_call_of_the_allocator(
    backend: Backend, call: Callable[..., object], kind: type[BaseException], text: str
) -> None:
    held = Held(backend)
    error = unchanged(call, held, given=(held.allocator, held))
    assert isinstance(error, kind)
    assert text in str(error)
    assert isinstance(error, KvcoreError | TypeError)


def tables(backend: Backend) -> tuple[CpuGpuBlockAllocator, BlockTable, Block]:
    """Return three GPU blocks: a forked table of three tokens; two CPU blocks: one is shared."""
    tiers = two_tiers(backend, 3, 2)
    table = BlockTable(SIZE, tiers)
    table.allocate([1, 2, 3])
    table.fork()
    assert len(table.blocks) == 2  # objects are made when they are looked at
    on_cpu = tiers.allocate_mutable_block(None, Device.CPU)
    tiers.fork(on_cpu)
    return tiers, table, on_cpu


TABLES: list[Case] = [
    ("no device", lambda t, _b, _c: t.allocate_mutable_block(None, None), ValueError, "Device.GPU"),
    (
        "swap blocks of both",
        lambda t, b, c: t.swap([*b.blocks, c], Device.GPU, Device.CPU),
        KeyError,
        "block 3 is not known",
    ),
    (
        "swap to nowhere",
        lambda t, b, _c: t.swap(b.blocks, Device.GPU, "disk"),
        ValueError,
        "disk",
    ),
    (
        "append more than there is",
        lambda _t, b, _c: b.append_token_ids([4, 5, 6]),
        NoFreeBlocksError,
        "2 blocks are needed, 1 of 3 are free",
    ),
    ("append what has no hash", lambda _t, b, _c: b.append_token_ids([[4]]), TypeError, ""),
    ("look behind", lambda _t, b, _c: b.append_token_ids([4], -9), ValueError, "-9"),
    ("look too far", lambda _t, b, _c: b.ensure_num_empty_slots(4), NoFreeBlocksError, "2 blocks"),
    ("allocate again", lambda _t, b, _c: b.allocate([1]), AssertionError, "2 blocks already"),
    ("copy in the host tier", lambda _t, _b, c: c.append_token_ids([1]), AssertionError, "block 3"),
    ("accessed by nobody", lambda t, _b, _c: t.mark_blocks_as_accessed([0, 7], 1.0), KeyError, "7"),
]


@pytest.mark.parametrize(
    ("call", "kind", "text"), [c[1:] for c in TABLES], ids=[c[0] for c in TABLES]
)
def test_a_wrong_call_of_tiers_and_tables(
    backend: Backend, call: Callable[..., object], kind: type[BaseException], text: str
) -> None:
    tiers, table, on_cpu = tables(backend)
    error = unchanged(call, tiers, table, on_cpu, given=(tiers, table, on_cpu))
    assert isinstance(error, kind)
    assert text in str(error)


def test_errors_are_values_that_programs_read(backend: Backend) -> None:
    blocks = PrefixCachingBlockAllocator(1, SIZE, backend=backend)
    blocks.allocate_mutable_block(None)
    with pytest.raises(NoFreeBlocksError) as caught:
        blocks.allocate_mutable_block(None)
    fields = caught.value.fields
    assert (fields["needed"], fields["free"], fields["total"]) == (1, 0, 1)
