# SPDX-License-Identifier: Apache-2.0
"""The arguments of allocate_slots, the layout of its slots, and its results as values.

Blocks hold two tokens; a fresh pool gives 1, 2, 3, ...
"""

from __future__ import annotations

import inspect

import pytest

from kvcore import Group, Hit, KVCacheBlocks, KVCacheManager
from kvcore.types.errors import CachingDisabled, HitsOnRunningRequest, InvalidCount, WrongHit
from kvcore.types.slot_request import SlotOptions
from tests.conftest import Backend
from tests.helpers.stories import (
    add,
    admit,
    blocks,
    drop,
    keyed,
    make,
    owners,
    serve,
    step,
    unchanged,
)

NOTHING = KVCacheBlocks(((),))


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Return a manager with tokens 0 to 3 in free blocks 1 and 2; "b" begins with them."""
    made = make(backend, 12)
    serve(made, "a", [0, 1, 2, 3, 90])
    step(made)
    drop(made, "a")
    add(made, "b", [0, 1, 2, 3, *range(20, 28)])
    return made


@pytest.mark.seed("S000-01")
def test_the_arguments_come_in_the_order_that_engines_know() -> None:
    parameters = inspect.signature(KVCacheManager.allocate_slots).parameters
    expected = {
        "request_id": inspect.Parameter.empty,
        "num_new_tokens": inspect.Parameter.empty,
        "hit": None,  # the hit blocks and their number of tokens, in one
        "num_lookahead_tokens": 0,
        "num_external_computed_tokens": 0,
        "delay_cache_blocks": False,
        "num_encoder_tokens": 0,
        "full_sequence_must_fit": False,
    }
    defaults = {name: each.default for name, each in parameters.items()}
    assert list(defaults)[1:9] == list(expected)
    assert expected.items() <= defaults.items()
    requested = inspect.signature(KVCacheManager.can_allocate).parameters
    assert list(requested) == [*list(defaults)[:4], "options"]
    assert SlotOptions.__annotations__.keys() == set(list(defaults)[4:])


@pytest.mark.seed("S000-02", "S000-26", "S000-32")
def test_slots_lie_computed_hit_external_new_lookahead(manager: KVCacheManager) -> None:
    # Four tokens are hits, three external, two new, two lookahead: eleven slots, six blocks.
    hit = manager.get_computed_blocks("b")
    grown = manager.allocate_slots(
        "b", 2, hit, num_external_computed_tokens=3, num_lookahead_tokens=2
    )
    # External tokens 4 to 6 take a block and a half, 3 and 4 of the queue 4, 5, ..., 3, 2, 1.
    assert blocks(manager, "b") == [1, 2, 4, 5, 6, 7]
    assert grown == KVCacheBlocks(((6, 7),))
    assert manager.num_computed_tokens("b") == 9
    # Nine tokens fill four blocks; what lies behind them is not cached.
    assert keyed(manager) == [1, 2, 4, 5]
    step(manager)
    # Computed tokens are what the next call goes on from: slots 9 and 10 are there already.
    assert manager.allocate_slots("b", 2) == NOTHING


@pytest.mark.seed("S000-03")
def test_hits_are_counted_when_they_are_attached_and_never_again(manager: KVCacheManager) -> None:
    hit = manager.get_computed_blocks("b")
    assert [owners(manager, block) for block in (1, 2)] == [0, 0]
    manager.allocate_slots("b", 1, hit, num_external_computed_tokens=2, delay_cache_blocks=True)
    assert [owners(manager, block) for block in (1, 2)] == [1, 1]
    external = blocks(manager, "b")[2]
    # External tokens are no part of the local cache: no look-up finds them.
    assert (owners(manager, external), keyed(manager)) == (1, [1, 2])
    step(manager)
    manager.allocate_slots("b", 3)
    assert [owners(manager, block) for block in blocks(manager, "b")] == [1] * 5
    # A hit of what somebody holds makes two.
    add(manager, "c", [0, 1, 2, 3, 95])
    manager.allocate_slots("c", 1, manager.get_computed_blocks("c"))
    assert [owners(manager, block) for block in (1, 2)] == [2, 2]


@pytest.mark.seed("S000-04", "S001-71")
def test_a_call_for_nothing_is_an_error(manager: KVCacheManager) -> None:
    nothing = Hit(KVCacheBlocks(((),)), 0)
    for given in (None, nothing):
        with unchanged(manager), pytest.raises(InvalidCount):
            manager.allocate_slots("b", 0, given, num_lookahead_tokens=4)
    # A hit is something: it is taken, and the rest of the request is scheduled later.
    hit = manager.get_computed_blocks("b")
    assert manager.allocate_slots("b", 0, hit)
    assert manager.num_computed_tokens("b") == hit.num_tokens > 0


@pytest.mark.seed("S000-04", "S000-22")
def test_external_tokens_alone_are_something(manager: KVCacheManager) -> None:
    # An asynchronous load: blocks are held until it ends, nothing is computed yet.
    hit = manager.get_computed_blocks("b")
    assert manager.allocate_slots("b", 0, hit, num_external_computed_tokens=3) == NOTHING
    assert blocks(manager, "b") == [1, 2, 4, 5]
    assert manager.num_computed_tokens("b") == 7


@pytest.mark.seed("S000-05", "S000-22")
def test_no_hit_is_the_empty_hit_and_attaches_nothing(backend: Backend) -> None:
    encoded = []
    for given in (None, Hit(NOTHING, 0)):
        manager = make(backend)
        serve(manager, "a", [0, 1, 2])
        step(manager)
        add(manager, "b", [0, 1, 3])
        # Its first tokens are cached, but nothing was said of them: it computes them again.
        assert manager.allocate_slots("b", 3, given) == KVCacheBlocks(((3, 4),))
        assert owners(manager, 1) == 1
        manager.take_stats()  # the empty hit was a look-up, and counts as one
        encoded.append(manager.encode())
    assert encoded[0] == encoded[1]


@pytest.mark.seed("S000-06")
def test_the_next_chunk_begins_behind_what_was_computed_and_hit(manager: KVCacheManager) -> None:
    hit = manager.get_computed_blocks("b")
    assert hit.num_tokens == 4
    manager.allocate_slots("b", 3, hit)
    assert manager.num_computed_tokens("b") == 7
    step(manager)
    # Slot 7 is the second half of the fourth block; 8 opens the fifth.
    assert manager.allocate_slots("b", 1) == NOTHING
    grown = manager.allocate_slots("b", 1)
    assert isinstance(grown, KVCacheBlocks)
    assert [len(ids) for ids in grown.blocks] == [1]


@pytest.mark.seed("S000-08")
def test_a_hit_that_is_no_whole_number_of_blocks_is_an_error(manager: KVCacheManager) -> None:
    for num_tokens in (3, 5, 2):
        with unchanged(manager), pytest.raises(WrongHit):
            manager.allocate_slots("b", 1, Hit(KVCacheBlocks(((1, 2),)), num_tokens))


@pytest.mark.seed("S000-21")
def test_a_running_request_brings_no_hits(manager: KVCacheManager) -> None:
    hit = manager.get_computed_blocks("b")
    manager.allocate_slots("b", 1, hit)
    step(manager)
    with unchanged(manager), pytest.raises(HitsOnRunningRequest):
        manager.allocate_slots("b", 1, hit)


@pytest.mark.seed("S000-25")
def test_without_caching_a_hit_is_an_error(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    serve(manager, "a", [0, 1, 2])
    step(manager)
    add(manager, "b", [0, 1, 2])
    assert manager.get_computed_blocks("b") == Hit(NOTHING, 0)
    with unchanged(manager), pytest.raises(CachingDisabled):
        manager.allocate_slots("b", 1, Hit(KVCacheBlocks(((1,),)), 2))


@pytest.mark.seed("S000-33")
def test_what_grew_by_nothing_is_the_same_empty_value_every_time(backend: Backend) -> None:
    manager = make(backend, groups=(Group(4), Group(4)))
    serve(manager, "a", [0])
    step(manager)
    empty = KVCacheBlocks(((), ()))
    for token in (1, 2, 3):
        manager.add_tokens("a", [token])
        assert manager.allocate_slots("a", 1) == empty == manager.get_blocks("a").new_empty()
    manager.add_tokens("a", [4])
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((3,), (4,)))


@pytest.mark.seed("S000-52", "S000-28")
def test_groups_grow_each_by_what_it_lacks(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(4)))
    assert serve(manager, "a", [0, 1]) == [1]
    step(manager)
    manager.add_tokens("a", [2, 3, 4])
    # The third token opens a block of two, and lies in the first block of four.
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((3,), ()))
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((), ()))
    assert manager.allocate_slots("a", 1) == KVCacheBlocks(((4,), (5,)))


@pytest.mark.seed("S000-53")
def test_hits_and_new_blocks_add_up_to_the_table(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(4)))
    serve(manager, "a", [0, 1, 2, 3, 4])
    step(manager)
    add(manager, "b", [0, 1, 2, 3, 5])
    hit = manager.get_computed_blocks("b")
    grown = manager.allocate_slots("b", 1, hit)
    assert isinstance(grown, KVCacheBlocks)
    assert hit.blocks == KVCacheBlocks(((1, 2), (4,)))
    assert grown == KVCacheBlocks(((6,), (7,)))
    assert hit.blocks + grown == KVCacheBlocks(((1, 2, 6), (4, 7))) == manager.get_blocks("b")


@pytest.mark.seed("S000-53")
def test_ids_are_none_only_where_that_is_allowed_and_no_group_has_any(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(4)))
    serve(manager, "a", [0, 1])
    step(manager)
    manager.add_tokens("a", [2])
    some = manager.allocate_slots("a", 1)
    assert isinstance(some, KVCacheBlocks)
    assert some == KVCacheBlocks(((3,), ()))
    assert some.get_block_ids(allow_none=True) == ([3], [])
    manager.add_tokens("a", [3])
    none = manager.allocate_slots("a", 1)
    assert isinstance(none, KVCacheBlocks)
    assert none.get_block_ids() == ([], [])
    assert none.get_block_ids(allow_none=True) is None
    assert none.new_empty() == some.new_empty() == KVCacheBlocks(((), ()))


@pytest.mark.seed("S000-53")
def test_unhashed_blocks_are_named_and_the_null_block_is_not(backend: Backend) -> None:
    window = Group(2, kind="sliding_window", window=2)
    manager = make(backend, 12, groups=(Group(2), window))
    add(manager, "a", range(5))
    admit(manager, "a")
    step(manager)
    # A query at 5 sees token 4 and itself, so the second group keeps the third block alone.
    manager.remove_skipped_blocks("a", 5)
    held = manager.get_blocks("a")
    assert held == KVCacheBlocks(((1, 2, 3), (0, 0, 6)))
    assert held.get_unhashed_block_ids(manager.has_key) == ([3], [6])


@pytest.mark.seed("S000-48")
def test_a_request_without_blocks_has_an_empty_list_a_group(backend: Backend) -> None:
    manager = make(backend, groups=(Group(2), Group(4)))
    add(manager, "a", [0, 1, 2])
    assert manager.get_block_ids("a") == ([], [])
    admit(manager, "a")
    assert manager.get_block_ids("a") == ([1, 2], [3])
    assert manager.get_blocks("a") == KVCacheBlocks(((1, 2), (3,)))
