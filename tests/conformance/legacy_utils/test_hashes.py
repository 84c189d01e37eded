# SPDX-License-Identifier: Apache-2.0
"""Seed 001's hash records: the seed of the chain, what takes part in a key, one a full block."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.legacy.v1_0_8 import kv_cache_utils
from kvcore.legacy.v1_0_8.block_hashes import content_key, make_none_hash, sha256
from kvcore.legacy.v1_0_8.kv_cache_utils import (
    NONE_HASH,
    BlockHashType,
    hash_block_tokens,
    hash_request_tokens,
)
from kvcore.types.errors import InvalidCount
from kvcore.types.keys import KEY_SIZE
from tests.conformance.legacy_utils.requests import EngineRequest, full_blocks, with_media

FUNCTIONS = [pytest.param(hash, id="builtin"), pytest.param(sha256, id="sha256")]
PROGRAM = """
from kvcore.legacy.v1_0_8.block_hashes import sha256
from kvcore.legacy.v1_0_8.kv_cache_utils import NONE_HASH, hash_block_tokens
print(NONE_HASH, hash_block_tokens(sha256, None, [1, 2, 3]).hash_value)
"""


def said_with(seed: str | None) -> list[int]:
    """Return the chain's seed and a first hash from a process with this PYTHONHASHSEED."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in done.stdout.split()]


@pytest.mark.seed("S001-01", "S001-02")
def test_the_chain_begins_with_the_hash_of_a_seed_or_at_random() -> None:
    assert make_none_hash("7") == sha256("7") != make_none_hash("8")
    assert make_none_hash(None) != make_none_hash(None)
    assert 0 < make_none_hash(None) < 2**256
    assert type(NONE_HASH) is int
    assert NONE_HASH == kv_cache_utils.NONE_HASH != 0


@pytest.mark.seed("S001-01", "S001-02")
def test_processes_with_one_seed_share_their_hashes() -> None:
    first = said_with("42")
    assert first[0] == sha256("42")
    assert said_with("42") == first
    assert said_with(None)[0] != said_with(None)[0]


@pytest.mark.seed("S001-03")
def test_sha256_is_that_of_a_pickle_as_a_number() -> None:
    value = (3, (1, 2), ("a",))
    digest = hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).hexdigest()
    assert sha256(value) == int(digest, 16)
    assert sha256((3, (1, 2), None)) != sha256((3, (1, 3), None))


@pytest.mark.seed("S001-04", "S001-05")
def test_all_of_a_record_is_its_key() -> None:
    assert BlockHashType._fields == ("hash_value", "token_ids", "extra_keys")
    record = BlockHashType(5, (1, 2))
    others = [
        BlockHashType(6, (1, 2)),
        BlockHashType(5, (1, 3)),
        BlockHashType(5, (1, 2), ("a",)),
        BlockHashType(5, (1, 2), (1,)),
        BlockHashType(5, (1, 2, 0)),
        BlockHashType(5, (1,)),
    ]
    assert record.extra_keys is None
    assert record == BlockHashType(5, (1, 2), None)
    assert record not in others
    assert {record: 1}[BlockHashType(5, (1, 2))] == 1
    keys = {content_key(each) for each in (record, *others)}
    assert len(keys) == 1 + len(others)
    assert {len(key) for key in keys} == {KEY_SIZE}


scalars = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.sampled_from(["", "a", "b", "é", "\ud800"]),
    st.sampled_from([b"", b"a"]),
    st.integers(-(2**70), 2**70),
    st.booleans(),
)
extras = st.one_of(st.none(), st.tuples(scalars), st.tuples(scalars, scalars))
extras = st.one_of(extras, st.tuples(extras, scalars))
tokens = st.one_of(st.integers(-2, 3), st.just(2**64)).filter(lambda token: token is not None)
records = st.builds(
    BlockHashType,
    st.integers(-2, 2),
    st.lists(tokens, max_size=3).map(tuple),
    extras,
)


@pytest.mark.seed("S001-04", "S001-05")
@given(first=records, second=records)
def test_the_core_tells_records_apart_exactly_where_they_differ(
    first: BlockHashType, second: BlockHashType
) -> None:
    assert (content_key(first) == content_key(second)) == (first == second)


@pytest.mark.seed("S001-39", "S001-44")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("extra", [None, ("a", 3)])
def test_a_record_is_the_hash_of_parent_tokens_and_extra_keys(function: Any, extra: Any) -> None:
    record = hash_block_tokens(function, 123, [1, 2, 3], extra)
    assert record == BlockHashType(function((123, (1, 2, 3), extra)), (1, 2, 3), extra)
    assert hash_block_tokens(function, 123, (1, 2, 3), extra) == record


@pytest.mark.seed("S001-39", "S001-44")
def test_a_hash_function_gets_one_tuple() -> None:
    requested: list[object] = []

    def remember(value: object) -> int:
        requested.append(value)
        return 9

    assert hash_block_tokens(remember, 8, [1], None).hash_value == 9
    assert requested == [(8, (1,), None)]


@pytest.mark.seed("S001-40")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_parent_is_the_seed_of_the_chain_and_zero_is_a_parent(function: Any) -> None:
    first = hash_block_tokens(function, None, [1, 2])
    assert first.hash_value == function((NONE_HASH, (1, 2), None))
    # The original takes a parent of 0 for none; here a chain that hashes to 0 goes on from 0.
    assert hash_block_tokens(function, 0, [1, 2]).hash_value == function((0, (1, 2), None))


@pytest.mark.seed("S001-41", "S001-42", "S001-44")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("num_tokens", [0, 3, 4, 11])
def test_each_full_block_has_a_record_and_the_tail_none(function: Any, num_tokens: int) -> None:
    prompt, generated = list(range(num_tokens // 2)), list(range(num_tokens // 2, num_tokens))
    found = hash_request_tokens(function, 4, EngineRequest("r", prompt + generated))
    assert [each.token_ids for each in found] == full_blocks(prompt + generated)
    parent = NONE_HASH
    for record in found:
        assert record.hash_value == function((parent, record.token_ids, None))
        parent = record.hash_value


@pytest.mark.seed("S001-42")
def test_a_difference_changes_every_later_hash() -> None:
    one = hash_request_tokens(sha256, 2, EngineRequest("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    two = hash_request_tokens(sha256, 2, EngineRequest("b", [1, 2, 3, 0, 5, 6, 7, 8]))
    same = [mine.hash_value == theirs.hash_value for mine, theirs in zip(one, two, strict=True)]
    assert same == [True, False, False, False]
    assert one[2].token_ids == two[2].token_ids


@pytest.mark.seed("S001-41", "S001-43")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_media_go_on_from_block_to_block(function: Any) -> None:
    request = with_media(12, ("a", 1, 5), ("b", 7, 1), lora=3)
    found = hash_request_tokens(function, 3, request)
    assert [each.extra_keys for each in found] == [
        (3, "a"),  # tokens 0 to 2; the image has 1 to 5
        (3, "a"),  # ends where this block ends
        (3, "b"),
        (3,),  # nothing starts or ends here
    ]


def test_a_block_size_is_a_count() -> None:
    with pytest.raises(InvalidCount, match="block_size is 0"):
        hash_request_tokens(hash, 0, EngineRequest("r", [1]))
