# SPDX-License-Identifier: Apache-2.0
"""The tokens of a request, packed in chunks, are the sequence that a list would be."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.types.tokens import CHUNK_BYTES, MAX_TOKEN, PackedTokens

CHUNK = CHUNK_BYTES // 4
EDGES = (0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK + 5)


@given(st.lists(st.lists(st.integers(0, MAX_TOKEN), max_size=2 * CHUNK), max_size=4))
def test_tokens_that_come_in_parts_are_those_that_come_at_once(parts: list[list[int]]) -> None:
    packed, tokens = PackedTokens(), list[int]()
    for part in parts:
        packed, tokens = packed.extend(part), tokens + part
        assert list(packed) == tokens
        assert len(packed) == packed.length == len(tokens)
    assert packed == PackedTokens().extend(tokens)


@pytest.mark.parametrize("length", EDGES)
def test_a_slice_is_that_of_a_list(length: int) -> None:
    tokens = list(range(length))
    packed = PackedTokens().extend(tokens)
    for start in (*EDGES, None, -1):
        for end in (*EDGES, None, -1):
            assert list(packed[start:end]) == tokens[start:end]
            assert packed[start:end] == PackedTokens().extend(tokens[start:end])


def test_one_more_token_shares_all_full_chunks_and_is_not_tracked() -> None:
    packed = PackedTokens().extend(range(5 * CHUNK - 1))
    longer = packed.extend([7])
    assert [id(one) for one in longer.full[:4]] == [id(one) for one in packed.full]
    assert len(longer.full) == 5
    assert longer.last == b""
    assert not gc.is_tracked(longer)
