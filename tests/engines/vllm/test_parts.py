# SPDX-License-Identifier: Apache-2.0
"""Hits inside blocks: the adapter's manager over kvcore, beside vLLM's where both do the same.

Blocks of four tokens, hashes of two. A prompt of seven tokens is kept at its last hash, six.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.vllm.environment import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from kvcore_vllm.short_ways import KVCacheManager
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager as VllmManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.request import Request

from tests.engines.vllm.both import STATE, make
from tests.engines.vllm.engine import FULL, make_config

pytestmark = pytest.mark.vllm
PROMPT = [0, 1, 2, 3, 4, 5, 6]
UNIT = 2
KINDS = (VllmManager, KVCacheManager)


def request(name: str, tokens: list[int]) -> Request:
    """Return a request with hashes of two tokens."""
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=9, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(UNIT, sha256, 0),
    )


def parted(kind: Any = KVCacheManager, **options: Any) -> Any:
    """Return a manager with attention and states in blocks of four tokens, and hashes of two."""
    register_all_kvcache_specs(make_config())
    return make(kind, FULL, STATE, hash_block_size=UNIT, **options)


def step(manager: Any, request: Any, count: int, hit: Any = None, num_hit: int = 0) -> Any:
    """Schedule tokens in a step of their own. Returns what the rows grow by, and the copies."""
    manager.new_step_starts()
    got = manager.allocate_slots(request, count, num_hit, hit)
    if got is None:
        return None, []
    copies, retained = manager.take_kv_cache_block_copies()
    manager.block_pool.free_blocks(retained)
    manager.take_new_block_ids()
    request.num_computed_tokens += num_hit + count
    return got.get_block_ids(), [tuple(each) for each in copies]


def compute_prompt(manager: Any, name: str = "owner") -> Any:
    """Compute a prompt to its last hash in a step of its own. Returns its request."""
    made = request(name, PROMPT)
    step(manager, made, 6)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_ends_at_the_last_hash_of_a_prompt(kind: Any) -> None:
    manager = parted(kind)
    owner = compute_prompt(manager)
    manager.free(owner)
    other = request("other", [*PROMPT[:6], 90, 91])
    hit, num_hit, junction = manager.get_computed_blocks(other)
    assert (num_hit, junction) == (6, 0)
    assert [len(ids) for ids in hit.get_block_ids()] == [2, 2]
    tails = [ids[-1] for ids in hit.get_block_ids()]
    grown, copies = step(manager, other, 2, hit, 6)
    assert [len(ids) for ids in grown] == [1, 1]
    assert copies == [(tails[0], grown[0][0]), (tails[1], grown[1][0])]
    # The next request finds it where it was.
    again = manager.get_computed_blocks(request("again", [*PROMPT[:6], 92, 93]))
    assert [ids[-1] for ids in again[0].get_block_ids()] == tails


@pytest.mark.parametrize("kind", KINDS)
def test_a_running_request_keeps_its_row_and_what_is_cached_moves(kind: Any) -> None:
    manager = parted(kind)
    owner = compute_prompt(manager)
    rows = manager.get_block_ids("owner")
    grown, ((source, target),) = step(manager, owner, 1)
    assert grown == ([], [])
    assert manager.get_block_ids("owner") == rows
    assert source == rows[1][1]
    hit, num_hit, _ = manager.get_computed_blocks(request("other", [*PROMPT[:6], 90, 91]))
    assert num_hit == 6
    assert hit.get_block_ids()[1][-1] == target


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_copy_of_the_step_fills_is_found_in_the_next_step(kind: Any) -> None:
    manager = parted(kind)
    owner = compute_prompt(manager)
    other = request("other", [*PROMPT[:6], 90, 91])
    manager.new_step_starts()
    manager.allocate_slots(owner, 1)
    hit, num_hit, _ = manager.get_computed_blocks(other)
    assert num_hit == 6
    assert manager.allocate_slots(other, 2, num_hit, hit) is None
    manager.take_new_block_ids()
    hit, num_hit, _ = manager.get_computed_blocks(other)
    assert step(manager, other, 2, hit, num_hit)[0] is not None


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_block_of_an_answer_is_used_first(kind: Any) -> None:
    manager = parted(kind)
    owner = compute_prompt(manager)
    for token in range(4):
        step(manager, owner, 1)
        owner.append_output_token_ids(token)
    last = manager.get_block_ids("owner")[0][-1]
    assert len(manager.get_block_ids("owner")[0]) == 3
    manager.free(owner)
    assert not any(each.block_hash for each in manager.block_pool.blocks if each.block_id == last)


def test_every_part_of_a_block_is_found() -> None:
    """vLLM finds no part but the one that a prompt ends in."""
    found = []
    for kind in KINDS:
        manager = parted(kind)
        step(manager, made := request("owner", list(range(14))), 12)
        manager.free(made)
        other = request("other", [*range(6), 90, 91, 92])
        found.append(manager.get_computed_blocks(other)[2])
    assert found == [4, 6]


def test_a_pool_without_room_for_the_copies_is_no_reason_to_refuse() -> None:
    """vLLM refuses, so that a request has to give way."""
    answers = []
    for kind in KINDS:
        manager = parted(kind, num_blocks=4, max_model_len=8)
        owner = compute_prompt(manager)  # two blocks of attention and a state
        answers.append(step(manager, owner, 1)[0])
    assert answers == [None, ([], [])]


def test_a_moved_block_is_freed_and_evicted_by_its_number() -> None:
    manager = parted()
    owner = compute_prompt(manager)
    _, ((source, target),) = step(manager, owner, 1)
    blocks = manager.block_pool.blocks
    assert (blocks[source].block_hash, blocks[source].ref_cnt) == (None, 1)
    assert (blocks[target].block_hash_num_tokens, blocks[target].ref_cnt) == (6, 0)
    assert manager.estimate_cached_tokens(owner) == 0  # its state is a block later
    manager.evict_blocks({target})
    assert blocks[target].block_hash is None
    manager.block_pool.free_blocks(manager.pop_blocks_for_free(owner))
    assert blocks[source].ref_cnt == 0
    assert manager.usage == 0
    manager.compat.core.check()
