# SPDX-License-Identifier: Apache-2.0
"""V0's evictor, counters and collections of blocks by themselves, without an allocator."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvcore.legacy.v0 import common, cpu_gpu_block_allocator, naive_block, prefix_caching_block
from kvcore.legacy.v0.common import (
    BlockList,
    BlockPool,
    CacheMetricData,
    CopyOnWriteTracker,
    RefCounter,
)
from kvcore.legacy.v0.cpu_gpu_block_allocator import CpuGpuBlockAllocator
from kvcore.legacy.v0.evictor import (
    BlockMetaData,
    EvictionPolicy,
    Evictor,
    LRUEvictor,
    make_evictor,
)
from kvcore.legacy.v0.interfaces import Device, DeviceAwareBlockAllocator
from kvcore.legacy.v0.naive_block import NaiveBlock, NaiveBlockAllocator
from tests.conftest import Backend
from tests.legacy.v0.small import SIZE, allocator, two_tiers, unchanged


def test_an_evictor_is_made_without_an_allocator() -> None:
    evictor = make_evictor(EvictionPolicy.LRU)
    evictor.add(3, 77, 16, 1.0)
    assert isinstance(evictor, LRUEvictor)
    assert isinstance(evictor, Evictor)
    assert (3 in evictor, 2 in evictor, evictor.num_blocks) == (True, False, 1)
    data = evictor.free_table[3]
    assert isinstance(data, BlockMetaData)
    assert (data.content_hash, data.num_hashed_tokens, data.last_accessed) == (77, 16, 1.0)
    assert (evictor.evict(), evictor.num_blocks) == ((3, 77), 0)
    with pytest.raises(ValueError, match="No usable cache memory left"):
        evictor.evict()
    with pytest.raises(TypeError):
        Evictor()  # type: ignore[abstract] # which is the point


def test_an_evictor_by_itself_evicts_by_time_then_length_then_id(backend: Backend) -> None:
    evictor = LRUEvictor(backend=backend)
    rng = random.Random(5)
    plain: dict[int, tuple[float, int, int]] = {}
    for _ in range(600):
        block = rng.choice([*range(40), -7, 900, 10**12])
        time, length, content = float(rng.randrange(4)), rng.randrange(1, 4), rng.getrandbits(63)
        match rng.randrange(5):
            case 0 | 1:
                evictor.add(block, content, length, time)
                plain[block] = (time, -length, content)
            case 2 if block in plain:
                evictor.update(block, time)
                plain[block] = (time, *plain[block][1:])
            case 3 if block in plain:
                evictor.remove(block)
                del plain[block]
            case 4 if plain:
                first = min(plain, key=lambda each: (*plain[each][:2], each))
                assert evictor.evict() == (first, plain.pop(first)[2])
        assert (evictor.num_blocks, block in evictor) == (len(plain), block in plain)
    assert list(evictor.free_table) == sorted(plain)


def test_blocks_of_one_content_are_evicted_one_by_one(backend: Backend) -> None:
    evictor = LRUEvictor(backend=backend)
    for block in (2, 1, 0):
        evictor.add(block, 5, 1, 0.0)
    assert [evictor.evict() for _ in range(3)] == [(0, 5), (1, 5), (2, 5)]


def test_what_an_evictor_does_not_have_is_told(backend: Backend) -> None:
    evictor = LRUEvictor(backend=backend)
    evictor.add(1, 5, 1, 0.0)
    for call, given, kind in (
        (evictor.update, (2, 1.0), KeyError),
        (evictor.update, (900, 1.0), KeyError),
        (evictor.remove, (2,), ValueError),
        (evictor.add, (1, 5, 1, "soon"), ValueError),
        (evictor.add, (2, 5, -1, 0.0), ValueError),
        (evictor.add, (2, 2**300, 1, 0.0), OverflowError),
    ):
        error = unchanged(call, evictor, given=given)
        assert isinstance(error, kind)


def test_names_are_where_engines_import_them() -> None:
    for name in ("NaiveBlock", "NaiveBlockAllocator", "Evictor", "CopyOnWriteTracker"):
        assert name in prefix_caching_block.__all__
    assert prefix_caching_block.PrefixCachingBlockAllocator._none_hash == hash("None")
    assert "Factory" in vars(prefix_caching_block.Block)
    of_modules: dict[object, str] = {
        common: "BlockList BlockPool CacheMetricData CopyOnWriteTracker ReadOnlyRefCounter "
        "RefCounter RefCounterProtocol get_all_blocks_recursively",
        naive_block: "NaiveBlock NaiveBlockAllocator",
        prefix_caching_block: " ".join(prefix_caching_block.__all__),
        cpu_gpu_block_allocator: "CpuGpuBlockAllocator NullBlock",
    }
    for module, names in of_modules.items():
        assert all(hasattr(module, name) for name in names.split())
    none_hash = prefix_caching_block.ComputedBlocksTracker._none_hash
    assert none_hash == prefix_caching_block.PrefixCachingBlock._none_hash == hash("None")
    prefix_caching_block.assert_prefix_caching_block_or_none(None)
    nowhere: Any = None
    block = NaiveBlock(None, [], 1, nowhere)
    with pytest.raises(AssertionError, match="NaiveBlock"):
        prefix_caching_block.assert_prefix_caching_block_or_none(block)


def test_owners_are_counted_once_for_an_id_that_comes_twice(backend: Backend) -> None:
    counts = common.RefCounter([4, 4, 9, 4], backend=backend)
    assert (counts.incr(4), counts.incr(4), counts.get(9)) == (1, 2, 0)
    with pytest.raises(AssertionError):
        counts.get(0)
    tracker = CopyOnWriteTracker(counts)
    for pair in ((None, 4), (4, None)):
        with pytest.raises(AssertionError):
            tracker.record_cow(*pair)
    assert tracker.clear_cows() == []


def test_the_fields_of_the_hit_rate_can_be_set_and_read() -> None:
    data = CacheMetricData(2, 0.25, 1, 1, 4)
    assert data.get_hit_rate() == pytest.approx((2 + 1) / 9)
    for hit in (True, False, False):
        data.query(hit=hit)
    assert (data.num_completed_blocks, data.num_incompleted_block_queries) == (3, 0)
    assert data.num_incompleted_block_hit == 0
    assert data.completed_block_cache_hit_rate == pytest.approx(4 / 12)
    both = CacheMetricData(num_completed_blocks=1, block_size=4)
    both.query_all(9, 5)
    assert (both.num_completed_blocks, both.num_incompleted_block_queries) == (3, 1)
    assert both.get_hit_rate() == pytest.approx(5 / 13)


def test_a_pool_of_blocks_makes_objects_anew_and_doubles() -> None:
    made: list[dict[str, Any]] = []

    def create(**fields: Any) -> NaiveBlock:
        made.append(fields)
        return NaiveBlock(**fields)

    pool = BlockPool(SIZE, create, None, 2)
    assert [each["block_size"] for each in made] == [SIZE, SIZE]
    first = pool.init_block(None, [1], SIZE, 5)
    second = pool.init_block(first, [], SIZE, None, extra_hash=3)
    assert (first.pool_id, second.pool_id, second.prev_block) == (0, 1, first)
    assert (first.block_id, first.token_ids) == (5, [1])
    assert pool.init_block(None, [], SIZE, 6).pool_id == 2
    assert len(made) == 4
    pool.free_block(first)
    again = pool.init_block(None, [7, 8], SIZE, 9)
    assert again is first
    assert (again.block_id, again.token_ids, again.pool_id) == (9, [7, 8], 0)
    with pytest.raises(AssertionError):
        BlockPool(SIZE, create, None, -1)


def test_a_list_of_blocks_keeps_their_ids(backend: Backend) -> None:
    naive = two_tiers(backend, kind="naive").allocator(Device.GPU)
    chain = naive.allocate_immutable_blocks(None, [[1, 2], [3]])
    held = BlockList(chain)
    ids = held.ids()
    fork = naive.fork(chain[-1])
    held.append_token_ids(1, [4])
    held.append(naive.allocate_mutable_block(chain[-1]))
    assert (held.ids(), ids, held.list(), len(held)) == ([0, 2, 3], [0, 2, 3], chain, 3)
    held[1] = fork[1]
    assert (ids, held[1]) == ([0, 1, 3], fork[1])
    held.reset()
    assert (held.ids(), held.list(), ids) == ([], [], [0, 1, 3])
    fork[1].block_id = None
    for wrong in (held.append, lambda block: held.update([block])):
        with pytest.raises(AssertionError):
            wrong(fork[1])
    assert (held.ids(), len(held)) == ([], 0)


def test_a_naive_allocator_is_made_as_the_original_is(backend: Backend) -> None:
    named = NaiveBlockAllocator(
        create_block=NaiveBlock, num_blocks=2, block_size=4, backend=backend
    )
    placed = NaiveBlockAllocator(NaiveBlock, 2, 4, [7, 5], None, backend=backend)
    cases: list[tuple[NaiveBlockAllocator, tuple[int, ...]]] = [(named, (0, 1)), (placed, (7, 5))]
    for made, ids in cases:
        assert made._free_block_indices == ids
        block = made.allocate_mutable_block(None)
        made.fork(block)
        assert (type(block), block.block_id) == (NaiveBlock, ids[0])
        assert made._free_block_indices == ids[1:]
        made.free_block_id(ids[0])
        assert made.get_num_free_blocks() == 1
        made.free_block_id(ids[0])
        assert made._free_block_indices == ids
        error = unchanged(made.free_block_id, made, given=(ids[0],))
        assert isinstance(error, AssertionError)
    with pytest.raises(AssertionError, match="1 different ids are given for 2 blocks"):
        NaiveBlockAllocator(NaiveBlock, 2, 4, [7, 7], backend=backend)


class Noted(NaiveBlock):
    """A block of a user's own class."""


@pytest.mark.parametrize("has_pool", [False, True])
def test_a_naive_allocator_makes_blocks_of_any_class(backend: Backend, has_pool: bool) -> None:
    made: list[Noted] = []

    def create(**fields: Any) -> Noted:
        made.append(Noted(**fields))
        return made[-1]

    pool = BlockPool(2, create, None, 3) if has_pool else None
    blocks = NaiveBlockAllocator(create, 2, 2, block_pool=pool, backend=backend)
    assert len(made) == (3 if has_pool else 8)
    first = blocks.allocate_immutable_block(None, [1])
    fork = blocks.fork(first)[0]
    fork.append_token_ids([2])
    assert (first, fork) == (made[0], made[1])
    assert (fork.token_ids, fork.block_id, blocks.clear_copy_on_writes()) == ([1, 2], 1, [(0, 1)])
    blocks.free(fork)
    again = blocks.allocate_mutable_block(first)
    assert (again, again.prev_block, again.token_ids) == (fork, first, [])


@pytest.mark.parametrize("kind", ["naive", "prefix_caching", "of a class of one's own"])
def test_swapped_objects_go_back_to_the_pool_that_made_them(backend: Backend, kind: str) -> None:
    """With three blocks at a time, the GPU makes no more objects than for the first ones."""
    if kind in cpu_gpu_block_allocator.KINDS:
        tiers = two_tiers(backend, kind=kind)
    else:
        gpu, cpu = (
            NaiveBlockAllocator(Noted, 4, SIZE, first, backend=backend)
            for first in (range(4), range(4, 8))
        )
        tiers = CpuGpuBlockAllocator(cpu, gpu)
    objects: set[Any] = set()
    for number in range(30):
        tokens = [[number, 0], [number, 1], [number, 2]]
        held: list[Any] = tiers.allocate_immutable_blocks(None, tokens, Device.GPU)
        objects.update(held)
        assert all(each._allocator is tiers.allocator(Device.GPU) for each in held)
        assert len(tiers.swap(held, Device.GPU, Device.CPU)) == 3
        for block in held:
            tiers.free(block)
        tiers.get_and_reset_swaps()
        tiers.take_batch()
    assert len(objects) == 3
    fresh = tiers.allocate_immutable_block(None, [1, 1], Device.CPU)
    assert fresh not in objects


@pytest.mark.parametrize("block", [0, 7])
def test_a_counter_by_itself_keeps_no_commands(backend: Backend, block: int) -> None:
    counter = RefCounter([7, 0, 3], backend=backend)
    for _ in range(20):
        assert (counter.incr(block), counter.incr(block)) == (1, 2)
        assert (counter.decr(block), counter.decr(block)) == (1, 0)
        assert len(counter._blocks.backing.state().commands) == 0


def test_a_counter_of_an_allocator_leaves_its_commands(backend: Backend) -> None:
    blocks = NaiveBlockAllocator(NaiveBlock, 4, SIZE, backend=backend)
    assert blocks.allocate_mutable_block(None).block_id == 0
    assert blocks.refcounter.incr(0) == 2
    assert (blocks.refcounter.decr(0), blocks.refcounter.decr(0)) == (1, 0)
    assert [type(each).__name__ for each in blocks.take_batch()] == ["Allocate", "Free"]


def test_a_block_is_appendable_for_its_only_owner(backend: Backend) -> None:
    """So is a block without an id, which no other owner can see."""
    counter = RefCounter([0, 1], backend=backend)
    tracker = CopyOnWriteTracker(counter.as_readonly())
    blocks = allocator(backend)
    block = blocks.allocate_mutable_block(None)
    assert block.block_id == 0
    for count, appendable in enumerate((True, True, False, False)):
        assert counter.get(0) == count
        assert tracker.is_appendable(block) is appendable
        counter.incr(0)
    block.block_id = 1
    assert tracker.is_appendable(block)
    block.block_id = None
    assert tracker.is_appendable(block)
    block.block_id = 2
    with pytest.raises(AssertionError, match="block 2 is not known"):
        tracker.is_appendable(block)


def test_two_tiers_are_a_device_aware_allocator(backend: Backend) -> None:
    for kind in ("naive", "prefix_caching"):
        tiers = two_tiers(backend, kind=kind)
        assert isinstance(tiers, DeviceAwareBlockAllocator)
        assert tiers._allocators == {each: tiers.allocator(each) for each in Device}


def test_what_is_cached_and_what_is_free_can_be_read(backend: Backend) -> None:
    blocks = allocator(backend, 3)
    held = blocks.allocate_immutable_blocks(None, [[1, 2], [3, 4]])
    hashes = [block.content_hash for block in held]
    assert blocks._cached_blocks == {hashes[0]: 0, hashes[1]: 1}
    assert blocks._hashless_allocator._free_block_indices == (2,)
    for block in held:
        blocks.free(block)
    assert list(blocks.evictor.free_table) == [0, 1]
    assert blocks.reset_prefix_cache()
    assert (blocks._cached_blocks, blocks.evictor.free_table) == ({}, {})
    assert sorted(blocks._hashless_allocator._free_block_indices) == [0, 1, 2]


def test_all_owners_can_be_read(backend: Backend) -> None:
    blocks = allocator(backend, 3)
    blocks.fork(blocks.allocate_immutable_block(None, [1, 2]))
    assert blocks._refcounter._refcounts == {0: 2, 1: 0, 2: 0}
