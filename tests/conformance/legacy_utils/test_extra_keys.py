# SPDX-License-Identifier: Apache-2.0
"""Seed 001's extra keys: which blocks carry an adapter's number and which a media item's hash."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.legacy.v1_0_8.errors import BeyondMedia, NoMediaHash
from kvcore.legacy.v1_0_8.kv_cache_utils import (
    _gen_lora_extra_hash_keys,
    _gen_mm_extra_hash_keys,
    generate_block_hash_extra_keys,
    need_extra_keys,
)
from kvcore.types.errors import CountMismatch, KvcoreError
from tests.conformance.legacy_utils.requests import EngineRequest, Lora, with_media

IMAGES = (("a", 0, 5), ("b", 10, 5))


@pytest.mark.seed("S001-27")
def test_extra_keys_are_needed_with_media_or_an_adapter() -> None:
    plain = EngineRequest("r", [1, 2, 3])
    assert need_extra_keys(plain) is False
    assert need_extra_keys(with_media(10, ("a", 0, 5))) is True
    assert need_extra_keys(with_media(10, lora=1)) is True
    assert need_extra_keys(EngineRequest("r", [1], lora_request=Lora(0))) is True


@pytest.mark.seed("S001-28", "S001-29")
def test_an_adapter_marks_every_block_by_its_number() -> None:
    request = with_media(20, lora=7)
    assert _gen_lora_extra_hash_keys(request) == [7]
    assert _gen_lora_extra_hash_keys(EngineRequest("r", [1])) == []
    assert generate_block_hash_extra_keys(request, 0, 4, 0) == ((7,), 0)
    assert generate_block_hash_extra_keys(request, 16, 20, 0) == ((7,), 0)


@pytest.mark.seed("S001-29", "S001-30")
def test_the_adapter_comes_first_and_none_is_none() -> None:
    request = with_media(20, ("a", 0, 2), ("b", 2, 2), lora=7)
    assert generate_block_hash_extra_keys(request, 0, 4, 0) == ((7, "a", "b"), 2)
    assert generate_block_hash_extra_keys(EngineRequest("r", [1, 2]), 0, 2, 0) == (None, 0)
    assert generate_block_hash_extra_keys(with_media(20, ("a", 8, 2)), 0, 4, 0) == (None, 0)


@pytest.mark.seed("S001-30", "S001-35", "S001-36")
@pytest.mark.parametrize(
    ("start", "end", "index", "keys", "following"),
    [
        (0, 5, 0, ("a",), 1),  # the block ends with the item
        (0, 3, 0, ("a",), 0),  # the item goes on in the next block
        (3, 6, 0, ("a",), 1),
        (6, 10, 1, None, 1),  # before the second item
        (6, 12, 1, ("b",), 1),
        (0, 16, 0, ("a", "b"), 2),  # both in one block, in order
        (12, 18, 1, ("b",), 2),
    ],
)
def test_a_block_takes_the_hashes_of_what_it_overlaps(
    start: int, end: int, index: int, keys: Any, following: int
) -> None:
    request = with_media(20, *IMAGES)
    assert generate_block_hash_extra_keys(request, start, end, index) == (keys, following)


@pytest.mark.seed("S001-31")
def test_a_key_is_the_hash_alone_wherever_the_item_begins() -> None:
    early, late = with_media(8, ("a", 1, 3)), with_media(8, ("a", 2, 3))
    assert _gen_mm_extra_hash_keys(early, 0, 8, 0) == (["a"], 1)
    assert _gen_mm_extra_hash_keys(late, 0, 8, 0) == (["a"], 1)


@pytest.mark.seed("S001-32")
@pytest.mark.parametrize("hashes", [[], ["a"], ["a", "b", "c"], None])
def test_positions_and_hashes_must_be_as_many(hashes: Any) -> None:
    request = with_media(20, *IMAGES)
    request.mm_hashes = hashes
    with pytest.raises(CountMismatch, match=r"request 'r' was given \d .* expected 2") as caught:
        generate_block_hash_extra_keys(request, 0, 4, 0)
    assert isinstance(caught.value, ValueError)


@pytest.mark.seed("S001-33")
def test_behind_the_last_item_no_item_is_looked_at() -> None:
    # Items are sorted, so the last one tells: the first would overlap and is not looked at.
    unsorted = with_media(40, ("long", 0, 40), ("last", 4, 2))
    assert _gen_mm_extra_hash_keys(unsorted, 7, 10, 0) == ([], 0)
    assert _gen_mm_extra_hash_keys(unsorted, 6, 10, 0) == (["long"], 0)


@pytest.mark.seed("S001-34")
def test_a_negative_index_counts_from_the_end() -> None:
    request = with_media(20, *IMAGES)
    assert _gen_mm_extra_hash_keys(request, 10, 15, -1) == (["b"], 2)
    assert _gen_mm_extra_hash_keys(request, 0, 15, -2) == (["a", "b"], 2)
    with pytest.raises(BeyondMedia, match="index -3 reaches before the first of 2") as caught:
        _gen_mm_extra_hash_keys(request, 0, 15, -3)
    assert isinstance(caught.value, AssertionError)
    # Where nothing is left to look at, the index is handed back as it came.
    assert _gen_mm_extra_hash_keys(request, 16, 20, -1) == ([], -1)


@pytest.mark.seed("S001-37")
def test_an_item_that_ends_where_a_block_starts_counts_here() -> None:
    request = with_media(20, *IMAGES)  # the first has tokens 0 to 4
    assert _gen_mm_extra_hash_keys(request, 5, 10, 0) == (["a"], 1)
    assert _gen_mm_extra_hash_keys(request, 6, 10, 0) == ([], 1)


@pytest.mark.seed("S001-38")
def test_an_item_needs_a_hash() -> None:
    request = with_media(20, ("a", 0, 5), (None, 10, 5))
    assert _gen_mm_extra_hash_keys(request, 0, 4, 0) == (["a"], 0)
    with pytest.raises(NoMediaHash, match="media item 1") as caught:
        _gen_mm_extra_hash_keys(request, 0, 12, 0)
    assert isinstance(caught.value, AssertionError)
    assert isinstance(caught.value, KvcoreError)


def test_positions_may_be_mappings() -> None:
    request: Any = with_media(20, *IMAGES)
    request.mm_positions = [{"offset": 0, "length": 5}, {"offset": 10, "length": 5}]
    assert _gen_mm_extra_hash_keys(request, 3, 12, 0) == (["a", "b"], 1)
