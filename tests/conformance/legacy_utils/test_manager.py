# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.8.5's V1 manager: hits, slots, hashes, refusals, statistics, on a pool of ten blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.v1_0_8.block_hashes import sha256
from kvcore.legacy.v1_0_8.errors import HitsWithoutCaching, NotRunningRequest, TooLong
from kvcore.legacy.v1_0_8.kv_cache_utils import hash_block_tokens, hash_request_tokens
from kvcore.types.errors import InvalidCount, KvcoreError
from kvcore.types.values import PrefixCacheStats
from tests.conformance.legacy_utils.requests import (
    EngineRequest,
    Lora,
    RequestStatus,
    SamplingParams,
    Span,
)
from tests.conformance.legacy_utils.stories import (
    admit,
    all_of,
    decode,
    finish,
    free,
    ids,
    make,
    preempt,
    resume,
    table,
)
from tests.conftest import Backend

PROMPT = list(range(10, 21))  # 11 tokens: two full blocks and a tail


@pytest.mark.seed("S001-71", "S001-44")
@pytest.mark.parametrize("algo", ["builtin", "sha256"])
def test_a_prompt_gets_its_blocks_and_full_ones_their_hashes(backend: Backend, algo: Any) -> None:
    manager = make(backend, caching_hash_algo=algo)
    request = EngineRequest("0", PROMPT)
    assert manager.get_computed_blocks(request) == ([], 0)
    assert len(manager.req_to_block_hashes["0"]) == 2
    assert ids(manager.allocate_slots(request, 11)) == [1, 2, 3]
    parent = None
    for place in range(2):
        tokens = PROMPT[4 * place : 4 * place + 4]
        function = sha256 if algo == "sha256" else hash
        expected = hash_block_tokens(function, parent, tokens)
        block = manager.block_pool.blocks[place + 1]
        assert (block.block_hash, block.ref_cnt) == (expected, 1)
        parent = expected.hash_value
    assert manager.block_pool.blocks[3].block_hash is None
    assert manager.block_pool.blocks[3].ref_cnt == 1


@pytest.mark.seed("S001-71")
@pytest.mark.parametrize("num_tokens", [0, -1])
def test_nothing_to_allocate_is_an_error(backend: Backend, num_tokens: int) -> None:
    manager = make(backend)
    before = all_of(manager)
    with pytest.raises(InvalidCount, match="num_tokens") as caught:
        manager.allocate_slots(EngineRequest("0", PROMPT), num_tokens)
    assert isinstance(caught.value, ValueError)
    assert all_of(manager) == before


@pytest.mark.seed("S001-71")
def test_what_does_not_fit_is_none_and_touches_nothing(backend: Backend) -> None:
    manager = make(backend, 5)
    admit(manager, "0", range(12))
    late = EngineRequest("1", list(range(12)))
    hits, num_hit = manager.get_computed_blocks(late)
    before = all_of(manager)
    assert manager.allocate_slots(late, 8, hits, num_lookahead_tokens=4) is None
    assert all_of(manager) == before
    assert "1" not in manager.req_to_blocks
    assert (ids(manager.allocate_slots(late, 12 - num_hit, hits)), num_hit) == ([4], 8)


@pytest.mark.seed("S001-71")
def test_lookahead_gets_slots_and_a_table_grows_by_what_it_lacks(backend: Backend) -> None:
    manager = make(backend)
    request = EngineRequest("0", PROMPT)
    assert ids(manager.allocate_slots(request, 11, num_lookahead_tokens=6)) == [1, 2, 3, 4, 5]
    request.num_computed_tokens = 11
    assert decode(manager, request, 1, 2) == []
    blocks = manager.req_to_blocks["0"]
    assert decode(manager, request, *range(7)) == []
    assert decode(manager, request, 9) == [6]
    assert ids(blocks) == [1, 2, 3, 4, 5, 6]  # the list that was handed out before grew
    assert blocks is manager.req_to_blocks["0"]


@pytest.mark.seed("S001-72")
def test_hits_in_the_queue_do_not_count_as_free(backend: Backend) -> None:
    manager = make(backend, 6)
    finish(manager, admit(manager, "0", range(13)))
    assert free(manager) == [5, 4, 3, 2, 1]
    running = admit(manager, "1", [99])
    late = EngineRequest("2", list(range(13)))
    hits, _ = manager.get_computed_blocks(late)
    assert (ids(hits), free(manager)) == ([1, 2, 3], [4, 3, 2, 1])
    before = all_of(manager)
    # One block is free besides the hits, two are asked for.
    assert manager.allocate_slots(late, 1, hits, num_lookahead_tokens=4) is None
    assert all_of(manager) == before
    assert ids(manager.allocate_slots(late, 1, hits)) == [4]
    assert table(manager, running) == [5]


@pytest.mark.seed("S001-73")
def test_no_block_is_taken_past_the_model_s_length(backend: Backend) -> None:
    manager = make(backend, max_model_len=11)
    request = EngineRequest("0", PROMPT)
    assert ids(manager.allocate_slots(request, 11, num_lookahead_tokens=20)) == [1, 2, 3]
    request.num_computed_tokens = 11
    before = all_of(manager)
    text = r"request '0' has 3 blocks with its hits and needs 1 more: max_model_len=11 allows 3"
    with pytest.raises(TooLong, match=text) as caught:
        manager.allocate_slots(request, 2)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, KvcoreError)
    assert all_of(manager) == before


@pytest.mark.seed("S001-74")
def test_a_block_with_a_draft_is_not_full(backend: Backend) -> None:
    manager = make(backend)
    request = admit(manager, "0", range(6))
    request.all_token_ids += [6]
    request.spec_token_ids = [7, 8]
    assert ids(manager.allocate_slots(request, 3)) == [3]  # tokens 6, 7 and 8
    assert [block.block_hash is None for block in manager.req_to_blocks["0"]] == [False, True, True]
    assert len(manager.req_to_block_hashes["0"]) == 1
    request.num_computed_tokens, request.spec_token_ids = 7, []
    assert decode(manager, request, 7) == []
    assert manager.block_pool.blocks[2].block_hash is not None
    manager.check()


@pytest.mark.seed("S001-74")
def test_drafts_that_are_rejected_lose_no_hash(backend: Backend) -> None:
    manager = make(backend)
    request = admit(manager, "0", range(8))
    request.spec_token_ids = [1] * 5
    assert ids(manager.allocate_slots(request, 1)) == [3]  # counts back to the first block
    request.spec_token_ids = []
    assert decode(manager, request, 8, 9, 10, 11) == []
    hashed = [block.block_hash for block in manager.req_to_blocks["0"]]
    assert hashed == manager.req_to_block_hashes["0"]
    assert len(hashed) == 3


@pytest.mark.seed("S001-75")
def test_a_list_of_hashes_grows_and_outlives_a_preemption(backend: Backend) -> None:
    manager = make(backend)
    request = EngineRequest("0", PROMPT)
    manager.get_computed_blocks(request)
    hashes = manager.req_to_block_hashes["0"]
    assert len(hashes) == 2
    resume(manager, request)
    decode(manager, request, 77)
    assert len(hashes) == 3
    assert hashes == hash_request_tokens(hash, 4, request)
    assert manager.block_pool.blocks[3].block_hash is hashes[2]
    preempt(manager, request)
    assert manager.req_to_block_hashes["0"] is hashes
    request.all_token_ids.append(78)
    requested: list[object] = []

    def remember(value: object) -> int:
        requested.append(value)
        return hash(value)

    manager.caching_hash_fn = remember
    assert resume(manager, request) == [4]
    assert (table(manager, request), requested) == ([1, 2, 3, 4], [])  # nothing is hashed twice
    finish(manager, request)
    assert "0" not in manager.req_to_block_hashes
    assert manager.req_to_block_hashes["0"] == []


@pytest.mark.seed("S001-75", "S001-43")
def test_hashes_of_a_request_that_was_never_looked_up_have_all_their_media(
    backend: Backend,
) -> None:
    manager = make(backend)
    media: dict[str, Any] = {
        "mm_positions": [Span(0, 3), Span(5, 2)],
        "mm_hashes": ["a", "b"],
        "lora_request": Lora(3),
    }
    request = EngineRequest("0", list(range(8)), **media)
    manager.allocate_slots(request, 8)
    assert [each.extra_keys for each in manager.req_to_block_hashes["0"]] == [(3, "a"), (3, "b")]
    assert manager.req_to_block_hashes["0"] == hash_request_tokens(hash, 4, request)
    other = EngineRequest("1", list(range(9)), **{**media, "mm_hashes": ["c", "b"]})
    assert manager.get_computed_blocks(other) == ([], 0)
    same = EngineRequest("2", list(range(9)), **media)
    assert ids(manager.get_computed_blocks(same)[0]) == [1, 2]


@pytest.mark.seed("S001-76")
def test_who_wants_log_probabilities_of_the_prompt_never_hits_but_is_cached(
    backend: Backend,
) -> None:
    manager = make(backend, log_stats=True)
    needs: dict[str, Any] = {"sampling_params": SamplingParams(prompt_logprobs=5)}
    first = admit(manager, "0", PROMPT, **needs)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1)
    again = EngineRequest("1", PROMPT, **needs)
    assert manager.get_computed_blocks(again) == ([], 0)
    other = EngineRequest("2", PROMPT)
    assert ids(manager.get_computed_blocks(other)[0]) == table(manager, first)[:2]
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=2, queries=2, hits=2)


@pytest.mark.seed("S001-77")
def test_a_full_hit_leaves_its_last_block_and_queries_leave_it_out(backend: Backend) -> None:
    manager = make(backend, log_stats=True)
    admit(manager, "0", range(12))
    manager.make_prefix_cache_stats()
    request = EngineRequest("1", list(range(12)))
    blocks, num_hit = manager.get_computed_blocks(request)
    assert (ids(blocks), num_hit) == ([1, 2], 8)
    assert len(manager.req_to_block_hashes["1"]) == 3  # the last hash was put back
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=2, hits=2)
    assert ids(manager.allocate_slots(request, 4, blocks)) == [4]
    request.num_computed_tokens = 12
    assert decode(manager, request, 12) == [5]


@pytest.mark.seed("S001-78", "S001-77")
def test_eagle_drops_the_last_hit_block(backend: Backend) -> None:
    manager = make(backend, use_eagle=True, log_stats=True)
    admit(manager, "0", range(12))
    manager.make_prefix_cache_stats()
    # Three identical full blocks give one hit: the full-hit rule first, then eagle's.
    assert ids(manager.get_computed_blocks(EngineRequest("1", list(range(12))))[0]) == [1]
    assert manager.make_prefix_cache_stats() == PrefixCacheStats(requests=1, queries=2, hits=1)
    assert ids(manager.get_computed_blocks(EngineRequest("2", list(range(13))))[0]) == [1, 2]
    assert manager.get_computed_blocks(EngineRequest("3", [0, 1, 2, 3, 9])) == ([], 0)


@pytest.mark.seed("S001-84")
def test_usage_reset_and_statistics(backend: Backend) -> None:
    manager = make(backend, log_stats=True)
    assert manager.usage == pytest.approx(1 / 11)  # the null block
    request = admit(manager, "0", PROMPT)
    assert manager.usage == pytest.approx(4 / 11)
    before = all_of(manager)
    assert manager.reset_prefix_cache() is False
    assert all_of(manager) == before
    finish(manager, request)
    assert manager.reset_prefix_cache() is True
    assert all(block.block_hash is None for block in manager.block_pool.blocks)
    assert manager.get_computed_blocks(EngineRequest("1", PROMPT)) == ([], 0)
    stats = manager.make_prefix_cache_stats()
    assert stats == PrefixCacheStats(requests=2, queries=4, reset=True)
    assert manager.make_prefix_cache_stats() == PrefixCacheStats()
    silent = make(backend)
    admit(silent, "0", PROMPT)
    assert silent.make_prefix_cache_stats() is None
    assert silent.prefix_cache_stats is None


@pytest.mark.seed("S001-85")
def test_the_common_prefix_is_what_so_many_own(backend: Backend) -> None:
    manager = make(backend)
    requests = [admit(manager, str(number), PROMPT) for number in range(3)]
    assert [manager.get_num_common_prefix_blocks(each, 3) for each in requests] == [2, 2, 2]
    assert manager.get_num_common_prefix_blocks(requests[0], 1) == 0
    finish(manager, requests.pop())
    assert manager.get_num_common_prefix_blocks(requests[0], 3) == 0
    assert manager.get_num_common_prefix_blocks(requests[0], 2) == 2
    requests[0].status = RequestStatus.WAITING
    with pytest.raises(NotRunningRequest, match="request '0'") as caught:
        manager.get_num_common_prefix_blocks(requests[0], 2)
    assert isinstance(caught.value, AssertionError)


@pytest.mark.seed("S001-72", "X-04")
def test_without_caching_nothing_is_hashed_and_tails_are_freed_first(backend: Backend) -> None:
    manager = make(backend, 6, enable_caching=False)
    request = EngineRequest("0", PROMPT)
    assert manager.get_computed_blocks(request) == ([], 0)
    assert ids(manager.allocate_slots(request, 11)) == [1, 2, 3]
    assert all(block.block_hash is None for block in manager.block_pool.blocks)
    assert manager.allocate_slots(EngineRequest("1", PROMPT), 11) is None
    manager.free(request)
    assert free(manager) == [4, 5, 3, 2, 1]
    before = all_of(manager)
    with pytest.raises(HitsWithoutCaching) as caught:
        manager.allocate_slots(request, 3, manager.block_pool.blocks[1:3])
    assert isinstance(caught.value, AssertionError)
    assert all_of(manager) == before
