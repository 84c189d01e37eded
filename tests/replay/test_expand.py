# SPDX-License-Identifier: Apache-2.0
"""Tokens made of ids: fixed, and different if the ids differ."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.expand import id_bytes, outputs, prompt_tokens

IDS = st.integers(0, 2**64 - 1)


def test_tokens_are_those_of_every_process_and_version() -> None:
    """Changing these tokens changes the meaning of recorded lists of operations."""
    assert prompt_tokens([0, 182_789], 513, 512).tolist() == [0] * 512 + [182_789]
    large = 5 * 2**29 + 7
    digest = blake2b(str(large).encode()).digest()
    expected = [number % 2**29 for number in struct.unpack("<16I", digest)]
    assert prompt_tokens([large], 40, 512).tolist() == [*expected, *expected, *expected[:8]]


@given(st.lists(IDS, min_size=1, max_size=5), st.sampled_from([1, 3, 16, 512]), st.data())
def test_a_partial_id_has_the_first_of_its_tokens(
    ids: list[int], unit: int, data: st.DataObject
) -> None:
    whole = prompt_tokens(ids, len(ids) * unit, unit)
    num_tokens = data.draw(st.integers((len(ids) - 1) * unit + 1, len(ids) * unit))
    assert prompt_tokens(ids, num_tokens, unit) == whole[:num_tokens]
    assert len(whole) == len(ids) * unit
    assert max(whole) < 2**30


@given(st.integers(0, 2**29 - 1), st.integers(0, 2**29 - 1))
def test_two_ids_differ_in_every_token(one: int, other: int) -> None:
    pairs = zip(prompt_tokens([one], 64, 64), prompt_tokens([other], 64, 64), strict=True)
    assert all((a != b) == (one != other) for a, b in pairs)


def test_large_ids_differ_too() -> None:
    ids = [7, 7 + 2**29, 7 + 2**30, 7 + 2**63, 2**64 - 1]
    assert len({id_bytes(each, 2) for each in ids}) == len(ids)


def test_two_passes_over_many_ids_agree() -> None:
    ids = list(range(10_000))
    assert prompt_tokens(ids, 20_000, 2) == prompt_tokens(ids, 20_000, 2)


@pytest.mark.parametrize("position", [0, 1, 4095])
def test_outputs_are_no_prompts_and_differ_between_requests(position: int) -> None:
    tokens = [outputs(request, position + 1)[position] for request in range(20_000)]
    assert len(set(tokens)) == len(tokens)
    assert all(2**30 <= token < 2**31 for token in tokens)


def test_outputs_begin_anew_behind_the_largest_token() -> None:
    last = (2**30 - 4) * pow(2654435761, -1, 2**30) % 2**30  # whose first output is 2**31 - 4
    tokens = outputs(last, 10)
    first = tokens.index(2**30)
    assert list(tokens[first:]) == list(range(2**30, 2**30 + 10 - first))
    assert list(tokens[:first]) == list(range(2**31 - first, 2**31))
