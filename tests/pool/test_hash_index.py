# SPDX-License-Identifier: Apache-2.0
"""Several blocks of one content: which one is found, which is next, and what each step costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from kvcore import Config, InvariantViolation, KVCacheManager, Request, State, make_state
from kvcore.codec.decode import decode
from kvcore.codec.encode import encode
from kvcore.invariants.pool_and_state import check
from kvcore.pool.block_pool import PoolTransaction
from kvcore.pool.hash_index import HashIndex, HashIndexTransaction
from kvcore.transitions.allocate import allocate_slots
from kvcore.transitions.publish import evict_blocks
from kvcore.transitions.queries import get_computed_blocks
from kvcore.transitions.requests import add_request
from kvcore.types.effects import Effects
from kvcore.types.keys import KEY_SIZE
from kvcore.types.values import Outcome
from tests.conftest import Backend
from tests.core.test_cost import (
    LARGE,
    PATH_BYTES_MAX,
    SMALL,
    count_steps,
    fresh,
    peak_bytes,
)
from tests.helpers.stories import admit, drop, make, step

KEYS = [bytes([number]) * KEY_SIZE for number in range(3)]


def copy(manager: KVCacheManager, request_id: str) -> None:
    """Compute the one block of the prompt [7, 8] once more, and publish it."""
    manager.add_request(Request(request_id, [7, 8], skip_reading_prefix_cache=True))
    admit(manager, request_id)
    step(manager)


def copies(manager: KVCacheManager) -> tuple[int, ...]:
    """Return the blocks under the only key, in order; assert that the first is hit."""
    manager.check()
    (found,) = manager.state().device.index.values()
    assert manager.get_computed_blocks("asks").blocks.blocks == (found[:1],)
    return found


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of five usable blocks; 1 to 4, of requests a to d, have the same content."""
    manager = make(backend, 6)
    manager.add_request(Request("asks", [7, 8, 9]))
    for request_id in "abcd":
        copy(manager, request_id)
    assert copies(manager) == (1, 2, 3, 4)
    return manager


@pytest.mark.seed("S001-82", "X-02")
def test_the_next_published_copy_answers_whichever_goes(manager: KVCacheManager) -> None:
    manager.evict_blocks([2])
    assert copies(manager) == (1, 3, 4)
    manager.evict_blocks([1])
    assert copies(manager) == (3, 4)
    manager.evict_blocks([4])
    assert copies(manager) == (3,)
    manager.evict_blocks([3])
    assert not manager.state().device.index
    assert manager.get_computed_blocks("asks").num_tokens == 0


def test_a_block_that_is_published_again_goes_to_the_end(manager: KVCacheManager) -> None:
    manager.evict_blocks([2])
    drop(manager, "b")
    copy(manager, "takes 5")
    copy(manager, "takes 2")
    assert copies(manager) == (1, 3, 4, 5, 2)
    manager.evict_blocks([1])
    drop(manager, "a")
    copy(manager, "takes 1")
    assert copies(manager) == (3, 4, 5, 2, 1)


@pytest.mark.parametrize("left", [1, 2, 3, 4])
def test_the_only_copy_left_is_joined_by_others_again(manager: KVCacheManager, left: int) -> None:
    manager.evict_blocks([block for block in (1, 2, 3, 4) if block != left])
    assert copies(manager) == (left,)
    copy(manager, "takes 5")
    assert copies(manager) == (left, 5)
    manager.evict_blocks([left])
    assert copies(manager) == (5,)


def test_copies_keep_their_order_through_canonical_bytes(manager: KVCacheManager) -> None:
    manager.evict_blocks([1])
    drop(manager, "a")
    copy(manager, "takes 5")
    copy(manager, "takes 1")
    data = manager.encode()
    manager.restore(data)
    assert (copies(manager), manager.encode()) == ((2, 3, 4, 5, 1), data)
    assert encode(decode(data)) == data


def test_a_cleared_cache_forgets_all_copies(manager: KVCacheManager) -> None:
    for request_id in "abcd":
        drop(manager, request_id)
    assert manager.reset_prefix_cache()
    assert not manager.state().device.index
    copy(manager, "takes 5")
    copy(manager, "takes 1")
    assert copies(manager) == (5, 1)


def index_of(model: dict[bytes, list[int]]) -> HashIndex:
    """Return the index after the blocks of a model were published, and nothing else happened."""
    tx = HashIndexTransaction(HashIndex())
    for key, blocks in model.items():
        for block in blocks:
            tx.insert(key, block)
    return tx.freeze()


STEPS = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(KEYS), st.booleans()), max_size=60)


@given(STEPS)
def test_an_index_is_a_dict_of_lists(steps: list[tuple[int, bytes, bool]]) -> None:
    """Each step takes a block from under its key, or publishes it under one if it has none."""
    model: dict[bytes, list[int]] = {}
    held: dict[int, bytes] = {}
    values: list[tuple[HashIndex, dict[bytes, tuple[int, ...]]]] = []
    tx = HashIndexTransaction(HashIndex())
    for block, key, freezes in steps:
        if block in held:
            key = held.pop(block)
            model[key].remove(block)
            assert tx.remove(key, block) == (not model[key])
            model = {each: blocks for each, blocks in model.items() if blocks}
        else:
            held[block] = key
            model.setdefault(key, []).append(block)
            tx.insert(key, block)
        for each in KEYS:
            assert tx.first(each) == model.get(each, [None])[0]
        if freezes:
            values.append((tx.freeze(), {each: tuple(b) for each, b in model.items()}))
            assert values[-1][0] == index_of(model)
            tx = HashIndexTransaction(values[-1][0])
    for index, expected in values:
        assert dict(index) == expected
        assert [key in index for key in KEYS] == [key in expected for key in KEYS]
        assert index.ranks() == {b: r for bs in expected.values() for r, b in enumerate(bs)}


def copied(num_copies: int) -> State:
    """Return a state in which this many free blocks hold the prefix of two waiting requests."""
    state = fresh(num_copies + 1)
    state = add_request(state, Request("asks", [7, 8, 9])).state
    state = add_request(state, Request("again", [7, 8], skip_reading_prefix_cache=True)).state
    key = state.requests["asks"].key(state.config, 0, 0)
    tx = PoolTransaction(state.device, Effects())
    blocks = tx.take(num_copies)
    for block in blocks:
        tx.publish(block, key)
    tx.release(blocks)
    return replace(state, device=tx.freeze())


def hit_and_allocate(state: State) -> Outcome[State, Any]:
    """Look up the prompt of request `asks` and schedule its last token."""
    return allocate_slots(state, "asks", 1, get_computed_blocks(state, "asks"))


CALLS: dict[str, Callable[[State, int], Outcome[State, Any]]] = {
    "evict from the middle": lambda state, count: evict_blocks(state, [count // 2]),
    "evict the one that answers": lambda state, _: evict_blocks(state, [1]),
    "evict the last one": lambda state, count: evict_blocks(state, [count]),
    "hit": lambda state, _: hit_and_allocate(state),
    "take a copy and publish it": lambda state, _: allocate_slots(state, "again", 2),
}


def costs(num_copies: int) -> list[tuple[str, Counter[str], int]]:
    """Return the steps of each call and the memory at its peak."""
    state, figures = copied(num_copies), []
    for name, call in CALLS.items():
        work = partial(call, state, num_copies)
        figures.append((name, count_steps(work), peak_bytes(work)))
        state = work().state
    # On paper: three were evicted, `asks` hit 2 and took 1, and 3 left and came back with `again`.
    (blocks,) = state.device.index.values()
    assert (blocks[:2], blocks[-2:]) == ((2, 4), (num_copies - 1, 3))
    assert len(blocks) == num_copies - 3
    return figures


def test_a_step_costs_the_same_however_many_copies_there_are() -> None:
    costs(SMALL)  # what Python caches on a first use is cached now
    for (name, steps, num_bytes), (_, more_steps, more) in zip(
        costs(SMALL), costs(LARGE), strict=True
    ):
        assert steps == more_steps, f"{name}: other steps with more copies"
        assert more < num_bytes + PATH_BYTES_MAX, f"{name} takes {num_bytes} and {more} bytes"


@pytest.mark.parametrize(
    ("following", "preceding"),
    [
        pytest.param({1: 2, 2: 3, 3: 2}, {1: 3, 2: 1, 3: 2}, id="a ring that does not close"),
        pytest.param({1: 2, 2: 3, 3: 1}, {1: 3, 2: 3, 3: 2}, id="a link back that disagrees"),
        pytest.param({1: 2, 2: 1, 3: 3}, {1: 2, 2: 1, 3: 3}, id="a block that is alone has links"),
    ],
)
def test_links_that_disagree_are_no_sound_index(
    following: dict[int, int], preceding: dict[int, int]
) -> None:
    state = make_state(Config(4, 2))
    tx = PoolTransaction(state.device, Effects())
    tx.take(3)
    for block in (1, 2, 3):
        tx.publish(block, KEYS[0])
        tx.pin(block)
        tx.release([block])
    state = replace(state, device=tx.freeze())
    check(state)
    index = HashIndex(state.device.index.firsts, Map(following), Map(preceding))
    with pytest.raises(InvariantViolation, match="IDX-SOUND"):
        check(replace(state, device=attrs.evolve(state.device, index=index)))


@pytest.mark.parametrize("at", [0, 3, 4, 7, 8, 15, 28, 31])
def test_hashes_that_differ_in_one_bit_are_different_content(at: int, backend: Backend) -> None:
    # An index may compare a part of a key to save time, but in the end it must compare the whole.
    other = bytearray(b"h" * 32)
    other[at] ^= 1
    manager = make(backend, 6)
    for request_id, block_hash in (("a", b"h" * 32), ("b", bytes(other))):
        manager.add_request(Request(request_id, [1, 2, 3], block_hashes=[block_hash]))
        assert manager.get_computed_blocks(request_id).num_tokens == 0
        admit(manager, request_id)
        step(manager)
    for request_id, block_hash, block in (("c", b"h" * 32, 1), ("d", bytes(other), 3)):
        manager.add_request(Request(request_id, [1, 2, 3], block_hashes=[block_hash]))
        assert manager.get_computed_blocks(request_id).blocks.blocks == ((block,),)
    assert len(manager.state().device.index) == 2
