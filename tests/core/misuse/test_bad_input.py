# SPDX-License-Identifier: Apache-2.0
"""Bad input, as a table over all transitions: a typed error, and the state is as it was.

The rows are in the `bad_*.py` beside this file. Each runs on both backends against one expected
error, so type, fields and message are the same in both languages. One test per call runs its rows
as subtests: a row that fails is reported by its error and its call.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvcore import KVCacheManager
from kvcore.codec.encode import encode
from kvcore.transitions import TRANSITIONS, queries
from kvcore.types import errors
from kvcore.types.errors import KvcoreError, UnknownRequest
from tests.conftest import Backend
from tests.core.misuse import (
    bad_allocations,
    bad_batches,
    bad_blocks,
    bad_drafts,
    bad_epochs,
    bad_operations,
    bad_output,
    bad_pins,
    bad_requests,
    bad_retention,
    bad_states,
    bad_tails,
)
from tests.helpers.misuse import check_error, rows_by_call
from tests.helpers.stories import unchanged

ROWS = [
    *(*bad_requests.ROWS, *bad_allocations.ROWS, *bad_blocks.ROWS),
    *(*bad_drafts.ROWS, *bad_operations.ROWS, *bad_batches.ROWS),
    *(*bad_output.ROWS, *bad_epochs.ROWS, *bad_retention.ROWS),
    *(*bad_pins.ROWS, *bad_states.ROWS, *bad_tails.ROWS),
]
BY_CALL = rows_by_call(ROWS)
# These take no argument that could be wrong.
WITHOUT_ARGUMENTS = {
    *("reset_prefix_cache", "take_events", "take_stats", "take_new_block_ids"),
}
# These are raised by calls that are no transitions: see test_bad_configs.py, test_too_large.py,
# test_bad_releases.py, test_threads.py, tests/policies, tests/bytes and test_damaged_batches.py; a
# TraceError is that of the trace reader.
ELSEWHERE = {
    "InvalidConfig",
    "GroupsDoNotFit",
    "PoolTooLarge",
    "ConcurrentCall",
    "DamagedState",
    "DamagedBatch",
    "BackendMissing",
    "PolicyFailed",
    "TraceError",
    "WrongArgument",
    "InvalidRetention",
}
# These are raised by calls of the pool layer alone: see tests/legacy/blocks/test_bad_tiers.py.
POOL_LAYER = {
    *("AlreadyPublished", "DoubleFree", "InvalidKey", "WrongKey"),
    "NoOwner",
}


@pytest.mark.seed("X-14")
@pytest.mark.parametrize("name", BY_CALL)
def test_a_wrong_call_raises_a_typed_error_and_changes_nothing(
    name: str, backend: Backend, subtests: pytest.Subtests
) -> None:
    for row in BY_CALL[name]:
        with subtests.test(str(row)):
            manager = row.world(backend)
            with unchanged(manager), pytest.raises(KvcoreError) as caught:
                getattr(manager, name)(*row.call.args, **row.call.options)
            check_error(caught.value, row.error)
            manager.check()


@pytest.mark.parametrize("name", BY_CALL)
def test_a_wrong_call_of_a_pure_function_leaves_its_state_alone(
    name: str, subtests: pytest.Subtests
) -> None:
    for row in BY_CALL[name]:
        with subtests.test(str(row)):
            state = row.world("python").state()
            before = encode(state)
            with pytest.raises(KvcoreError) as caught:
                TRANSITIONS[name](state, *row.call.args, **row.call.options)
            check_error(caught.value, row.error)
            assert encode(state) == before


def test_can_allocate_refuses_the_wrong_allocations_alike(
    backend: Backend, subtests: pytest.Subtests
) -> None:
    for row in BY_CALL["allocate_slots"]:
        with subtests.test(str(row)):
            manager = row.world(backend)
            with unchanged(manager), pytest.raises(KvcoreError) as caught:
                manager.can_allocate(*row.call.args, **row.call.options)
            check_error(caught.value, row.error)


@pytest.mark.seed("S000-45", "S000-48")
@pytest.mark.parametrize("request_id", ["nobody", "", 7, None])
def test_a_query_about_an_unknown_request_is_misuse(request_id: Any, backend: Backend) -> None:
    # S000-45: the original answers and inserts an empty entry, which changes its later answers.
    for query in (
        *(KVCacheManager.get_computed_blocks, KVCacheManager.get_blocks),
        *(KVCacheManager.get_block_ids, KVCacheManager.get_num_common_prefix_blocks),
        *(KVCacheManager.num_tokens, KVCacheManager.num_computed_tokens),
        *(KVCacheManager.get_row, KVCacheManager.status),
        *(KVCacheManager.num_draft_tokens, KVCacheManager.get_block_keys),
    ):
        manager = bad_requests.crowd(backend)
        with unchanged(manager), pytest.raises(UnknownRequest) as caught:
            query(manager, request_id)
        check_error(caught.value, UnknownRequest(request=request_id))


def test_a_pure_query_about_an_unknown_request_is_misuse() -> None:
    state = bad_requests.crowd("python").state()
    for query in (
        queries.get_computed_blocks,
        queries.get_blocks,
        queries.get_num_common_prefix_blocks,
        queries.get_block_keys,
    ):
        with pytest.raises(UnknownRequest, match="'nobody'"):
            query(state, "nobody")


def test_every_transition_that_takes_arguments_has_rows() -> None:
    assert {row.call.name for row in ROWS} == set(TRANSITIONS) - WITHOUT_ARGUMENTS


def test_every_error_has_a_row() -> None:
    kinds = {
        name
        for name, each in vars(errors).items()
        if isinstance(each, type) and issubclass(each, KvcoreError) and each is not KvcoreError
    }
    assert {type(row.error).__name__ for row in ROWS} == kinds - ELSEWHERE - POOL_LAYER


def test_an_error_survives_the_way_to_another_process() -> None:
    error = errors.TooManyTokens(request="r", num_tokens=5, requested=6)
    copy = pickle.loads(pickle.dumps(error))
    check_error(copy, error)
