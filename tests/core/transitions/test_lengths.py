# SPDX-License-Identifier: Apache-2.0
"""The model length: new tokens may not pass it, lookahead and external tokens are clipped.

A request may have more tokens than the model takes. Blocks hold two tokens. Source: S000-07, 13,
14.
"""

from __future__ import annotations

import pytest

from kvcore import KVCacheBlocks, KVCacheManager, Reason, Refused
from kvcore.types.errors import BeyondModelLength
from tests.conftest import Backend
from tests.helpers.stories import add, blocks, drop, keyed, make, serve, step


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager of nine usable blocks; the model takes 8 tokens; "long" has ten."""
    made = make(backend, max_model_len=8)
    add(made, "long", range(10))
    return made


@pytest.mark.seed("S001-73")
def test_a_longer_request_is_computed_up_to_the_model_length(manager: KVCacheManager) -> None:
    grown = manager.allocate_slots("long", 8)
    assert grown == KVCacheBlocks(((1, 2, 3, 4),))
    assert (manager.num_computed_tokens("long"), manager.num_tokens("long")) == (8, 10)
    step(manager)
    with pytest.raises(BeyondModelLength):
        manager.allocate_slots("long", 1)
    assert keyed(manager) == [1, 2, 3, 4]


@pytest.mark.seed("S000-14", "S001-73")
def test_lookahead_is_clipped_at_the_model_length(manager: KVCacheManager) -> None:
    # Seven tokens and a hundred of lookahead are eight slots: four blocks.
    manager.allocate_slots("long", 7, num_lookahead_tokens=100)
    assert blocks(manager, "long") == [1, 2, 3, 4]
    assert manager.num_computed_tokens("long") == 7
    step(manager)
    # The last slot is there already.
    assert manager.allocate_slots("long", 1, num_lookahead_tokens=10**12) == KVCacheBlocks(((),))


@pytest.mark.seed("S000-07", "S000-17", "S000-26")
def test_external_tokens_are_clipped_at_the_model_length(manager: KVCacheManager) -> None:
    # All the model takes comes from elsewhere; those blocks are held and not returned.
    grown = manager.allocate_slots("long", 0, num_external_computed_tokens=100)
    assert grown == KVCacheBlocks(((),))
    assert blocks(manager, "long") == [1, 2, 3, 4]
    assert manager.num_computed_tokens("long") == 8


def test_new_tokens_behind_external_ones_are_not_clipped(manager: KVCacheManager) -> None:
    with pytest.raises(BeyondModelLength) as caught:
        manager.allocate_slots("long", 1, num_external_computed_tokens=100)
    # The external tokens count as eight, the new one is the ninth.
    assert caught.value.fields == {"request": "long", "requested": 9, "max_model_len": 8}
    assert manager.allocate_slots("long", 1, num_external_computed_tokens=7)


@pytest.mark.seed("S000-02", "S000-26")
def test_external_tokens_lie_between_hits_and_new_ones(manager: KVCacheManager) -> None:
    serve(manager, "a", [0, 1, 90])
    step(manager)
    drop(manager, "a")
    # The queue is 3 to 9, 2, 1. Tokens 0 and 1 hit block 1, three external tokens need two blocks
    # (the second half full), the new one fits into that.
    hit = manager.get_computed_blocks("long")
    grown = manager.allocate_slots("long", 1, hit, num_external_computed_tokens=3)
    assert grown == KVCacheBlocks(((),))
    assert blocks(manager, "long") == [1, 3, 4]
    assert manager.num_computed_tokens("long") == 6


@pytest.mark.seed("S000-09", "S000-13")
def test_the_whole_sequence_is_judged_at_the_model_length(backend: Backend) -> None:
    # Four usable blocks hold the eight tokens that the model takes of the ten.
    manager = make(backend, 5, max_model_len=8)
    add(manager, "long", range(10))
    assert manager.allocate_slots("long", 2, full_sequence_must_fit=True)
    serve(manager, "other", [50])
    add(manager, "next", range(60, 70))
    assert manager.allocate_slots("next", 2, full_sequence_must_fit=True) == Refused(
        Reason.LATER, needed=4, available=2
    )


@pytest.mark.seed("S000-54", "S001-77")
def test_a_hit_is_never_longer_than_what_leaves_a_token_to_compute(
    manager: KVCacheManager,
) -> None:
    manager.allocate_slots("long", 8)
    step(manager)
    for count, found in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (8, 6)):
        add(manager, "next", range(count))
        assert manager.get_computed_blocks("next").num_tokens == found
        manager.remove_request("next")


def test_without_a_length_the_pool_is_the_only_limit(backend: Backend) -> None:
    manager = make(backend)
    add(manager, "long", range(18))
    manager.allocate_slots("long", 17, num_lookahead_tokens=1)
    assert manager.num_free_blocks == 0
