# SPDX-License-Identifier: Apache-2.0
"""The unlimited cache, counted from ids, against sets of the tokens themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.replay.bounds.ideal import Ideal
from kvcore.replay.expand import prompt_tokens
from kvcore.replay.trace_facts import Counting
from kvcore.replay.workload import TraceRequest
from tests.replay.small_traces import traces

BLOCK_SIZES = st.sampled_from([1, 2, 3, 4, 5, 8, 16])


def look_up(ideal: Ideal, request: TraceRequest) -> int:
    return ideal.look_up(request.hash_ids, request.prompt_len, request.unit)


@given(traces(), BLOCK_SIZES)
def test_it_finds_what_a_set_of_token_prefixes_has(
    requests: list[TraceRequest], block_size: int
) -> None:
    ideal = Ideal(block_size)
    filled: set[tuple[int, ...]] = set()
    for request in requests:
        tokens = prompt_tokens(request.hash_ids, request.prompt_len, request.unit).tolist()
        ends = range(block_size, len(tokens) + 1, block_size)
        found = 0
        for end in ends:
            if end == len(tokens) or tuple(tokens[:end]) not in filled:
                break
            found = end
        assert look_up(ideal, request) == found
        filled.update(tuple(tokens[:end]) for end in ends)
    assert ideal.looked_up_tokens == sum(each.prompt_len for each in requests)


@pytest.mark.parametrize(("prompt_len", "found"), [(12, 8), (13, 12), (11, 8), (4, 0)])
def test_a_token_is_left_to_compute(prompt_len: int, found: int) -> None:
    ideal = Ideal(4)
    ids = [5, 6][: -(-prompt_len // 8)]
    assert ideal.look_up(ids, prompt_len, 8) == 0
    assert ideal.look_up(ids, prompt_len, 8) == found


def test_an_id_behind_another_prefix_is_another_content() -> None:
    ideal = Ideal(4)
    ideal.look_up([1, 2, 3], 12, 4)
    assert ideal.look_up([2, 2, 3], 12, 4) == 0
    assert ideal.look_up([1, 2, 4], 12, 4) == 8


def test_reuse_counts_prefixes_of_ids_partial_ones_too() -> None:
    requests = [
        TraceRequest(1, 0.0, 9, 1, [1, 2, 3], 4),
        TraceRequest(2, 0.0, 9, 1, [1, 2, 3], 4),
        TraceRequest(3, 0.0, 12, 1, [1, 4, 3], 4),
    ]
    counting = Counting(4)
    counting.read(requests)
    facts = counting.facts("made", 0)
    assert (facts.num_ids, facts.repeated_ids) == (9, 4)
