# SPDX-License-Identifier: Apache-2.0
"""The names that 0.8.5's V1 manager gives blocks in the core, and its handling of hash
conflicts.

Keys are made once a record, by the core's own hashing; both languages make the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.hashing.block_hash import hash_block
from kvcore.legacy.v1_0_8 import block_hashes
from kvcore.legacy.v1_0_8.block_hashes import BlockHashType, keys_of
from kvcore.legacy.v1_0_8.errors import TooLong
from kvcore.legacy.v1_0_8.kv_cache_utils import hash_request_tokens
from kvcore.types.errors import InvalidToken
from tests.conformance.legacy_utils.requests import EngineRequest
from tests.conformance.legacy_utils.stories import all_of, decode, free, ids, make, preempt, resume
from tests.conftest import Backend, need_twin

PROMPT = list(range(10, 21))

numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(2**255, 2**256 + 2))
tokens = st.lists(st.sampled_from([0, 1, 2**32 - 1, 2**32, -1, True]), max_size=4).map(tuple)


@given(number=numbers, own=tokens, extra=st.sampled_from([None, (), ("a",), (1, "a")]))
def test_both_languages_know_a_record_by_one_key(number: int, own: Any, extra: Any) -> None:
    need_twin()
    made = [keys_of([BlockHashType(number, own, extra)], name) for name in ("python", "rust")]
    assert made[0] == made[1]
    assert keys_of([(number, own, extra)]) == made[0], "a plain tuple"


def test_the_twin_hashes_one_block_as_the_core_does() -> None:
    need_twin()
    from kvcore import _twin

    for own in ((), (1,), tuple(range(16)), (2**32 - 1,) * 300):
        assert _twin.hash_block(b"p" * 32, own) == hash_block(b"p" * 32, own)
    with pytest.raises(InvalidToken):
        _twin.hash_block(b"p" * 32, (2**32,))


def test_a_key_is_made_once(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, request = make(backend), EngineRequest("0", PROMPT)
    manager.get_computed_blocks(request)
    monkeypatch.setattr(block_hashes, "content_key", None)
    assert ids(manager.allocate_slots(request, 11)) == [1, 2, 3]
    request.num_computed_tokens = 11
    preempt(manager, request)
    assert resume(manager, request) == [4]


def test_hashes_that_joined_the_list_by_hand_are_found(backend: Backend) -> None:
    manager, request = make(backend), EngineRequest("0", PROMPT)
    hashes: list[Any] = manager.req_to_block_hashes.setdefault("0", [])
    hashes += [tuple(each) for each in hash_request_tokens(hash, 4, request)]
    assert resume(manager, request) == [1, 2, 3]
    assert ids(manager.get_computed_blocks(EngineRequest("1", PROMPT))[0]) == [1, 2]
    assert manager.block_pool.blocks[1].block_hash == hashes[0]


def test_the_list_of_hashes_as_it_is_now_says_what_is_found_and_published(
    backend: Backend,
) -> None:
    manager, first, changed = make(backend), EngineRequest("0", PROMPT), EngineRequest("1", [9] * 9)
    resume(manager, first)
    assert manager.get_computed_blocks(changed) == ([], 0)
    changed.all_token_ids[:] = PROMPT[:9]
    manager.req_to_block_hashes["1"][:] = hash_request_tokens(hash, 4, changed)
    assert ids(manager.get_computed_blocks(changed)[0]) == [1, 2]
    assert resume(manager, changed) == [4]
    other = EngineRequest("2", [8] * 9)
    assert manager.get_computed_blocks(other) == ([], 0)
    manager.req_to_block_hashes["2"][:] = hash_request_tokens(hash, 4, EngineRequest("", [7] * 9))
    assert ids(manager.allocate_slots(other, 9)) == [5, 6, 7]
    assert manager.get_computed_blocks(EngineRequest("3", [8] * 9)) == ([], 0)
    assert ids(manager.get_computed_blocks(EngineRequest("4", [7] * 9))[0]) == [5, 6]


def test_a_block_that_was_hashed_by_hand_keeps_its_hash(backend: Backend) -> None:
    manager, request = make(backend), EngineRequest("0", PROMPT)
    resume(manager, request)
    last = manager.req_to_blocks["0"][2]
    last.block_hash = own = BlockHashType(7, (1, 2))
    assert decode(manager, request, 1, 2, 3, 4, 5) == [4]
    assert last.block_hash is own
    assert [block.block_hash is None for block in manager.req_to_blocks["0"]][3] is False
    assert manager.num_cached_block["0"] == len(manager.req_to_block_hashes["0"]) == 4
    manager.check()


def test_a_place_that_the_window_passed_before_it_was_published_has_no_hash(
    backend: Backend,
) -> None:
    manager = make(backend, window=1)
    request = EngineRequest("0", list(range(3)))
    resume(manager, request)
    request.all_token_ids += [3]
    request.spec_token_ids = [4, 5, 6, 7, 8]
    assert ids(manager.allocate_slots(request, 6)) == [2, 3]
    request.all_token_ids += [4, 5, 6, 7, 8]  # all were right
    request.num_computed_tokens, request.spec_token_ids = 9, []
    assert decode(manager, request, 9) == []
    null = manager.block_pool.null_block
    table = manager.req_to_blocks["0"]
    assert [block is null for block in table] == [True, True, False]
    assert null.block_hash is None
    assert (len(manager.req_to_block_hashes["0"]), manager.num_cached_block["0"]) == (2, 2)


def test_what_does_not_fit_is_none_whatever_else_is_wrong(backend: Backend) -> None:
    manager = make(backend, 4, max_model_len=8)
    request = EngineRequest("0", list(range(8)))
    resume(manager, request)
    before = all_of(manager)
    with pytest.raises(TooLong):
        manager.allocate_slots(request, 1)
    assert all_of(manager) == before
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=4) is None, "one is free"
    other = EngineRequest("1", [9] * 4)
    assert manager.allocate_slots(other, 8) is None, "of which it has four"
    assert all_of(manager) == before
    assert ids(manager.allocate_slots(other, 4, num_lookahead_tokens=0)) == [3]
    assert free(manager) == []
