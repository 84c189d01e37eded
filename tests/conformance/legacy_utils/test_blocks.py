# SPDX-License-Identifier: Apache-2.0
"""Seed 001's block object: live owners, hash and neighbours, of a block by itself."""

from __future__ import annotations

import pytest

from kvcore.legacy.v1_0_8.errors import AlreadyHashed
from kvcore.legacy.v1_0_8.kv_cache_utils import BlockHashType, FreeKVCacheBlockQueue, KVCacheBlock
from kvcore.types.errors import BackendMissing, DoubleFree, InvalidCount, WrongArgument
from tests.conftest import Backend

RECORD = BlockHashType(123, (1, 2, 3))


@pytest.mark.seed("S001-06")
def test_a_fresh_block_has_an_id_and_nothing_else(backend: Backend) -> None:
    block = KVCacheBlock(3, backend=backend)
    assert (block.block_id, block.ref_cnt, block.block_hash) == (3, 0, None)
    assert (block.prev_free_block, block.next_free_block) == (None, None)
    made = KVCacheBlock(block_id=3, ref_cnt=2, _block_hash=RECORD, backend=backend)
    assert (made.block_id, made.ref_cnt, made.block_hash, made._block_hash) == (
        *(3, 2, RECORD),
        RECORD,
    )


@pytest.mark.seed("S001-07")
def test_owners_go_up_and_down_by_one_and_never_below_none(backend: Backend) -> None:
    block = KVCacheBlock(3, backend=backend)
    counts = []
    for change in (block.incr_ref, block.incr_ref, block.decr_ref, block.decr_ref, block.incr_ref):
        change()
        counts.append(block.ref_cnt)
    assert counts == [1, 2, 1, 0, 1]
    block.decr_ref()
    # The original goes on to -1.
    with pytest.raises(DoubleFree, match="block 3 has 0 owners, but the call releases 1"):
        block.decr_ref()
    assert block.ref_cnt == 0


@pytest.mark.seed("S001-08")
@pytest.mark.parametrize("ref_cnt", [0, 1, 2])
def test_a_hash_is_set_once_until_it_is_reset(backend: Backend, ref_cnt: int) -> None:
    block = KVCacheBlock(3, ref_cnt, backend=backend)
    block.block_hash = RECORD
    assert (block.block_hash, block.ref_cnt) == (RECORD, ref_cnt)
    with pytest.raises(AlreadyHashed, match="block 3 already has a key") as caught:
        block.block_hash = BlockHashType(4, (5,))
    assert isinstance(caught.value, AssertionError)
    assert block.block_hash == RECORD
    block.reset_hash()
    assert block.block_hash is None
    assert block.ref_cnt == ref_cnt
    block.reset_hash()
    block.block_hash = BlockHashType(4, (5,))
    assert block.block_hash == BlockHashType(4, (5,))


@pytest.mark.seed("S001-07", "S001-08")
def test_a_hash_stays_while_owners_come_and_go(backend: Backend) -> None:
    block = KVCacheBlock(3, 1, RECORD, backend=backend)
    block.decr_ref()
    block.incr_ref()
    assert (block.block_hash, block.ref_cnt) == (RECORD, 1)


def test_a_block_by_itself_gathers_no_commands(backend: Backend) -> None:
    block = KVCacheBlock(3, 1, RECORD, backend=backend)
    for _ in range(3):
        block.decr_ref()
        block.incr_ref()
    block.reset_hash()
    assert block._pool is not None
    assert len(block._pool.take_batch()) == 0


@pytest.mark.seed("S001-09")
def test_a_block_prints_its_neighbours_by_their_ids(backend: Backend) -> None:
    blocks = [KVCacheBlock(block_id, backend=backend) for block_id in (4, 5, 6)]
    blocks[1].block_hash = RECORD
    FreeKVCacheBlockQueue(blocks)
    assert repr(blocks[0]) == (
        "KVCacheBlock(block_id=4, ref_cnt=0, _block_hash=None, "
        "prev_free_block=None, next_free_block=5)"
    )
    assert repr(blocks[1]) == (
        f"KVCacheBlock(block_id=5, ref_cnt=0, _block_hash={RECORD}, "
        "prev_free_block=4, next_free_block=6)"
    )


@pytest.mark.seed("S001-06")
def test_blocks_compare_by_what_they_show(backend: Backend) -> None:
    one, two = KVCacheBlock(1, backend=backend), KVCacheBlock(1, backend=backend)
    assert one == two
    two.incr_ref()
    assert one != two
    one.incr_ref()
    assert one == two
    assert one != KVCacheBlock(2, 1, backend=backend)
    assert one != 1


def test_what_is_no_block_is_refused_before_anything_changes(backend: Backend) -> None:
    with pytest.raises(InvalidCount):
        KVCacheBlock(1, -1, backend=backend)
    other = KVCacheBlock(2, backend=backend)
    with pytest.raises(TypeError, match="next_free_block"):
        KVCacheBlock(1, next_free_block=other, backend=backend)  # type: ignore[call-arg] # no field
    with pytest.raises(BackendMissing):
        KVCacheBlock(1, 1, backend="c")  # type: ignore[arg-type] # there is none
    block = KVCacheBlock(1, backend=backend)
    wrong = ["hash", None, (1,), (1, None), ("x", 1, 2), (1, (2,), None, 3)]
    for record in wrong:
        with pytest.raises(WrongArgument):
            block.block_hash = record  # type: ignore[assignment] # the mistake
        assert (block.ref_cnt, block.block_hash) == (0, None)
