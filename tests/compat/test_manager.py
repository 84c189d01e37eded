# SPDX-License-Identifier: Apache-2.0
"""Look-ups and allocations of `kvcore.compat`: arguments, results, identities, misuse.

Nine usable blocks of two tokens unless a test says otherwise.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvcore import Config, Group, KvcoreError, Reason, Refused
from kvcore import KVCacheManager as Core
from kvcore.compat import KVCacheBlocks, KVCacheManager, make_config
from kvcore.types.errors import (
    BeyondComputed,
    CachingDisabled,
    EmptyTokens,
    InvalidConfig,
    InvalidCount,
    WrongArgument,
    WrongHit,
)
from tests.compat.stories import admit, finish, make
from tests.compat.worker import EngineRequest
from tests.conftest import Backend


@pytest.fixture
def manager(backend: Backend) -> KVCacheManager:
    """Make a manager with one group."""
    return make(backend)


@pytest.mark.seed("S000-01")
def test_allocate_slots_takes_its_arguments_in_the_order_that_vllm_gives_them() -> None:
    parameters = list(inspect.signature(KVCacheManager.allocate_slots).parameters.values())
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == [
        *("self", "request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"),
        *("num_lookahead_tokens", "num_external_computed_tokens", "delay_cache_blocks"),
        *("num_encoder_tokens", "full_sequence_must_fit"),
    ]
    assert [each.default for each in parameters[3:10]] == [0, None, 0, 0, False, 0, False]


@pytest.mark.seed("S000-01", "S000-18")
def test_what_does_not_fit_is_none_and_the_reason_is_kept(manager: KVCacheManager) -> None:
    held, _ = admit(manager, "held", list(range(12)))
    late = EngineRequest("late", list(range(50, 58)))
    assert manager.allocate_slots(late, 8) is None
    assert manager.last_refusal == Refused(Reason.LATER, needed=4, available=3)
    assert manager.allocate_slots(late, 6) is not None
    assert manager.last_refusal is None
    assert manager.allocate_slots(EngineRequest("huge", list(range(30))), 30) is None
    assert manager.last_refusal == Refused(Reason.NEVER, needed=15, available=0)
    manager.free(held)
    assert manager.allocate_slots(EngineRequest("next", list(range(50, 62))), 12) is not None


@pytest.mark.seed("S000-09", "S000-10")
def test_the_gate_of_the_whole_sequence_refuses_a_first_chunk(manager: KVCacheManager) -> None:
    long = EngineRequest("long", list(range(20)))
    assert manager.allocate_slots(long, 2, full_sequence_must_fit=True) is None
    assert manager.usage == 0.0
    assert manager.allocate_slots(long, 2) is not None
    other = EngineRequest("other", [7, 8])
    assert manager.allocate_slots(other, 2, reserved_blocks=8) is None
    assert manager.allocate_slots(other, 2, reserved_blocks=7) is not None


@pytest.mark.seed("S000-05", "S000-33", "S000-48", "S000-52")
def test_no_blocks_are_one_and_the_same_object(manager: KVCacheManager) -> None:
    empty = manager.empty_kv_cache_blocks
    assert empty.blocks == ((),)
    request = EngineRequest("r", [1, 2, 3])
    assert manager.get_computed_blocks(request) == (empty, 0)
    assert manager.get_computed_blocks(request)[0] is empty
    assert manager.get_blocks("r") is empty
    assert manager.get_blocks("nobody") is empty
    assert manager.get_block_ids("nobody") == ([],)
    assert manager.create_kv_cache_blocks([[]]) is empty
    assert manager.create_kv_cache_blocks([[3]]) is not empty
    grown = manager.allocate_slots(request, 3, 0, None)
    assert grown is not None
    assert grown.blocks == ((1, 2),)
    request.num_computed_tokens = 3
    request.output.append(4)
    manager.new_step_starts()
    # The fourth token goes into the second block, which the request has.
    assert manager.allocate_slots(request, 1) is empty


@pytest.mark.seed("S000-22", "S000-06", "S000-08")
def test_hits_are_attached_where_they_are_given_and_are_not_returned_as_new(
    manager: KVCacheManager,
) -> None:
    first, table = admit(manager, "first", [1, 2, 3, 4, 5])
    finish(manager, first)
    again = EngineRequest("again", [1, 2, 3, 4, 9])
    blocks, num_hit = manager.get_computed_blocks(again)
    assert (blocks.blocks, num_hit) == ((tuple(table[0][:2]),), 4)
    grown = manager.allocate_slots(again, 1, num_hit, blocks)
    assert grown is not None
    assert [*blocks.blocks[0], *grown.blocks[0]] == manager.get_block_ids("again")[0]
    # Another with the same prompt declines its hits: the empty object is no hit.
    other = EngineRequest("other", [1, 2, 3, 4, 9])
    fresh = manager.allocate_slots(other, 5, 0, manager.empty_kv_cache_blocks)
    assert fresh is not None
    assert len(fresh.blocks[0]) == 3
    assert not set(fresh.blocks[0]) & set(blocks.blocks[0])


@pytest.mark.seed("X-06", "S000-54")
def test_a_full_hit_leaves_a_token_to_compute(manager: KVCacheManager) -> None:
    first, _ = admit(manager, "first", [1, 2, 3, 4])
    finish(manager, first)
    assert manager.get_computed_blocks(EngineRequest("again", [1, 2, 3, 4]))[1] == 2
    declines = EngineRequest("declines", [1, 2, 3, 4])
    declines.skip_reading_prefix_cache = True  # type: ignore[attr-defined] # duck typed
    assert manager.get_computed_blocks(declines) == (manager.empty_kv_cache_blocks, 0)


@pytest.mark.seed("S000-37", "S000-38")
def test_tail_blocks_are_freed_first_and_freeing_again_does_nothing(
    manager: KVCacheManager,
) -> None:
    request, table = admit(manager, "r", list(range(6)))
    manager.free(EngineRequest("nobody", [1]))
    manager.free(request)
    before = manager.core.encode()
    manager.free(request)
    assert manager.core.encode() == before
    everything = manager.allocate_slots(EngineRequest("all", list(range(50, 68))), 18)
    assert everything is not None
    assert list(everything.blocks[0][-3:]) == table[0][::-1]


@pytest.mark.seed("S000-04", "S000-26", "S000-29", "S000-49")
def test_external_blocks_are_held_and_are_findable_when_they_are_cached(
    manager: KVCacheManager,
) -> None:
    request = EngineRequest("r", [1, 2, 3, 4, 5, 6])
    got = manager.allocate_slots(
        request, 0, num_external_computed_tokens=4, delay_cache_blocks=True
    )
    assert got is manager.empty_kv_cache_blocks
    assert len(manager.get_block_ids("r")[0]) == 2
    request.num_computed_tokens = 4
    manager.new_step_starts()
    twin = EngineRequest("twin", [1, 2, 3, 4, 5, 7])
    assert manager.get_computed_blocks(twin)[1] == 0
    manager.cache_blocks(request, 4)
    assert manager.get_computed_blocks(twin)[1] == 4


@pytest.mark.seed("X-06")
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5])
def test_a_request_that_external_tokens_fill_computes_its_last_one(
    manager: KVCacheManager, num_tokens: int
) -> None:
    request = EngineRequest("r", list(range(num_tokens)))
    got = manager.allocate_slots(
        request, 0, num_external_computed_tokens=num_tokens, delay_cache_blocks=True
    )
    assert got is manager.empty_kv_cache_blocks
    table = manager.get_block_ids("r")
    assert len(table[0]) == (num_tokens + 1) // 2
    manager.new_step_starts()
    request.num_computed_tokens = num_tokens
    manager.cache_blocks(request, num_tokens)
    request.num_computed_tokens -= 1
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    request.num_computed_tokens += 1
    assert manager.get_block_ids("r") == table
    manager.new_step_starts()
    longer = EngineRequest("longer", [*range(num_tokens), 8])
    assert manager.get_computed_blocks(longer)[1] == num_tokens // 2 * 2


def wrong_calls(manager: KVCacheManager, request: EngineRequest) -> dict[str, tuple[Any, ...]]:
    """List wrong arguments of `allocate_slots`, with the errors that they raise."""
    foreign = KVCacheBlocks(((5,),), manager.core.has_key)
    return {
        "nothing new": (InvalidCount, request, 0),
        "a negative count": (InvalidCount, request, -1),
        "no count": (InvalidCount, request, "two"),
        "tokens without blocks": (WrongHit, request, 1, 2, manager.empty_kv_cache_blocks),
        "blocks of another kind": (WrongArgument, request, 1, 2, ((5,),)),
        "blocks that hold nothing": (KvcoreError, request, 1, 2, foreign),
        "no request": (WrongArgument, "r", 1),
        "a request without tokens": (EmptyTokens, EngineRequest("none", []), 1),
        "more external tokens than tokens": (KvcoreError, request, 1, 0, None, 0, 9),
    }


@pytest.mark.seed("S000-04", "X-14")
def test_misuse_is_typed_and_allocates_nothing(manager: KVCacheManager) -> None:
    request = EngineRequest("r", [1, 2, 3])
    for name, (error, *arguments) in wrong_calls(manager, request).items():
        with pytest.raises(error):
            manager.allocate_slots(*arguments)
        assert manager.usage == 0.0, name
        assert manager.take_events() == []
    assert manager.allocate_slots(request, 3) is not None


def test_a_request_that_comes_with_a_count_was_computed_elsewhere(backend: Backend) -> None:
    manager = make(backend)
    request = EngineRequest("r", [1, 2, 3, 4, 5], num_computed_tokens=4)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1, full_sequence_must_fit=True) is not None
    assert [len(table) for table in manager.get_block_ids("r")] == [3]
    request.num_computed_tokens = 5
    assert manager.get_computed_blocks(EngineRequest("other", [1, 2, 3, 4, 5]))[1] == 4
    request.num_computed_tokens = 6
    with pytest.raises(BeyondComputed, match="has 5 computed tokens: the call names 6"):
        manager.allocate_slots(request, 1)
    request.num_computed_tokens = 5
    request.output.append(6)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks


@pytest.mark.seed("S000-25")
def test_without_caching_there_are_no_hits(backend: Backend) -> None:
    manager = make(backend, enable_caching=False)
    first, table = admit(manager, "first", [1, 2, 3, 4])
    manager.cache_blocks(first, 4)
    finish(manager, first)
    again = EngineRequest("again", [1, 2, 3, 4, 5])
    assert manager.get_computed_blocks(again) == (manager.empty_kv_cache_blocks, 0)
    with pytest.raises(CachingDisabled):
        manager.allocate_slots(again, 1, 4, manager.create_kv_cache_blocks(table))


def test_merged_duplicates_need_the_commands(backend: Backend) -> None:
    with pytest.raises(InvalidConfig, match="commands"):
        make(backend, duplicates="merge")
    manager = make(backend, duplicates="merge", keep_commands=True)
    assert isinstance(manager.core, Core)
    assert "9 of 9 blocks free" in repr(manager)


STATES = (Group(2), Group(2, kind="state"))


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"groups": STATES}, "groups=.*state.* with state groups blocks are copied"),
        ({"hash_block_size": 1}, "hash_block_size=1.* with hits that end inside blocks"),
        ({"groups": STATES, "hash_block_size": 1}, "hash_block_size=1.* with hits that end inside"),
    ],
)
def test_tables_in_which_blocks_are_replaced_need_the_commands_or_to_be_read_again(
    backend: Backend, changes: dict[str, Any], reported: str
) -> None:
    with pytest.raises(InvalidConfig, match=reported):
        make(backend, **changes)
    for choice in ("keep_commands", "reads_tables"):
        assert isinstance(make(backend, **changes, **{choice: True}).core, Core)
    with pytest.raises(InvalidConfig, match="commands must be kept and applied"):
        make(backend, **changes, duplicates="merge", reads_tables=True)


def test_hashes_of_whole_blocks_need_neither(backend: Backend) -> None:
    assert isinstance(make(backend, hash_block_size=2).core, Core)
    assert isinstance(make(backend, hash_block_size=1, enable_caching=False).core, Core)


def test_what_allocate_slots_returns_does_not_tell_where_a_state_lies(backend: Backend) -> None:
    manager = make(backend, groups=STATES, reads_tables=True)
    request = EngineRequest("r", list(range(6)))
    assert manager.allocate_slots(request, 2) is not None
    followed = manager.get_block_ids("r")
    request.num_computed_tokens = 2
    got = manager.allocate_slots(request, 4)
    assert got is not None
    for table, new in zip(followed, got.get_block_ids(), strict=True):
        table += new
    full, states = manager.get_block_ids("r")
    assert followed[0] == full
    assert [each != 0 for each in states] == [True, False, True]
    assert followed[1] == [each for each in states if each]


def test_a_pool_that_is_too_small_for_the_longest_request_is_taken_with_a_warning(
    backend: Backend,
) -> None:
    reported = "requests of full length will not fit: .*max_model_len=40 tokens needs 20 blocks"
    with pytest.warns(RuntimeWarning, match=reported):
        config = make_config(10, 2, max_model_len=40)
    assert config.max_model_len is None
    manager = KVCacheManager(config, backend=backend)
    assert manager.allocate_slots(EngineRequest("fits", list(range(18))), 18) is not None
    assert manager.allocate_slots(EngineRequest("long", list(range(40))), 40) is None
    assert manager.last_refusal == Refused(Reason.NEVER, needed=20, available=0)


def test_a_pool_that_is_large_enough_keeps_the_limit_and_other_faults_are_errors() -> None:
    assert make_config(21, 2, max_model_len=40) == Config(
        21, 2, max_model_len=40, max_num_batched_tokens=40
    )
    with pytest.raises(InvalidConfig, match="max_in_flight"):
        make_config(10, 2, max_model_len=40, max_in_flight=-1)
